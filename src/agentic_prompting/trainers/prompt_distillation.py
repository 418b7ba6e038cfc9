"""On-policy distillation of a system prompt: the weights learn to act without it as they act under it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..evolution import SystemPrompt
from ..evolution.system_prompt import Place
from .batch import Batch
from .multi_turn_grpo import MultiTurnGRPOTrainer


class PromptDistillationTrainer(MultiTurnGRPOTrainer):
    """Trains the weights to act without a system prompt as they act under it.

    The student plays the rows without the prompt. The teacher is the weights of the start, π_0, under the prompt; they
    do not change, and nothing is sampled from them. A token y_t of the student has the advantage

        A_t = log π_0(y_t | prompt, x, y_<t) - log π(y_t | x, y_<t),

    without a gradient: the policy gradient of the reverse KL between student and teacher at the student's own tokens.
    (A teacher that changes with the student is no fixed aim: in our sandbox both went to 0; see docs/lab/espl.md.)
    π_0 is TRL's reference model: with LoRA the model without the adapter that is trained, otherwise a second copy of
    the weights. `beta` 0, as by default, adds no other KL term.

    Everything that GRPO supports is supported: several turns, LoRA, DeepSpeed ZeRO-3, FSDP2, checkpoints. A resumed run
    must be constructed with the weights that the first one began with. Rewards are logged and have no effect on the
    weights.

    Args:
        *args, **kwargs: As [`MultiTurnGRPOTrainer`]'s.
        prompt ([`SystemPrompt`] or `str`): The teacher's system prompt, for example `ESPLTrainer.population.best()`.
        place (`str`, *optional*, defaults to `"system"`): Its place in the conversation; see
            [`SystemPrompt.messages`].

    Raises:
        `ValueError`: The prompt is empty, or the environment is a [`Program`], which renders its own conversations.
    """

    method = "prompt distillation"
    _default_output = "distillation_output"
    _keeps_start = True

    def __init__(self, *args: Any, prompt: SystemPrompt | str, place: Place = "system", **kwargs: Any):
        self.teacher, self.place = prompt if isinstance(prompt, SystemPrompt) else SystemPrompt(prompt), place
        if not self.teacher.text.strip():
            raise ValueError("the prompt is empty: there is nothing to learn from it")
        super().__init__(*args, **kwargs)
        if self._plays_itself:
            raise ValueError("a program renders its own conversations: its prompt cannot be distilled")

    def _after_scoring(self, batch: Batch, scored: dict[str, Any]) -> None:
        """Replace the advantages by A_t for each token of the agent, 0 elsewhere, of shape (batch, completion)."""
        device, form = scored["completion_ids"].device, self.chat_format
        own = scored["completion_mask"] * scored["tool_mask"]
        form.trust(self.teacher.text)
        rows = [rollout.row for rollout in batch.rollouts]
        taught = [
            torch.tensor(form.of(row).prompt_ids(self.teacher.messages(row["prompt"], self.place))) for row in rows
        ]
        prompts = pad_sequence(taught, batch_first=True, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(one) for one in taught], batch_first=True, padding_side="left").to(device)
        student = self.logps_behind(scored["prompt_ids"], scored["prompt_mask"], scored)
        scored["advantages"] = advantages = (self.logps_behind(prompts, mask, scored, start=True) - student) * own
        kl = (advantages.clamp(max=20).exp() - 1 - advantages).sum()  # TRL's estimate of the KL, never below 0
        total, tokens = self.accelerator.reduce(torch.stack([kl, own.sum().to(kl)])).tolist()
        self.log_batch("train", {"distillation/kl": total / max(tokens, 1.0)})
