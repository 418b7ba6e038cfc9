"""How the sandbox's policies are warm-started: by a recipe, which decides everything, or from the package.

The package comes with the policies of the two demonstrations, each with the fingerprint of its recipe: of what the
policy is shown, what it is, and how it is trained. A recipe with another fingerprint has its policy made anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from huggingface_hub import constants
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ..rollout import SPEC_FILE, AgentSpec, Rollout, rollout_from_trace
from ..trainers import warm_start
from .policy import (
    ARCHITECTURE,
    build_policy,
    copying_exercises,
    keep_freed_memory,
    nonsense,
    save_policy,
)
from .world import World

SHIPPED = tuple(Path(__file__).with_name(f"{name}.npz") for name in ("prompt_r1", "espl"))
"""The warm-started policies of `demo` and `demo --method espl`, in half precision."""

PROBE = 64  # traces, and copying exercises, that a fingerprint reads
SFT: Mapping[str, Any] = {
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "adam_beta2": 0.95,  # .999 averages over more steps than there are
    "weight_decay": 0.0,
}
BATCHES = {"copying exercises": 64, "conversations of mixed quality": 32}

Traces = Callable[
    [int, random.Random], tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
]


@dataclass(frozen=True)
class Recipe:
    """Everything that a warm-started policy depends on.

    Args:
        spec ([`AgentSpec`]): How the policy is asked; saved with it.
        tokenizer (`PreTrainedTokenizerFast`): Its words.
        world ([`World`]): Whose names are in them.
        traces (`Callable`): Writes a number of traces to imitate, and half as many to make nonsense of; see
            [`rollout_from_trace`].
        steps (`int`): Supervised steps of 32 traces.
        copying_steps (`int`): Supervised steps of 64 copying exercises, before those.
        seed (`int`): Decides the first weights and the order of the batches.
        drawn_by (`int` or `str`): The seed that traces and exercises are drawn by.
    """

    spec: AgentSpec
    tokenizer: PreTrainedTokenizerFast
    world: World
    traces: Traces
    steps: int
    copying_steps: int
    seed: int
    drawn_by: int | str

    def rollouts(self, traces: int, exercises: int) -> tuple[list[Rollout], list[Rollout]]:
        """Copying exercises, and conversations to imitate."""
        rng = random.Random(self.drawn_by)
        chat_format = self.spec.tokens(self.tokenizer)
        imitated, plain = (
            [rollout_from_trace(trace, self.spec, chat_format) for trace in some]
            for some in self.traces(traces, rng)
        )
        copied = copying_exercises(self.tokenizer, exercises, rng)
        return copied, [*imitated, *nonsense(plain, self.tokenizer, self.world, rng)]

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the world, the tokenizer, the template, the traces and their mix, the architecture, the settings
        of the training and the seed; not with the versions of libraries."""
        shown = [
            [one.prompt_ids, one.ids, one.mask]
            for some in self.rollouts(PROBE, PROBE)
            for one in some
        ]
        facts = [list(vars(country).values()) for country in self.world.countries]
        trained = [dict(SFT), BATCHES, self.steps, self.copying_steps, self.seed]
        parts = [self.tokenizer.get_vocab(), facts, shown, dict(ARCHITECTURE), trained]
        return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def warm_started(folder: str | Path, recipe: Recipe) -> Path:
    """The folder of a policy that was warm-started by a recipe: the one that comes with the package, or made anew.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        recipe ([`Recipe`]): Decides the policy.
    """
    keep_freed_memory()
    constants.HF_HUB_DISABLE_TELEMETRY = (
        True  # TRL's trainers ping the hub, which has no use for runs of the sandbox
    )
    model, state = Path(folder) / "warm_start", PartialState()
    if not (model / SPEC_FILE).exists():
        policy, from_package = load_shipped(recipe, SHIPPED), True
        if policy is None:
            if state.is_main_process:
                print(
                    "no warm start in the package fits this recipe and seed: it is made here",
                    flush=True,
                )
            policy, from_package = make_policy(recipe, model / "sft"), False
        if state.is_main_process:
            save_policy(policy, recipe.tokenizer, recipe.spec, model)
            print(
                f"warm start of the tiny policy: {'from the package' if from_package else 'done'}",
                flush=True,
            )
    state.wait_for_everyone()
    return model


def make_policy(recipe: Recipe, folder: Path) -> Qwen3ForCausalLM:
    """A new policy that has done the recipe's copying exercises and then imitated its traces."""
    state, policy = PartialState(), build_policy(recipe.tokenizer, recipe.seed)
    both = recipe.rollouts(20 * recipe.steps, 64 * recipe.copying_steps)
    steps = (recipe.copying_steps, recipe.steps)
    for (name, batch), rollouts, max_steps in zip(BATCHES.items(), both, steps, strict=True):
        if state.is_main_process:
            print(f"warm start of the tiny policy: {name}", flush=True)
        warm_start(
            policy,
            recipe.tokenizer,
            rollouts,
            output_dir=folder,
            max_steps=max_steps,
            per_device_train_batch_size=max(1, batch // state.num_processes),
            seed=recipe.seed,
            bf16=False,
            use_cpu=state.device.type == "cpu",
            gradient_checkpointing=False,
            **SFT,
        )
    AcceleratorState._reset_state()  # the run that follows may choose another precision than the warm start's
    with torch.no_grad():
        for weights in policy.parameters():
            weights.copy_(weights.half())  # as it is shipped, so that both are one policy
    return policy


def load_shipped(recipe: Recipe, files: Sequence[Path]) -> Qwen3ForCausalLM | None:
    """The policy of these files that was made by this recipe; `None` if there is none."""
    for file in filter(Path.is_file, files):
        with np.load(file) as held:
            if held["fingerprint"].item() == recipe.fingerprint:
                policy = build_policy(recipe.tokenizer, recipe.seed)
                with torch.no_grad():
                    for name, weights in policy.named_parameters():
                        weights.copy_(torch.from_numpy(held[name]))
                return policy
    return None


def ship(policy: Qwen3ForCausalLM, recipe: Recipe, file: Path) -> None:
    """Write a policy with the fingerprint of its recipe, in half precision."""
    weights = {name: one.detach().half().cpu().numpy() for name, one in policy.named_parameters()}
    np.savez_compressed(file, fingerprint=np.array(recipe.fingerprint), **weights)  # type: ignore[arg-type]
