"""The prompts of a batch under E-SPL: each rollout gets a system prompt of the population."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..evolution import PopulationEvolution, SystemPrompt
from ..llm import Message
from ..rollout import AgentSpec
from .config import ESPLConfig


class PopulationPrompts:
    """Chooses the system prompt of each rollout of a batch, and renders rows under it.

    A batch has M x N slots for each row, in the order of the prompts. The metadata of a slot name
    its system prompt, so that records, and groups that finish in a later step, name it, too.

    Args:
        evolution ([`PopulationEvolution`]): Draws the prompts of a batch.
        args ([`ESPLConfig`]): M, N, the place of the prompt, and the mode.
        render (`Callable`): Returns the conversation of a row without an evolved prompt, as
            [`AgentSpec.messages`] does.
        trust (`Callable[[str], None]`, *optional*): Called with the text of each prompt before it
            is rendered; see [`ChatFormat.trust`].

    Attributes:
        batch_prompts (`list[SystemPrompt]`): The M prompts of the current batch.
        evaluated_prompt ([`SystemPrompt`], *optional*): The prompt of evaluations, if it is not
            the final one; see [`PopulationPrompts.evaluate_under`].
        is_distilled (`bool`): Whether the agent is used without an evolved prompt.
    """

    def __init__(
        self,
        evolution: PopulationEvolution,
        args: ESPLConfig,
        render: Callable[[Mapping[str, Any]], Sequence[Message]],
        trust: Callable[[str], None] = lambda text: None,
    ):
        self.evolution = evolution
        self.args = args
        self.render = render
        self.trust = trust
        self.batch_prompts = [evolution.population.best()]  # until the first batch draws its own
        self.evaluated_prompt: SystemPrompt | None = None
        self.is_distilled = False

    @property
    def rollouts_per_row(self) -> int:
        """M·N."""
        return self.args.prompts_per_step * self.args.num_generations

    def final_prompt(self) -> SystemPrompt:
        """Return the prompt that the agent is evaluated and used under."""
        return SystemPrompt("") if self.is_distilled else self.evolution.population.best()

    @contextmanager
    def evaluate_under(self, prompt: SystemPrompt) -> Iterator[None]:
        """Within this context, evaluations play under a prompt in place of the final one.

        Why: the prompt cannot be an argument, because only methods of transformers and TRL lie
        between [`ESPLTrainer.evaluate`] and the rendering of a row, and these pass on none.
        """
        self.evaluated_prompt = prompt
        try:
            yield
        finally:
            self.evaluated_prompt = None

    def start_batch(self, step: int) -> None:
        """Draw the prompts of the next training batch.

        In an `rl` phase of mode `alternating` all of them are the best one.
        """
        prompt_count = self.args.prompts_per_step
        is_rl_phase = self.args.mode == "alternating" and self.args.mode_at(step) == "rl"
        if is_rl_phase:
            self.batch_prompts = [self.evolution.population.best()] * prompt_count
        else:
            self.batch_prompts = self.evolution.draw(prompt_count)

    def choose_metadata(self, index: int, training: bool) -> dict[str, Any]:
        """Return the id of the system prompt of a slot; `None` without one.

        Args:
            index (`int`): The slot's position in the global batch.
            training (`bool`): In evaluation, every slot has the evaluated or the final prompt.
        """
        if training:
            # Slots are ordered by row, then by prompt, then by attempt.
            slot = (index // self.args.num_generations) % self.args.prompts_per_step
            prompt = self.batch_prompts[slot]
        else:
            prompt = self.evaluated_prompt or self.final_prompt()
        return {"system_prompt": prompt.id}

    def render_messages(
        self, row: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the prompt messages of a row under the system prompt of its metadata.

        Raises:
            `LookupError`: If the population has no such prompt.
        """
        messages = self.render(row)
        prompt_id = metadata["system_prompt"]
        # Without an evolved prompt, as after the distillation, the row's own messages are used.
        if prompt_id is not None:
            prompt = self.evolution.population.members[prompt_id].prompt
            self.trust(prompt.text)
            messages = prompt.messages(messages, self.args.prompt_place)  # type: ignore[arg-type]
        return [dict(message) for message in messages]

    def saved_spec(self, spec: AgentSpec) -> AgentSpec:
        """Return the form of an agent that is used under the final prompt, as in evaluations."""
        text = self.final_prompt().text
        if not text:
            return spec
        # A prompt that is part of the user's message becomes part of the template.
        if self.args.prompt_place == "user":
            return replace(spec, prompt_template=f"{text}\n\n{spec.prompt_template}")
        if self.args.prompt_place == "after":
            return replace(spec, prompt_template=f"{spec.prompt_template}\n\n{text}")
        # As a system message, it comes before the agent's own.
        if spec.system_prompt:
            text = f"{text}\n\n{spec.system_prompt}"
        return replace(spec, system_prompt=text, join_system_prompt=True)
