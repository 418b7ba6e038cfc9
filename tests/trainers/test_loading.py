"""What a trainer loads: adapters to train on, tokenizers without image processors; and what it
refuses to load.
"""

import json
import shutil

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import (
    ESPLTrainer,
    LLMEnvironment,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    PromptAgent,
    PromptR1Reward,
)
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE, world_tokenizer
from support.families import LINEAR, SHAPE
from support.training import Acts, arguments, trainer_for, vars_for

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class Checked(LLMEnvironment):
    """An environment that must not be asked anything."""

    def check(self):
        raise AssertionError("the large LLM was called before the policy was refused")


@pytest.fixture(scope="module")
def adapter(tiny_policy, tmp_path_factory):
    """The folder of an adapter that has been moved away from zero."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_policy).save_pretrained(folder)
    return folder


def refused(model, tmp_path, rows, match, **options):
    options["processing_class"] = world_tokenizer()
    with pytest.raises(ValueError, match=match):
        trainer_for(model, tmp_path / "out", rows, environment=Checked(Oracle()), options=options)


# --- nothing to train -----------------------------------------------------------------------------


def test_an_adapter_loaded_frozen_is_refused(tiny_policy, adapter, tmp_path, rows):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), adapter)
    refused(model, tmp_path, rows, "is_trainable=True")


def test_a_frozen_model_without_adapter_is_refused(tiny_policy, tmp_path, rows):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy).requires_grad_(False)
    refused(model, tmp_path, rows, "frozen")
    trainer_for(model, tmp_path / "out", rows, options={"peft_config": LORA})


@pytest.mark.parametrize(
    ("spoil", "cure"),
    [
        (lambda model: model.merge_adapter(), "unmerge_adapter"),
        (lambda model: model.base_model.disable_adapter_layers(), "enable_adapter_layers"),
    ],
    ids=["merged", "disabled"],
)
def test_an_adapter_without_effect_is_refused(tiny_policy, adapter, tmp_path, rows, spoil, cure):
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    spoil(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    refused(model, tmp_path, rows, cure)


def test_prompts_alone_evolve_under_frozen_weights(tiny_policy, tmp_path, rows):
    from agentic_prompting import ESPLConfig

    model = AutoModelForCausalLM.from_pretrained(tiny_policy).requires_grad_(False)
    args = {**vars_for(tmp_path / "out"), "prompts_per_step": 2, "gradient_accumulation_steps": 1}
    ESPLTrainer(
        model,
        PromptR1Reward(),
        ESPLConfig(**args, mode="reflection"),
        rows,
        reference=ScriptedChat(["x"]),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )


# --- an adapter's folder --------------------------------------------------------------------------


def test_an_adapters_folder_is_trained_on(tiny_policy, adapter, tmp_path, rows):
    trainer = trainer_for(adapter, tmp_path / "out", rows, max_steps=1, beta=0.0)
    saved = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_policy), adapter
    ).state_dict()
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert all(torch.equal(value, saved[name]) for name, value in start.items())
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    moved = [
        name
        for name, value in trainer.model.state_dict().items()
        if not torch.equal(value, start[name])
    ]
    assert moved and all("lora" in name for name in moved)
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_config.json").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    again = PromptAgent.from_pretrained(tmp_path / "out", LLMEnvironment(Oracle()))
    assert again.policy is not None


def test_a_new_adapter_on_an_adapter_is_refused(adapter, tmp_path, rows):
    refused(adapter, tmp_path, rows, "is an adapter", peft_config=LORA)


def test_a_folder_with_its_base_models_config_too(tiny_policy, adapter, tmp_path, rows):
    """transformers would load it as the base model with the adapter frozen inside, and train the
    base model.
    """
    folder = shutil.copytree(adapter, tmp_path / "model")
    shutil.copy(tiny_policy / "config.json", folder)
    model = trainer_for(folder, tmp_path / "out", rows).model
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained and all("lora" in name for name in trained)


# --- GGUF -----------------------------------------------------------------------------------------


def test_a_gguf_file_by_name_is_refused(tiny_policy, tmp_path, rows):
    with pytest.raises(ValueError, match="load_gguf"):
        trainer_for(
            tiny_policy,
            tmp_path / "out",
            rows,
            environment=Checked(Oracle()),
            model_init_kwargs={"gguf_file": "model.gguf"},
        )


def test_a_model_from_gguf_trains_and_saves(tmp_path, rows):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    write_gguf(tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokenizer.chat_template = world_tokenizer().chat_template
    trainer = MultiTurnGRPOTrainer(
        model,
        lambda rollout, **_: [float(sum(episode.ids) % 5) for episode in rollout],
        MultiTurnGRPOConfig(**vars_for(tmp_path / "out")),
        rows,
        processing_class=tokenizer,
        environment=None,
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(
        again.get_input_embeddings().weight, trainer.model.get_input_embeddings().weight
    )


@pytest.mark.parametrize("options", [{"peft_config": LORA}, {}], ids=["adapter", "beta"])
def test_a_gguf_model_loaded_twice_is_refused(tmp_path, rows, options):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    write_gguf(tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    refused(model, tmp_path, rows, "load_gguf", **options)


# --- models that also see -------------------------------------------------------------------------

# As in the repositories of Qwen3.5: both name classes that need torchvision or Pillow.
IMAGES = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
}
VIDEOS = {
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 4,
}


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """The folder of a tiny Qwen3.5 with all files that its repositories have."""
    tokenizer = world_tokenizer()
    text = {
        **SHAPE,
        **LINEAR,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen3_5")
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return folder


@pytest.mark.parametrize(
    "peft_config", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["full", "lora"]
)
def test_qwen3_5_trains_by_name_without_torchvision(sees, tmp_path, rows, peft_config):
    trainer = MultiTurnGRPOTrainer(
        str(sees),
        lambda rollout, **_: [float(sum(episode.ids) % 5) for episode in rollout],
        arguments(tmp_path / "out", learning_rate=1e-2),
        rows,
        prompt_template=SANDBOX_TEMPLATE,
        environment=LLMEnvironment(Oracle()),
        peft_config=peft_config,
    )
    assert type(trainer.processing_class) is type(AutoTokenizer.from_pretrained(sees))
    assert trainer.args.ddp_find_unused_parameters
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert any(
        not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()
    )
    trainer.save_model(tmp_path / "saved")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (tmp_path / "saved" / name).exists() == (peft_config is None)


def test_text_models_look_for_no_unused_weights(tiny_policy, tmp_path, rows):
    assert trainer_for(tiny_policy, tmp_path / "out", rows).args.ddp_find_unused_parameters is None
