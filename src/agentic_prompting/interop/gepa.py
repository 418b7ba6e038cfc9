"""[`AgentAdapter`]: GEPA improves the system prompt of an agent in one of our environments.

gepa.optimize({"system_prompt": "..."}, trainset=rows, valset=..., adapter=AgentAdapter(agent,
reward), ...)

Needs the extra `optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

try:
    from gepa.core.adapter import EvaluationBatch
except ImportError as error:
    raise ImportError(
        "interop.gepa needs the extra optimizers: pip install 'agentic-prompting[optimizers]'"
    ) from error

from ..evaluation.scoring import score_rollouts
from ..llm.loop import run
from ..rollout import AgentSpec, Rollout


class PlayingAgent(Protocol):
    """An agent that plays episodes, such as [`PromptAgent`]."""

    spec: AgentSpec

    def answer_all(
        self,
        questions: Sequence[str | Mapping[str, Any]],
        seed: int = 0,
        progress: bool = True,
    ) -> list[Rollout]: ...


class AgentAdapter:
    """A `GEPAAdapter`: each row is an episode of the agent in its environment, with the candidate
    as system prompt.

    Args:
        agent ([`PromptAgent`]): The agent that plays. Its weights are not changed.
        reward (`Callable`): A reward function with TRL's signature, like those of `rewards/`. It
            gets the columns of the rows, including those that the environment's `reset` adds.
        part (`str`, *optional*, defaults to `"system_prompt"`): The name of the candidate's text
            that is the system prompt.

    Raises:
        [`LLMError`]: From `evaluate`, if the environment failed; a score of 0 would count against
            the prompt. By default `gepa.optimize` ends with this error. With
            `raise_on_exception=False` it logs the error and goes on with its next iteration, unless
            it was still scoring the first candidate.
    """

    propose_new_texts = None

    def __init__(
        self, agent: PlayingAgent, reward: Callable[..., Any], part: str = "system_prompt"
    ):
        self.agent = agent
        self.reward = reward
        self.part = part

    def evaluate(
        self,
        batch: Sequence[Mapping[str, Any]],
        candidate: Mapping[str, str],
        capture_traces: bool = False,
    ) -> EvaluationBatch:
        if not batch:
            return EvaluationBatch([], [], [] if capture_traces else None)

        # The candidate replaces the agent's own system prompt. The rows hold complete prompts, to
        # which the agent must not add it a second time.
        spec = replace(self.agent.spec, system_prompt=candidate[self.part])
        agent = copy(self.agent)
        agent.spec = replace(spec, join_system_prompt=False)
        rows = [{**row, "prompt": spec.messages(row)} for row in batch]
        rollouts = agent.answer_all(rows, progress=False)
        # An outage says nothing about the prompt.
        for rollout in rollouts:
            if rollout.error is not None:
                raise rollout.error

        # GEPA needs a number for each episode.
        scores = []
        for score in run(score_rollouts(self.reward, rollouts)):
            if score is None:
                raise RuntimeError("the reward function returned no score for a finished episode")
            scores.append(score)
        answers = [rollout.answer or "" for rollout in rollouts]
        return EvaluationBatch(answers, scores, rollouts if capture_traces else None)

    def make_reflective_dataset(
        self,
        candidate: Mapping[str, str],
        eval_batch: EvaluationBatch,
        components_to_update: Sequence[str],
    ) -> dict[str, list[dict[str, Any]]]:
        # Without captured traces there is nothing to reflect on.
        rollouts: list[Rollout] = eval_batch.trajectories or []
        scores = eval_batch.scores if rollouts else []
        examples = []
        for rollout, score in zip(rollouts, scores, strict=True):
            # The reflecting model reads what the agent was asked, what it wrote, and how well it
            # did.
            accepted_answers = rollout.row.get("answers") or "unknown"
            examples.append(
                {
                    "Inputs": rollout.row.get("question") or "",
                    "Generated Outputs": _render_dialogue(rollout),
                    "Feedback": f"score {score:g}; accepted answers: {accepted_answers}",
                }
            )
        return dict.fromkeys(components_to_update, examples)


def _render_dialogue(rollout: Rollout) -> str:
    """Return turns and observations in their order, one after the other."""
    lines = []
    for number, turn in enumerate(rollout.turns):
        if turn.text:
            lines.append(turn.text)
        # The last turn usually has no reply.
        if number < len(rollout.observations) and rollout.observations[number].text:
            lines.append(f"[reply] {rollout.observations[number].text}")
    return "\n".join(lines)
