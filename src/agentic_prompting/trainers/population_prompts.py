"""The prompts of E-SPL's batches: each problem is played N times under each of M system prompts.

The batch has M x N slots per row, in the order of the prompts. The metadata of a slot name its system prompt, so that
records and rollouts of a later step name it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..evolution import Attempt, Generation, ProblemResult, PromptResult, SystemPrompt
from ..rollout import AgentSpec
from .config import ESPLConfig

ReadRow = tuple[str, str, str]
"""A rollout as the reference LLM reads it: question, accepted answers, text of the attempt."""


class PopulationPrompts:
    """Chooses the system prompt of each slot of a batch, and renders rows under it.

    Args:
        generation ([`Generation`]): Draws the prompts of a batch.
        settings ([`ESPLConfig`]): M, N, the place of the prompt, and the mode.
        render (`Callable`): The conversation of a row without an evolved prompt, as [`AgentSpec.messages`].
        trust (`Callable[[str], None]`, *optional*): Gets the text of each prompt before it is rendered; see
            [`ChatFormat.trust`].

    Attributes:
        playing (`list[SystemPrompt]`): The M prompts of the current batch.
        trial ([`SystemPrompt`], *optional*): The prompt that is being evaluated, if it is not the final one.
        left_out (`bool`): Whether the agent is used without an evolved prompt, because it was distilled.
    """

    def __init__(
        self,
        generation: Generation,
        settings: ESPLConfig,
        render: Callable[[Mapping[str, Any]], Sequence[Any]],
        trust: Callable[[str], None] = lambda text: None,
    ):
        self.generation, self.settings, self.render, self.trust = (
            generation,
            settings,
            render,
            trust,
        )
        self.playing = [generation.population.best()]  # until the first batch draws its own
        self.trial: SystemPrompt | None = None
        self.left_out = False

    @property
    def rollouts_per_row(self) -> int:
        """M·N."""
        return self.settings.prompts_per_step * self.settings.num_generations

    def final(self) -> SystemPrompt:
        """The prompt that the agent is evaluated and used under: the best one, or an empty one after distillation."""
        return SystemPrompt("") if self.left_out else self.generation.population.best()

    def start_batch(self, step: int) -> None:
        """Draw the prompts of the next training batch; in an `rl` phase of mode `alternating` all are the best one."""
        size, mode = self.settings.prompts_per_step, self.settings.mode
        best_alone = mode == "alternating" and self.settings.mode_at(step) == "rl"
        self.playing = (
            [self.generation.population.best()] * size if best_alone else self.generation.draw(size)
        )

    def choose_metadata(self, index: int, training: bool) -> dict[str, Any]:
        """The id of the system prompt of a slot; `None` without one.

        Args:
            index (`int`): The slot's position in the global batch.
            training (`bool`): In evaluation, every slot has the prompt on trial or the final one.
        """
        if not training:
            return {"system_prompt": (self.trial or self.final()).id}
        slot = (index // self.settings.num_generations) % self.settings.prompts_per_step
        return {"system_prompt": self.playing[slot].id}

    def render_messages(
        self, row: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The prompt messages of a row under the system prompt of its metadata.

        Raises:
            `LookupError`: The population has no such prompt.
        """
        messages, name = self.render(row), metadata["system_prompt"]
        if name is not None:
            prompt = self.generation.population.members[name].prompt
            self.trust(prompt.text)
            messages = prompt.messages(messages, self.settings.prompt_place)  # type: ignore[arg-type]
        return [dict(message) for message in messages]

    def matches(
        self,
        rewards: Sequence[float | None],
        texts: Sequence[ReadRow],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[list[PromptResult]]:
        """A batch of slots as [`Generation.record`] takes it.

        Rows that were played under other prompts, because their groups were started earlier, are matches of their own;
        the prompts that were drawn last come last.

        Args:
            rewards (`Sequence[float | None]`): One per rollout of the global batch, in order.
            texts (`Sequence[tuple[str, str, str]]`): Question, accepted answers and text of each.
            metadata (`Sequence[Mapping]`): Of each.
        """
        n, members = self.settings.num_generations, self.generation.population.members
        cells: dict[tuple[int, ...], list[list[ProblemResult]]] = {}
        for first in range(0, len(rewards), self.rollouts_per_row):
            starts = range(first, first + self.rollouts_per_row, n)
            drawn = tuple(metadata[start]["system_prompt"] for start in starts)
            # The text of the first slot stands for all: a row's own `prompt` is rendered differently in each slot.
            question, truth, _ = texts[first]
            for slot, start in zip(
                cells.setdefault(drawn, [[] for _ in starts]), starts, strict=True
            ):
                attempts = tuple(Attempt(texts[i][2], rewards[i]) for i in range(start, start + n))
                slot.append(ProblemResult(question, truth, attempts))
        return [
            [
                PromptResult(members[name].prompt, tuple(row))
                for name, row in zip(drawn, slots, strict=True)
            ]
            for drawn, slots in cells.items()
        ]

    def saved_spec(self, spec: AgentSpec) -> AgentSpec:
        """The spec of an agent that is used under the final prompt, as in evaluations."""
        prompt, place = self.final(), self.settings.prompt_place
        if not prompt.text:
            return spec
        if place == "user":
            return replace(spec, prompt_template=f"{prompt.text}\n\n{spec.prompt_template}")
        if place == "after":
            return replace(spec, prompt_template=f"{spec.prompt_template}\n\n{prompt.text}")
        text = f"{prompt.text}\n\n{spec.system_prompt}" if spec.system_prompt else prompt.text
        return replace(spec, system_prompt=text, join_system_prompt=True)
