"""On-policy distillation of a system prompt: the weights learn to act without it as they act under it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..evolution import SystemPrompt
from ..evolution.system_prompt import Place
from ..rollout import Rollout
from .batch import Batch
from .loss import ScoredTokens
from .multi_turn_grpo import MultiTurnGRPOTrainer


class PromptDistillationTrainer(MultiTurnGRPOTrainer):
    """Trains the weights to act without a system prompt as they act under it.

    The student plays the rows without the prompt. The teacher is the same weights under it; nothing is sampled from it.
    A token y_t of the student has the advantage

        A_t = log π(y_t | prompt, x, y_<t) - log π(y_t | x, y_<t),

    without a gradient: the policy gradient of the reverse KL between student and teacher at the student's own tokens.
    Whatever trains with GRPO trains so: several turns, LoRA, DeepSpeed ZeRO-3, FSDP2, checkpoints. Rewards are logged
    and teach nothing.

    Args:
        *args, **kwargs: As [`MultiTurnGRPOTrainer`]'s.
        prompt ([`SystemPrompt`] or `str`): What the teacher has in front of it, for example
            `ESPLTrainer.population.best()`.
        place (`str`, *optional*, defaults to `"system"`): Where it stands; see [`SystemPrompt.messages`].

    Raises:
        `ValueError`: The prompt is empty, or the environment is a [`Program`], which renders its own conversations.
    """

    method = "prompt distillation"
    _default_output = "distillation_output"

    def __init__(self, *args: Any, prompt: SystemPrompt | str, place: Place = "system", **kwargs: Any):
        self.teacher, self.place = prompt if isinstance(prompt, SystemPrompt) else SystemPrompt(prompt), place
        if not self.teacher.text.strip():
            raise ValueError("the prompt is empty: there is nothing to learn from it")
        self._played: list[Rollout] = []
        super().__init__(*args, **kwargs)
        if self._plays_itself:
            raise ValueError("a program renders its own conversations: its prompt cannot be distilled")

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        self._played = batch.rollouts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        if self.model.training:
            scored["advantages"] = self._advantages(scored)
        return scored

    def _advantages(self, scored: dict[str, Any]) -> torch.Tensor:
        """A_t of each token, of shape (batch, completion); 0 at tokens that the student did not write."""
        device, form = scored["completion_ids"].device, self.chat_format
        own = scored["completion_mask"] * scored["tool_mask"]
        form.trust(self.teacher.text)
        rows = [one.row for one in self._played]
        taught = [
            torch.tensor(form.of(row).prompt_ids(self.teacher.messages(row["prompt"], self.place))) for row in rows
        ]
        ids = pad_sequence(taught, batch_first=True, padding_side="left", padding_value=self.eos_token_ids[0])
        mask = pad_sequence([torch.ones_like(one) for one in taught], batch_first=True, padding_side="left")
        teacher = self._logps(ids.to(device), mask.to(device), scored, own)
        student = self._logps(scored["prompt_ids"], scored["prompt_mask"], scored, own)
        advantages = (teacher - student) * own
        kl = (advantages.clamp(max=20).exp() - 1 - advantages).sum()  # TRL's estimate of it, which is never below 0
        total, tokens = self.accelerator.reduce(torch.stack([kl, own.sum().to(kl)])).tolist()
        self.log_batch("train", {"distillation/kl": total / max(tokens, 1.0)})
        return advantages

    def _logps(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, scored: dict[str, Any], own: torch.Tensor
    ) -> torch.Tensor:
        """The log-probabilities of the completions behind these prompts."""
        ids = torch.cat([prompt_ids, scored["completion_ids"]], 1)
        mask = torch.cat([prompt_mask, scored["completion_mask"]], 1)
        model, size = ScoredTokens(self.model, own), self.args.per_device_train_batch_size
        with torch.no_grad():
            logps, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, own.shape[1], batch_size=size)
        return logps
