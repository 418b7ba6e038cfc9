"""The settings of E-SPL, the same for the trainer and for [`evolve`]."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..rollout import FreeText, Grammar, TagGrammar
from .marked_answer import MarkedAnswer
from .population import BEST_RULES, Population, check_choice
from .selection import EXPLORATION, SELECTION_RULES
from .system_prompt import MAX_WORDS, PLACES, SystemPrompt

# Settings that have no effect with a population of the user's own.
_POPULATION_SETTINGS = (
    "window",
    "selection",
    "exploration",
    "selection_temperature",
    "independent_draws",
    "delta_sigma",
    "tie_tolerance",
    "best_rule",
)

# The ways to make a mutation; see `reflection` below.
REFLECTIONS = ("paper", "one_call", "rewrite")

REPLY_GRAMMARS: Mapping[str, type[Any]] = {
    "tags": TagGrammar,
    "free": FreeText,
    "marked": MarkedAnswer,
}
"""How the answer in a reply is found: between Prompt-R1's tags, the whole reply, or what it marks as
its answer, such as the text after `Answer:`.
"""


def setting(default: Any, text: str) -> Any:
    """Return a field of a settings class with its help text for the command line."""
    return field(default=default, metadata={"help": text})


@dataclass
class ESPLSettings:
    """The settings of E-SPL, the same for the trainer and for [`evolve`].

    The defaults are the paper's (Appendix A and B, eq 1-4) unless an entry says otherwise.

    Args:
        prompts_per_step (`int`, *optional*, defaults to `3`): M: system prompts played in each
            batch.
        num_generations (`int`, *optional*, defaults to `5`): N: rollouts of each problem under each
            prompt.
        window (`int`, *optional*, defaults to `10`): K: only the K newest prompts are drawn.
        selection (`str`, *optional*, defaults to `"top_plus_random"`): How the M prompts are drawn:
            `top_plus_random` (the paper's own runs), `softmax` (eq 3), `uniform`. For a rule of
            your own pass a [`Population`].
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3.
        selection_temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`): Draw the M prompts
            independently, as Algorithm 1 reads, so one may be drawn twice. By default they are
            different, as in the paper's own runs.
        best_rule (`str`, *optional*, defaults to `"conservative"`): Which prompt is tested and
            saved: `conservative` (the highest μ - λσ), `mean` (the highest μ) or `newest` (as in
            the released code); see [`Population.best`].
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: uncertainty added to the rating of
            a child.
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Mean rewards this close are a tie.
        p_crossover (`float`, *optional*, defaults to `0.2`): Probability of a crossover after a
            batch.
        reflection (`str`, *optional*, defaults to `"paper"`): How a mutation is made: `paper`,
            summaries, critiques and a plan (A.2 to A.5), many calls; `one_call`, which shows up
            to 12 failed attempts and asks for the edits ([`revise`]); `rewrite`, the same with the
            whole instructions written anew in the place of edits, also by a crossover: for a
            reference LLM that is too small to write edits as JSON.
        reflect_on (`str`, *optional*, defaults to `"mixed"`): The problems a mutation looks at:
            `mixed`, those with differing rewards (A.2); `imperfect`, those with a reward below 1.0,
            even if no attempt succeeded.
        max_ops (`int`, *optional*, defaults to `2`): K_ops: edits per problem (A.4).
        max_words (`int`, *optional*, defaults to `32`): Principles with more words are refused
            (A.5).
        max_copied_share (`float`, *optional*, defaults to `0.5`): A child is refused if it repeats
            more than this share of a problem of the batch, in runs of eight words, or if more than
            this share of a line of it is from one (our own; see [`CopiedProblem`]). 1.0 allows
            everything. The journal has the share of each child that shares any.
        prompt_place (`str`, *optional*, defaults to `"system"`): The place of the prompt: `system`:
            the system message; `user`: in front of the first user message (the paper's maths
            template); `after`: after it (the released template).
        reference_sampling (`dict` or `str`, *optional*): Sampling options of every call of the
            reference LLM: `temperature`, `top_p`, `max_tokens`, `response_format`, ...; on a
            command line as JSON. The model's own defaults if it is not set.
        eval_all (`bool`, *optional*, defaults to `False`): After the last step, evaluate every
            rated prompt on the held-out rows, under the final weights (Figure 8).

    Raises:
        `ValueError`: A value is out of range.
    """

    # The batch.
    prompts_per_step: int = setting(3, "M: system prompts per batch.")
    num_generations: int = setting(5, "N: rollouts per problem and prompt.")
    # The population: selection (eq 3), and ratings (Appendix B).
    window: int = setting(10, "K: only the K newest prompts are drawn.")
    selection: str = setting(
        "top_plus_random", f"How prompts are drawn: {', '.join(SELECTION_RULES)}."
    )
    exploration: float = setting(
        EXPLORATION, "Lambda of eq 3: the weight of the uncertainty of a rating."
    )
    selection_temperature: float = setting(1.0, "Temperature T of eq 3, for softmax.")
    independent_draws: bool = setting(False, "Draw prompts independently: one may be drawn twice.")
    best_rule: str = setting("conservative", f"The prompt that is tested: {', '.join(BEST_RULES)}.")
    delta_sigma: float = setting(1.0, "Uncertainty added to the rating of a child.")
    tie_tolerance: float = setting(0.01, "Mean rewards this close are a tie.")
    # Mutation and crossover.
    p_crossover: float = setting(0.2, "Probability of a crossover after a batch.")
    reflection: str = setting("paper", f"How a mutation is made: {', '.join(REFLECTIONS)}.")
    reflect_on: str = setting(
        "mixed", "Problems a mutation looks at: mixed (the paper) or imperfect."
    )
    max_ops: int = setting(2, "K_ops: edits per problem.")
    max_words: int = setting(MAX_WORDS, "Principles with more words are refused.")
    max_copied_share: float = setting(
        0.5, "A child that repeats more than this share of a training problem is refused."
    )
    # The calls of both models, and the last evaluation.
    prompt_place: str = setting("system", f"The place of the prompt: {', '.join(PLACES)}.")
    reference_sampling: dict[str, Any] | str | None = setting(
        None, "Sampling options of the reference LLM: JSON."
    )
    eval_all: bool = setting(
        False, "After the last step, evaluate every rated prompt on held-out rows."
    )

    def __post_init__(self) -> None:
        # Check names first, then ranges.
        check_choice("selection", self.selection, SELECTION_RULES)
        check_choice("reflection", self.reflection, REFLECTIONS)
        check_choice("reflect_on", self.reflect_on, ("mixed", "imperfect"))
        check_choice("prompt_place", self.prompt_place, PLACES)
        for name in ("prompts_per_step", "num_generations", "window", "max_ops", "max_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.p_crossover <= 1:
            raise ValueError(f"p_crossover must be between 0 and 1, got {self.p_crossover}")
        if not 0 <= self.max_copied_share <= 1:
            raise ValueError(
                f"max_copied_share must be between 0 and 1, got {self.max_copied_share}"
            )
        # On a command line it is a text.
        if isinstance(self.reference_sampling, str):
            self.reference_sampling = _read_sampling("reference_sampling", self.reference_sampling)

        # A population checks its own settings.
        self.create_population(SystemPrompt(""))

    def create_population(
        self, root: SystemPrompt, seed: int = 0, window: int | None = None
    ) -> Population:
        """Return a new population under these settings."""
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

    def start_population(
        self, prompt: SystemPrompt | str | Population, seed: int, is_alone: bool
    ) -> Population:
        """Return the population that a run starts with.

        Args:
            prompt ([`SystemPrompt`], `str` or [`Population`]): Its root; or a population of the
                user's own.
            seed (`int`): Seed of a new population.
            is_alone (`bool`): Whether one prompt is played at a time, the newest (mode `reflection`).

        Raises:
            `ValueError`: A setting would have no effect because the population has its own.
        """
        if not isinstance(prompt, Population):
            window = 1 if is_alone else None
            return self.create_population(SystemPrompt.of(prompt), seed, window)

        # The user's own population has settings of its own, which must not be contradicted.
        if is_alone and prompt.window != 1:
            raise ValueError("mode='reflection' needs a Population with window=1")
        # A setting that is not at its default was meant to have an effect.
        defaults = {option.name: option.default for option in fields(ESPLSettings)}
        for name in _POPULATION_SETTINGS:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} would be ignored: a Population brings its own"
                )
        return prompt


def _read_sampling(name: str, text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except ValueError:
        sampling = None
    if not isinstance(sampling, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r}")
    return sampling


@dataclass
class EvolveConfig(ESPLSettings):
    """The settings of [`evolve`], in addition to those of [`ESPLSettings`].

    Args:
        steps (`int`, *optional*, defaults to `20`): Steps in all, those before a resume included
            (our own default).
        mode (`str`, *optional*, defaults to `"evolution"`): `evolution`, or `reflection`: one
            prompt, the newest, and mutation alone (the paper's baseline, 4.1).
        problems_per_step (`int`, *optional*, defaults to `10`): b: problems of each step. With more
            of them the prompts are compared with less noise, for more policy calls.
        prompt_template (`str`, *optional*, defaults to `"{question}"`): The user message. A row's
            own `prompt` is used instead of it.
        grammar ([`Grammar`] or `str`, *optional*, defaults to `"tags"`): How rewards find the
            answer in a reply: `"tags"`, between Prompt-R1's tags; `"free"`, the whole reply;
            `"marked"`, the text after `Answer:`, in a box or in tags, else the whole reply
            ([`MarkedAnswer`]); or a grammar of your own.
        policy_sampling (`dict` or `str`, *optional*): Sampling options of the policy's calls, as
            `reference_sampling` (the paper samples at a temperature of .6 to .7 and top-p .95).
        eval_every (`int`, *optional*, defaults to `0`): Steps between two evaluations of the best
            prompt on `eval_rows`, N times each (Figure 12). 0: never.
        max_failed_share (`float`, *optional*, defaults to `0.5`): The run stops if more than this
            share of a step's rollouts has no reward.
        seed (`int`, *optional*, defaults to `0`): Seed of the order of problems, of selection and
            of crossover.

    Raises:
        `ValueError`: A value is out of range.
    """

    steps: int = setting(20, "Steps in all.")
    mode: str = setting("evolution", "What is run: evolution, or reflection on one prompt.")
    problems_per_step: int = setting(10, "b: problems per step.")
    prompt_template: str = setting("{question}", "The user message, with {question}.")
    grammar: Grammar | str = setting(
        "tags",
        "Where a reply's answer is: between tags; free, the whole reply; marked, after 'Answer:'.",
    )
    policy_sampling: dict[str, Any] | str | None = setting(
        None, "Sampling options of the policy: JSON."
    )
    eval_every: int = setting(0, "Steps between two evaluations on held-out problems.")
    max_failed_share: float = setting(0.5, "Share of failed rollouts at which the run stops.")
    seed: int = setting(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        # On a command line some values are texts.
        check_choice("mode", self.mode, ("evolution", "reflection"))
        if isinstance(self.grammar, str):
            check_choice("grammar", self.grammar, REPLY_GRAMMARS)
            self.grammar = REPLY_GRAMMARS[self.grammar]()
        if isinstance(self.policy_sampling, str):
            self.policy_sampling = _read_sampling("policy_sampling", self.policy_sampling)

        # Check the ranges.
        if self.problems_per_step < 1:
            raise ValueError(f"problems_per_step must be at least 1, got {self.problems_per_step}")
        for name in ("steps", "eval_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(
                f"max_failed_share must be between 0 and 1, got {self.max_failed_share}"
            )
        super().__post_init__()
