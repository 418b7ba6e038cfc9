"""GEPA improves the system prompt of an agent in one of our environments (the extra `optimizers`).

gepa.optimize({"system_prompt": "..."}, trainset=rows, valset=..., adapter=AgentAdapter(agent, reward), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

try:
    from gepa.core.adapter import EvaluationBatch
except ImportError as error:
    raise ImportError(
        "interop.gepa needs the extra optimizers: pip install 'agentic-prompting[optimizers]'"
    ) from error

from ..evaluation.scoring import score_rollouts
from ..llm.loop import run
from ..rollout import Rollout


class AgentAdapter:
    """A `GEPAAdapter`: each row is an episode of the agent, in its environment, with the candidate as system prompt.

    Args:
        agent ([`PromptAgent`]): The agent that plays. Its weights stay as they are.
        reward (`Callable`): A reward function with TRL's signature, like all of `rewards/`. It gets the columns of the
            rows, those that the environment's `reset` adds among them.
        part (`str`, *optional*, defaults to `"system_prompt"`): The name of the candidate's text that is the system
            prompt.

    Raises:
        [`LLMError`]: From `evaluate`, if the environment failed; a score of 0 would count against the prompt. By
            default `gepa.optimize` ends with this error. With `raise_on_exception=False` it logs the error and goes on
            with its next iteration, unless it was still scoring the first candidate.
    """

    propose_new_texts = None

    def __init__(self, agent: Any, reward: Callable[..., Any], part: str = "system_prompt"):
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

        # The candidate takes the place of the agent's own system prompt. The rows hold complete prompts, to which the
        # agent must not add it a second time.
        spec = replace(self.agent.spec, system_prompt=candidate[self.part])
        agent = copy(self.agent)
        agent.spec = replace(spec, join_system_prompt=False)
        rollouts = agent.answer_all(
            [{**row, "prompt": spec.messages(row)} for row in batch], progress=False
        )
        for rollout in rollouts:
            if rollout.error is not None:
                raise rollout.error

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
        rollouts: list[Rollout] = eval_batch.trajectories or []
        scores = eval_batch.scores if rollouts else []
        reflected = []
        for rollout, score in zip(rollouts, scores, strict=True):
            accepted = rollout.row.get("answers") or "unknown"
            reflected.append(
                {
                    "Inputs": rollout.row.get("question") or "",
                    "Generated Outputs": "\n".join(_dialogue(rollout)),
                    "Feedback": f"score {score:g}; accepted answers: {accepted}",
                }
            )
        return dict.fromkeys(components_to_update, reflected)


def _dialogue(rollout: Rollout) -> list[str]:
    """Turns and observations as lines, in their order."""
    lines = []
    for number, turn in enumerate(rollout.turns):
        lines.append(turn.text)
        if number < len(rollout.observations) and rollout.observations[number].text:
            lines.append(f"[reply] {rollout.observations[number].text}")
    return [line for line in lines if line]
