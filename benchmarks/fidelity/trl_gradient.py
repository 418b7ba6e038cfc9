"""The gradient of our trainer in one turn beside `GRPOTrainer`'s, the same completions forced on both.

    OMP_NUM_THREADS=1 python -m benchmarks.fidelity.trl_gradient --json  # minutes

Each setting trains a tiny model for two updates on the same batch of completions (so that in the second one the ratio
is not 1 and the reference is not the model), in float32, and compares both gradients. The last line of `--json` holds
`same_gradient: {setting: {"largest": ..., "apart": ...}}`: the largest entry, and the largest difference.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentic_prompting import ESPLConfig, ESPLTrainer, MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.rollout import BatchEngine, FreeText, Sample
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
        self.kept: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        parts = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in model.parameters()
        ]
        self.kept.append(torch.cat([part.detach().float().flatten() for part in parts]))


def gradients(
    kind: str, policy: Path, folder: Path, order: int = 0, **settings: Any
) -> list[torch.Tensor]:
    """The gradient of each update of one trainer, completions forced.

    Args:
        kind (`str`): `trl`, `ours`, or `espl` (a population of one prompt that does not change).
        policy (`Path`): The model.
        folder (`Path`): Where it may write.
        order (`int`, *optional*, defaults to `0`): Seed of the order in which a batch's rows are put.
        **settings: Of [`~trl.GRPOConfig`].
    """
    tokenizer = AutoTokenizer.from_pretrained(policy)
    seen = Counter[tuple[int, ...]]()

    def completion(prompt: Sequence[int]) -> list[int]:
        """The next completion of a prompt: as many tokens, ended or cut off, as its number in the group says."""
        seen[tuple(prompt)] += 1
        number = seen[tuple(prompt)]
        draw = torch.Generator().manual_seed(1000 * len(prompt) + number)
        ids = torch.randint(
            20, len(tokenizer) - 20, (2 + 3 * number % LONGEST,), generator=draw
        ).tolist()
        return (
            [*ids[: LONGEST - 1], tokenizer.eos_token_id] if number % 2 else [*ids, *ids][:LONGEST]
        )

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        torch.manual_seed(order)  # the next use of it is the order of the batch's rows
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Forced(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            return [completion(ids) for ids in prompt_ids], None

    def sample(requests: Sequence[Any]) -> list[Sample]:
        written = [completion(request.context) for request in requests]
        return [Sample(ids, finished=ids[-1] == tokenizer.eos_token_id) for ids in written]

    config = {"trl": GRPOConfig, "ours": MultiTurnGRPOConfig, "espl": ESPLConfig}[kind]
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
        **({"mode": "rl", "prompts_per_step": 1} if kind == "espl" else {}),
        **settings,
    }
    arguments["per_device_train_batch_size"] = (
        2 * GROUP // arguments.get("gradient_accumulation_steps", 1)
    )
    arguments.setdefault("gradient_accumulation_steps", 1)
    system = [] if kind == "espl" else [{"role": "system", "content": SYSTEM}]
    rows = [{"prompt": [*system, {"role": "user", "content": question}]} for question in QUESTIONS]
    made: dict[str, Any] = {
        "trl": {},
        "ours": {"environment": None},
        "espl": {"environment": None, "initial_prompt": SYSTEM},
    }[kind]
    kept = _Gradients()
    trainer = {"trl": Forced, "ours": MultiTurnGRPOTrainer, "espl": ESPLTrainer}[kind](
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward,
        args=config(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[kept],
        **made,
    )
    if kind != "trl":
        assert trainer.spec.grammar == FreeText(), "one turn, whatever is in it"
        trainer.policy = BatchEngine(sample, on_callers_thread=True)
    trainer.train()
    return kept.kept


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The largest difference of two trainers' gradients, of all updates."""
    assert len(one) == len(other) == 2
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def grid() -> Iterator[dict[str, Any]]:
    """Every setting that TRL takes."""
    for loss, beta, level, accumulation in product(LOSSES, BETAS, LEVELS, ACCUMULATIONS):
        yield {
            "loss_type": loss,
            "beta": beta,
            "importance_sampling_level": level,
            "gradient_accumulation_steps": accumulation,
        }


def compared(settings: dict[str, Any], policy: Path, folder: Path) -> dict[str, float]:
    """Both trainers under one setting: the gradient's largest entry, and the largest difference."""
    theirs, ours = (gradients(kind, policy, folder / kind, **settings) for kind in ("trl", "ours"))
    return {"largest": max(float(one.abs().max()) for one in theirs), "apart": apart(theirs, ours)}


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
                results[label] = compared(settings, folder / "policy", folder)
            except ValueError as error:  # a combination that TRL refuses
                results[label] = {"refused": str(error)}
            print(label, results[label], flush=True)
    if options.json:
        print(json.dumps({"same_gradient": results}))
    far = [
        result
        for result in results.values()
        if "apart" in result and result["apart"] > ROUNDING * max(1.0, result["largest"])
    ]
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
