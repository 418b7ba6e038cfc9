"""Warm-starts the sandbox's policies: a recipe decides everything about a policy.

The package ships the policies of the two demonstrations, each with the fingerprint of its recipe:
its training data, architecture and training settings. A recipe with another fingerprint has its
policy trained on the spot.
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
from ..versions import check_inputs, write_inputs
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

PROBE = 64  # traces, and copying exercises, that go into a fingerprint
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
        spec ([`AgentSpec`]): The policy's prompt, grammar and limits; saved with it.
        tokenizer (`PreTrainedTokenizerFast`): The policy's tokenizer.
        world ([`World`]): The world whose names the tokenizer knows.
        traces (`Callable`): Writes a number of traces to imitate, and half as many whose names are
            replaced by random words; see [`rollout_from_trace`] and [`nonsense`].
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
        chat_format = self.spec.create_format(self.tokenizer)
        # All draws share one generator, so their order decides the data.
        imitated_traces, plain_traces = self.traces(traces, rng)
        imitated = [rollout_from_trace(trace, self.spec, chat_format) for trace in imitated_traces]
        plain = [rollout_from_trace(trace, self.spec, chat_format) for trace in plain_traces]
        copied = copying_exercises(self.tokenizer, exercises, rng)
        return copied, [*imitated, *nonsense(plain, self.tokenizer, self.world, rng)]

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the world, the tokenizer, the template, the traces and their mix, the
        architecture, the settings of the training and the seed; not with the versions of libraries.
        """
        # The training data, by a sample of it: this covers the template, the traces and their mix.
        copied, conversations = self.rollouts(PROBE, PROBE)
        data = [
            [rollout.prompt_ids, rollout.ids, rollout.mask] for rollout in [*copied, *conversations]
        ]
        countries = [list(vars(country).values()) for country in self.world.countries]
        training = [dict(SFT), BATCHES, self.steps, self.copying_steps, self.seed]

        # The order of the parts is part of the hash: with another one no shipped policy would fit.
        parts = [self.tokenizer.get_vocab(), countries, data, dict(ARCHITECTURE), training]
        return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def warm_started(folder: str | Path, recipe: Recipe) -> Path:
    """Return the folder of a policy that was warm-started by a recipe: the shipped one, or one
    trained here.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is
            used again.
        recipe ([`Recipe`]): Decides the policy.

    Raises:
        `ValueError`: The existing policy was made by another recipe.
    """
    keep_freed_memory()
    # TRL's trainers ping the hub, which has no use for runs of the sandbox.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    model_folder = Path(folder) / "warm_start"
    state = PartialState()
    # The fingerprint covers the settings beside it, which an error can name.
    inputs = {"seed": recipe.seed, "steps": recipe.steps, "data or version": recipe.fingerprint}
    if (model_folder / SPEC_FILE).exists():
        check_inputs(model_folder, inputs)
    else:
        # Every process gets a policy: training one is a joint run.
        policy = load_shipped(recipe, SHIPPED)
        origin = "from the package"
        if policy is None:
            if state.is_main_process:
                print(
                    "no warm start in the package fits this recipe and seed: it is made here",
                    flush=True,
                )
            policy = make_policy(recipe, model_folder / "sft")
            origin = "done"

        # Only the main process saves it.
        if state.is_main_process:
            write_inputs(model_folder, inputs)
            save_policy(policy, recipe.tokenizer, recipe.spec, model_folder)
            print(f"warm start of the tiny policy: {origin}", flush=True)
    state.wait_for_everyone()
    return model_folder


def make_policy(recipe: Recipe, folder: Path) -> Qwen3ForCausalLM:
    """Train a new policy on the recipe's copying exercises, and then to imitate its traces."""
    state = PartialState()
    policy = build_policy(recipe.tokenizer, recipe.seed)
    # Two phases, each with its batch size, its rollouts and its number of steps.
    phases = zip(
        BATCHES.items(),
        recipe.rollouts(20 * recipe.steps, 64 * recipe.copying_steps),
        (recipe.copying_steps, recipe.steps),
        strict=True,
    )
    for (phase, batch_size), rollouts, max_steps in phases:
        if state.is_main_process:
            print(f"warm start of the tiny policy: {phase}", flush=True)
        warm_start(
            policy,
            recipe.tokenizer,
            rollouts,
            output_dir=folder,
            max_steps=max_steps,
            per_device_train_batch_size=max(1, batch_size // state.num_processes),
            seed=recipe.seed,
            bf16=False,
            use_cpu=state.device.type == "cpu",
            gradient_checkpointing=False,
            **SFT,
        )

    # The run that follows may choose another precision than the warm start's.
    AcceleratorState._reset_state()

    # Policies are shipped in half precision: round here as well, so that both are one policy.
    with torch.no_grad():
        for weights in policy.parameters():
            weights.copy_(weights.half())
    return policy


def load_shipped(recipe: Recipe, files: Sequence[Path]) -> Qwen3ForCausalLM | None:
    """Load the policy that was made by this recipe from one of these files; `None` if there is
    none.
    """
    for file in filter(Path.is_file, files):
        with np.load(file) as arrays:
            # Another recipe made this policy.
            if arrays["fingerprint"].item() != recipe.fingerprint:
                continue
            policy = build_policy(recipe.tokenizer, recipe.seed)
            with torch.no_grad():
                for name, weights in policy.named_parameters():
                    weights.copy_(torch.from_numpy(arrays[name]))
            return policy
    return None


def ship(policy: Qwen3ForCausalLM, recipe: Recipe, file: Path) -> None:
    """Write a policy with the fingerprint of its recipe, in half precision."""
    arrays = {
        name: weights.detach().half().cpu().numpy() for name, weights in policy.named_parameters()
    }
    np.savez_compressed(file, fingerprint=np.array(recipe.fingerprint), **arrays)  # type: ignore[arg-type]
