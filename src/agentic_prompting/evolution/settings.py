"""E-SPL's settings: the same ones, under the same names, for the trainer and for [`evolve`]."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from ..rollout import Grammar, TagGrammar
from .population import BEST_RULES, Population
from .ratings import EXPLORATION, RULES
from .system_prompt import MAX_WORDS, SystemPrompt

_OF_A_POPULATION = (
    "window", "selection", "exploration", "selection_temperature", "independent_draws", "delta_sigma", "tie_tolerance",
    "best_rule",
)  # fmt: skip


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ESPLSettings:
    """The settings of E-SPL; the defaults are the paper's (Appendix A and B, eq 1-4) unless said otherwise.

    Args:
        prompts_per_step (`int`, *optional*, defaults to `3`):
            M: system prompts tried in each batch.
        num_generations (`int`, *optional*, defaults to `5`):
            N: rollouts of each problem under each prompt.
        window (`int`, *optional*, defaults to `10`):
            K: only the latest so many prompts are drawn.
        selection (`str`, *optional*, defaults to `"top_plus_random"`):
            How the M prompts are drawn: `top_plus_random` (the paper's own runs), `softmax` (eq 3), `uniform`. For a
            rule of your own pass a [`Population`].
        exploration (`float`, *optional*, defaults to `2.0`):
            λ of eq 3.
        selection_temperature (`float`, *optional*, defaults to `1.0`):
            T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`):
            Draw the M prompts independently, as Algorithm 1 reads, so that one may come twice. By default they are
            different ones, as in the paper's own runs.
        best_rule (`str`, *optional*, defaults to `"conservative"`):
            Which prompt is tested and saved: `conservative` (the highest μ - λσ), `mean` (the highest μ) or `newest`
            (the released code's); see [`Population.best`].
        delta_sigma (`float`, *optional*, defaults to `1.0`):
            Δσ: uncertainty added for a child.
        tie_tolerance (`float`, *optional*, defaults to `0.01`):
            Mean rewards this close are a tie.
        p_crossover (`float`, *optional*, defaults to `0.2`):
            Probability of a crossover after a batch.
        reflect_on (`str`, *optional*, defaults to `"mixed"`):
            The problems a mutation looks at: `mixed`, those with differing rewards (A.2); `imperfect`, those with a
            reward below 1.0, also where every attempt failed.
        max_ops (`int`, *optional*, defaults to `2`):
            K_ops: edits per problem (A.4).
        max_words (`int`, *optional*, defaults to `32`):
            Principles with more words are refused (A.5).
        prompt_place (`str`, *optional*, defaults to `"system"`):
            Where the prompt stands: `system` message, or `user`: in front of the first user message (the paper's maths
            template).
        reference_sampling (`dict` or `str`, *optional*):
            Passed on with every call of the reference LLM: `temperature`, `top_p`, `max_tokens`, ...; on a command
            line as JSON. The model's own defaults if it is not set.

    Raises:
        `ValueError`: A value is out of range.
    """

    prompts_per_step: int = _setting(3, "M: system prompts per batch.")
    num_generations: int = _setting(5, "N: rollouts per problem and prompt.")
    window: int = _setting(10, "K: the latest so many prompts are drawn.")
    selection: str = _setting("top_plus_random", f"How prompts are drawn: {', '.join(RULES)}.")
    exploration: float = _setting(EXPLORATION, "Lambda of eq 3.")
    selection_temperature: float = _setting(1.0, "T of eq 3, for softmax.")
    independent_draws: bool = _setting(False, "Draw prompts independently: one may come twice.")
    best_rule: str = _setting("conservative", f"The prompt that is tested: {', '.join(BEST_RULES)}.")
    delta_sigma: float = _setting(1.0, "Uncertainty added for a child.")
    tie_tolerance: float = _setting(0.01, "Mean rewards this close are a tie.")
    p_crossover: float = _setting(0.2, "Probability of a crossover after a batch.")
    reflect_on: str = _setting("mixed", "mixed (the paper) or imperfect.")
    max_ops: int = _setting(2, "K_ops: edits per problem.")
    max_words: int = _setting(MAX_WORDS, "Longer principles are refused.")
    prompt_place: str = _setting("system", "system or user.")
    reference_sampling: dict[str, Any] | str | None = _setting(None, "Of the reference's calls: JSON.")

    def __post_init__(self) -> None:
        for name, allowed in (
            ("selection", tuple(RULES)),
            ("best_rule", BEST_RULES),
            ("reflect_on", ("mixed", "imperfect")),
            ("prompt_place", ("system", "user")),
        ):
            one_of(name, getattr(self, name), allowed)
        for name in ("prompts_per_step", "num_generations", "window", "max_ops", "max_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.p_crossover <= 1:
            raise ValueError(f"p_crossover must be between 0 and 1, got {self.p_crossover}")
        if isinstance(self.reference_sampling, str):
            self.reference_sampling = _read_sampling(self.reference_sampling)
        self.population(SystemPrompt(""))  # raises for what only it can judge

    def population(self, root: SystemPrompt, seed: int = 0, window: int | None = None) -> Population:
        """A new population under these settings."""
        return Population(
            root,
            window or self.window,
            self.selection,
            exploration=self.exploration,
            temperature=self.selection_temperature,
            independent_draws=self.independent_draws,
            delta_sigma=self.delta_sigma,
            tie_tolerance=self.tie_tolerance,
            best_rule=self.best_rule,
            seed=seed,
        )

    def check_own_population(self) -> None:
        """Raises `ValueError` for a setting that a population of one's own would leave without effect."""
        defaults = {one.name: one.default for one in fields(ESPLSettings)}
        for name in _OF_A_POPULATION:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} would be ignored: a Population brings its own")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` if a setting is none of what it may be."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _read_sampling(text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except ValueError:
        sampling = None
    if not isinstance(sampling, dict):
        raise ValueError(f"reference_sampling must be a JSON object, got {text!r}")
    return sampling


@dataclass
class EvolveConfig(ESPLSettings):
    """The settings of [`evolve`]: those of [`ESPLSettings`] and these.

    Args:
        steps (`int`, *optional*, defaults to `20`):
            Steps in all, those before a resume included (our choice).
        mode (`str`, *optional*, defaults to `"evolution"`):
            `evolution`, or `reflection`: one prompt, the newest, and mutation alone (the paper's baseline, 4.1).
        problems_per_step (`int`, *optional*, defaults to `10`):
            b.
        prompt_template (`str`, *optional*, defaults to `"{question}"`):
            The user message; a row's own `prompt` wins.
        grammar ([`Grammar`], *optional*):
            How rewards find the answer in a reply: in Prompt-R1's tags if not set; with `FreeText()` the whole reply
            is the answer.
        policy_sampling (`dict`, *optional*):
            As `reference_sampling`, for the policy (the paper samples at a temperature of .6 to .7 and top-p .95).
        max_failed (`float`, *optional*, defaults to `0.5`):
            If more than this share of a step's policy calls fails, the run stops.
        seed (`int`, *optional*, defaults to `0`):
            Of the order of problems, selection and crossover.

    Raises:
        `ValueError`: A value is out of range.
    """

    steps: int = _setting(20, "Steps in all.")
    mode: str = _setting("evolution", "evolution, or reflection: one prompt.")
    problems_per_step: int = _setting(10, "b: problems per step.")
    prompt_template: str = "{question}"
    grammar: Grammar = field(default_factory=TagGrammar)
    policy_sampling: dict[str, Any] = field(default_factory=dict)
    max_failed: float = 0.5
    seed: int = _setting(0, "Of everything that is drawn.")

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("evolution", "reflection"))
        if self.problems_per_step < 1 or self.steps < 0:
            raise ValueError(
                f"problems_per_step must be at least 1 and steps at least 0, got {self.problems_per_step} and "
                f"{self.steps}"
            )
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"max_failed must be between 0 and 1, got {self.max_failed}")
        super().__post_init__()
