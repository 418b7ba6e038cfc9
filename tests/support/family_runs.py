"""Two steps of training of a family's tiny model, in this process or, as a script, in several.

python family_runs.py '{"backend": "zero3", "folder": "...", "jobs": [["Llama", "lora"]]}'    # under `launch`
"""

import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
from datasets import Dataset

from agentic_prompting import LLMEnvironment, MultiTurnGRPOTrainer
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE, world_tokenizer
from support import distributed_backends as backends
from support.families import model_of
from support.training import arguments

QUESTIONS = [{"question": f"which country {i} ?", "answers": ["Kenya"]} for i in range(8)]


def saved(family, folder):
    """A family's model with the sandbox's tokenizer, as a folder."""
    tokenizer = world_tokenizer()
    model_of(family, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


WHOLE = {
    "Mamba": ["dt_proj", "out_proj", "x_proj", "lm_head"]
}  # what has to stay whole, over four bits


def of_its_shape(tensor, *args, **kwargs):
    """Random values that depend on a tensor's shape alone: loading a model may draw random numbers,
    as that of Qwen3-Next under ZeRO-3 does, and adapters begin with the next ones.
    """
    with torch.no_grad():
        drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
        return tensor.copy_((2 * drawn - 1) / tensor.shape[1] ** 0.5)


def train(family, way, folder, processes=1, whole=WHOLE, **changes):
    """A trainer that has trained for two steps: all weights (`full`), `lora`, or `qlora`, over
    weights of four bits.
    """
    from peft import LoraConfig

    options = {}
    if way != "full":
        targets = (
            ["in_proj", "x_proj"] if family == "Mamba" else "all-linear"
        )  # peft refuses its out_proj
        options["peft_config"] = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    loading = (
        {"router_aux_loss_coef": 0.0} if family == "Granite hybrid" else {}
    )  # TRL cannot compute it
    if way == "qlora":
        from transformers import BitsAndBytesConfig

        bits = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=whole.get(family))
        loading |= {"model_init_kwargs": {"quantization_config": bits}}
    folder = Path(folder)
    args = arguments(
        folder / "out",
        per_device_train_batch_size=8 // processes,
        num_generations=4,
        max_turns=1,
        max_turn_tokens=8,
        max_completion_length=24,
        full_determinism=True,
        shuffle_dataset=False,
        beta=0.0,
        **{"learning_rate": 1e-3 if way == "full" else 2e-2, **loading, **changes},
    )
    with mock.patch("torch.nn.init.kaiming_uniform_", of_its_shape):
        trainer = MultiTurnGRPOTrainer(
            model=str(saved(family, folder / "model")),
            args=args,
            prompt_template=SANDBOX_TEMPLATE,
            environment=LLMEnvironment(ScriptedChat(lambda *_: "a")),
            train_dataset=Dataset.from_list(QUESTIONS),
            reward_funcs=lambda rollout, **columns: [
                float(sum(episode.ids) % 7) for episode in rollout
            ],
            **options,
        )
    trainer.train()
    return trainer


def outcome(trainer):
    names = (
        "loss",
        "grad_norm",
        "reward",
        "sampling/logp_difference/mean",
        "sampling/logp_difference/max",
    )
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **backends.stated(trainer),
        "log": [{name: one[name] for name in names if name in one} for one in log],
    }


def main(settings):
    backends.prepare(settings["backend"], settings["folder"])
    seen = {}
    for family, way in settings["jobs"]:
        try:
            where = Path(settings["folder"]) / f"{family} {way}"
            # Without the auxiliary loss of experts, which is of each process's own tokens.
            trained = train(family, way, where, settings["processes"], router_aux_loss_coef=0.0)
            seen[f"{family} {way}"] = outcome(trained)
        except Exception:
            seen[f"{family} {way}"] = {"error": traceback.format_exc()[-3000:]}
    backends.leave(settings["folder"], seen)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
