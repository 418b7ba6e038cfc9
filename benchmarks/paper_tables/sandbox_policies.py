"""The trained systems of a table in the sandbox: one warm start, and what SFT and GRPO make of it,
trained once each.

Smaller than `make demo`: half its GRPO steps, so that a whole table takes minutes. All of them know
the words of the questions about countries and no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.rollout import SPEC_FILE, AgentSpec
from agentic_prompting.sandbox.setup import SandboxRun, prepare_sandbox
from agentic_prompting.sandbox.world import Oracle
from agentic_prompting.trainers import PromptR1Config, PromptR1Trainer

from .training import plain_spec, train_sft, train_single_turn

_SMALL: dict[str, Any] = {  # those of examples/configs/sandbox.yaml
    "num_generations": 8,
    "max_turn_tokens": 48,
    "max_completion_length": 320,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 128,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "rollouts_max_mb": 0,
}
_GRPO_STEPS = 20
_SINGLE_TURN_STEPS = 6
_SFT_STEPS = 60


def policy_for(system_kind: str, folder: Path, seed: int = 0) -> Path:
    """The folder of a policy for a kind of system, trained if it is not there yet.

    Args:
        system_kind (`str`): `agent_untrained` (the warm start), `agent`, `sft` or
            `grpo_single_turn`.
        folder (`Path`): Where all of them are.
        seed (`int`, *optional*, defaults to `0`): Of data, weights and training.
    """
    sandbox = prepare_sandbox(folder, seed)
    if system_kind == "agent_untrained":
        return sandbox.model
    policy = folder / system_kind
    if not (policy / SPEC_FILE).exists():
        _train(system_kind, sandbox, policy, seed)
    return policy


def _train(system_kind: str, sandbox: SandboxRun, folder: Path, seed: int) -> None:
    rows = list(sandbox.train)
    spec = AgentSpec.load(sandbox.model)
    if system_kind == "sft":
        train_sft(
            sandbox.model,
            rows,
            folder,
            plain_spec(spec.prompt_template, max_tokens=16),
            max_steps=_SFT_STEPS,
            # Table 7 is for a large model; this one is tiny.
            learning_rate=1e-3,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            lora_rank=None,
            use_cpu=True,
            bf16=False,
            seed=seed,
        )
    elif system_kind == "grpo_single_turn":
        train_single_turn(
            sandbox.model, rows, folder, spec, max_steps=_SINGLE_TURN_STEPS, seed=seed, **_SMALL
        )
    else:
        args = PromptR1Config(
            str(folder / "grpo"), max_steps=_GRPO_STEPS, seed=seed, max_turns=5, **_SMALL
        )
        environment = LLMEnvironment(Oracle(seed=seed))
        trainer = PromptR1Trainer(
            str(sandbox.model),
            args=args,
            train_dataset=sandbox.train,
            environment=environment,
            prompt_template=spec.prompt_template,
        )
        trainer.train()
        trainer.save_model(str(folder))
