"""[`HeadroomSettings`]: what [`headroom`] measures, and with how many calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...environments import Worker, Workers
from ...llm import ChatModel
from ...refine import ProRefiner
from ..metrics import Metric
from ..systems import Agent
from .prompts import default_delta
from .proposals import DEFAULT_REQUESTS


@dataclass(frozen=True, kw_only=True)
class HeadroomSettings:
    """The settings of [`headroom`], whose keyword arguments they are.

    `policy`, `agent`, `refiner`, `llm` and `pool` each request a measurement.

    Args:
        policy ([`ChatModel`] or [`PromptAgent`], *optional*): Measure the gain of a better system
            prompt for this policy.
        prompts (`Sequence[str]`, *optional*, defaults to `("",)`): System prompts to compare, the
            current one first. The empty prompt is added.
        reference ([`ChatModel`], *optional*): Writes further prompts from examples, until there are
            `tried`.
        tried (`int`, *optional*, defaults to `12`): Number of prompts to compare if a `reference`
            writes them.
        top_up_calls (`int`, *optional*, defaults to `0`): Calls of a second look at the prompts, on
            other rows, if the first one is inconclusive.
        agent ([`PromptAgent`], *optional*): Measure the signal for GRPO in the rollouts of this
            agent.
        group_size (`int`, *optional*, defaults to `8`): Group size of the planned training
            (`num_generations`).
        reward (`Callable`, *optional*): Reward function of the planned training, with TRL's
            signature. A reward of 1 is right. Defaults to `metric`.
        refiner ([`ProRefiner`], *optional*): Measure the gain of ProRefine. It starts from the
            first of `prompts`, or from the paper's prompt if that is empty.
        llm ([`ChatModel`], *optional*): Measure the score of a large LLM under the best request.
        requests (`Sequence[str]`, *optional*): Templates of requests with `{question}`, the plain
            one first.
        pool (`Mapping[str, ChatModel | Worker]` or [`Workers`], *optional*): Measure several models
            or workers, each alone and under an oracle's choice. Defaults to the workers of the
            agent, if its environment is [`Workers`] and has two or more.
        repeats (`int`, *optional*, defaults to `4`): Number of answers to each request, and of each
            model of the pool. 1 suffices at temperature 0.
        metric (`str`, ...): Metric that scores an answer between 0 and 1, as in [`evaluate_agent`].
        calls (`int`, *optional*, defaults to `512`): Largest number of calls of large LLMs in each
            measurement.
        delta (`float`, *optional*): The smallest gain that is worth it. Defaults to 0.10, and to
            0.05 from 2,000 calls on.
        seed (`int`, *optional*, defaults to `0`): Seed of rows, ties and samples.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of calls in flight.
        sampling (`Mapping`, *optional*): Sampling arguments for the calls of chat models.
    """

    # Is there a better system prompt?
    policy: ChatModel | Agent | None = None
    prompts: Sequence[str] = ("",)
    reference: ChatModel | None = None
    tried: int = 12
    top_up_calls: int = 0
    # Would GRPO have a gradient?
    agent: Agent | None = None
    group_size: int = 8
    reward: Callable[..., Any] | None = None
    # How many answers does ProRefine repair, and how many does it break?
    refiner: ProRefiner | None = None
    # What does the best request to a large LLM gain, or the best model for each question?
    llm: ChatModel | None = None
    requests: Sequence[str] = DEFAULT_REQUESTS
    pool: Mapping[str, ChatModel | Worker] | Workers | None = None
    repeats: int = 4
    # All measurements.
    metric: Metric = "exact_match"
    calls: int = 512
    delta: float | None = None
    seed: int = 0
    max_in_flight: int = 64
    sampling: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise `ValueError` if no measurement is requested, or the prompts are not a list."""
        subjects = (self.policy, self.agent, self.refiner, self.llm)
        if all(subject is None for subject in subjects) and not self.members:
            raise ValueError("say what to measure: policy=, agent=, refiner=, llm= or pool=")
        if isinstance(self.prompts, str) or not self.prompts:
            raise ValueError("prompts is a list of system prompts, yours first")

    @property
    def smallest_gain(self) -> float:
        """The smallest gain that is worth it."""
        return default_delta(self.calls) if self.delta is None else self.delta

    @property
    def members(self) -> Mapping[str, Any]:
        """The models or workers to measure alone: those of the pool, else those that the agent
        leads.
        """
        if isinstance(self.pool, Workers):
            return self.pool.pool
        if self.pool is not None:
            return self.pool
        environment = getattr(self.agent, "environment", None)
        # An oracle that chooses needs two workers.
        if isinstance(environment, Workers) and len(environment.pool) > 1:
            return environment.pool
        return {}

    @property
    def asks_once(self) -> bool:
        """Whether the agent has one turn to ask in, before the turn of its answer."""
        limits = getattr(self.agent, "limits", None)
        return limits is not None and limits.max_turns <= 2
