"""The gradient of our trainer in one turn beside `GRPOTrainer`'s, the same completions forced on
both.

    OMP_NUM_THREADS=1 python -m benchmarks.fidelity.trl_gradient --json  # minutes

Each setting trains a tiny model for two updates on the same batch of completions (so that in the
second one the ratio is not 1 and the reference is not the model), in float32, and compares both
gradients. The last line of `--json` holds `same_gradient: {setting: {"largest": ..., "apart":
...}}`: the largest entry, and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from agentic_prompting import ESPLConfig, ESPLTrainer, MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.rollout import BatchEngine, FreeText, Sample, SampleRequest
from agentic_prompting.sandbox.policy import (
    build_policy,
    sandbox_spec,
    save_policy,
    world_tokenizer,
)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
BETAS = (0.0, 0.1)
LEVELS = ("token", "sequence")
ACCUMULATIONS = (1, 2)
ROUNDING = 1e-6  # of float32, beside the gradient's largest entry or 1
SYSTEM = "answer in one word ."
QUESTIONS = ("which country ?", "what is the capital of Kenya ?")
GROUP = 4
LONGEST = 9


class _Gradients(TrainerCallback):
    """Keeps the gradient of every update."""

    def __init__(self) -> None:
        self.of_updates: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **_: Any,
    ) -> None:
        parts = []
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            parts.append(gradient.detach().float().flatten())
        self.of_updates.append(torch.cat(parts))


def gradients(
    trainer_name: str, policy: Path, folder: Path, order: int = 0, **settings: Any
) -> list[torch.Tensor]:
    """The gradient of each update of one trainer, completions forced.

    Args:
        trainer_name (`str`): `trl`, `ours`, or `espl` (a population of one prompt that does not
            change).
        policy (`Path`): The model.
        folder (`Path`): Where it may write.
        order (`int`, *optional*, defaults to `0`): Seed of the order in which a batch's rows are
            put.
        **settings: Of [`~trl.GRPOConfig`].
    """
    tokenizer = AutoTokenizer.from_pretrained(policy)

    # The forced completions, and the functions by which the trainers get them.
    completion_counts = Counter[tuple[int, ...]]()

    def completion(prompt: Sequence[int]) -> list[int]:
        """The next completion of a prompt: its number in the group sets its length, and whether it
        has an end.
        """
        completion_counts[tuple(prompt)] += 1
        number = completion_counts[tuple(prompt)]
        generator = torch.Generator().manual_seed(1000 * len(prompt) + number)
        length = 2 + 3 * number % LONGEST
        ids = torch.randint(20, len(tokenizer) - 20, (length,), generator=generator).tolist()
        if number % 2:
            return [*ids[: LONGEST - 1], tokenizer.eos_token_id]
        return [*ids, *ids][:LONGEST]

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        torch.manual_seed(order)  # the next use of it is the order of the batch's rows
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Forced(GRPOTrainer):
        def _generate_single_turn(
            self, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any
        ) -> tuple[list[list[int]], None]:
            return [completion(ids) for ids in prompt_ids], None

    def sample(requests: Sequence[SampleRequest]) -> list[Sample]:
        completions = [completion(request.context) for request in requests]
        return [Sample(ids, finished=ids[-1] == tokenizer.eos_token_id) for ids in completions]

    arguments = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "max_steps": 2,
        "num_iterations": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "scale_rewards": "group",
        "loss_type": "dapo",
        "beta": 0.0,
        "gradient_accumulation_steps": 1,
    }

    # The classes. ESPLTrainer puts the system prompt in itself; the other two read it in the rows.
    system = [{"role": "system", "content": SYSTEM}]
    options: dict[str, Any] = {}
    if trainer_name == "trl":
        trainer_class = Forced
        config_class = GRPOConfig
    elif trainer_name == "ours":
        trainer_class = MultiTurnGRPOTrainer
        config_class = MultiTurnGRPOConfig
        options = {"environment": None}
    else:
        trainer_class = ESPLTrainer
        config_class = ESPLConfig
        options = {"environment": None, "initial_prompt": SYSTEM}
        arguments |= {"mode": "rl", "prompts_per_step": 1}
        system = []
    arguments |= settings
    accumulation = arguments["gradient_accumulation_steps"]
    arguments["per_device_train_batch_size"] = 2 * GROUP // accumulation
    rows = [{"prompt": [*system, {"role": "user", "content": question}]} for question in QUESTIONS]

    callback = _Gradients()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward,
        args=config_class(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[callback],
        **options,
    )
    if trainer_name != "trl":
        assert trainer.spec.grammar == FreeText(), "one turn, whatever is in it"
        trainer.policy = BatchEngine(sample, on_callers_thread=True)
    trainer.train()
    return callback.of_updates


def largest_difference(theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> float:
    """The largest difference of two trainers' gradients, of all updates."""
    assert len(theirs) == len(ours) == 2
    return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))


def grid() -> Iterator[dict[str, Any]]:
    """Every setting that TRL takes."""
    for loss, beta, level, accumulation in product(LOSSES, BETAS, LEVELS, ACCUMULATIONS):
        yield {
            "loss_type": loss,
            "beta": beta,
            "importance_sampling_level": level,
            "gradient_accumulation_steps": accumulation,
        }


def compare(settings: dict[str, Any], policy: Path, folder: Path) -> dict[str, float]:
    """Both trainers under one setting: the gradient's largest entry, and the largest difference."""
    theirs = gradients("trl", policy, folder / "trl", **settings)
    ours = gradients("ours", policy, folder / "ours", **settings)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    return {"largest": largest, "apart": largest_difference(theirs, ours)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON, last")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = world_tokenizer()
        save_policy(build_policy(tokenizer), tokenizer, sandbox_spec(), folder / "policy")
        for settings in grid():
            label = " ".join(str(value) for value in settings.values())
            try:
                results[label] = compare(settings, folder / "policy", folder)
            except ValueError as error:  # a combination that TRL refuses
                results[label] = {"refused": str(error)}
            print(label, results[label], flush=True)
    if options.json:
        print(json.dumps({"same_gradient": results}))
    compared = [result for result in results.values() if "apart" in result]
    differs = any(result["apart"] > ROUNDING * max(1.0, result["largest"]) for result in compared)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
