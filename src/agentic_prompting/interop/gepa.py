"""GEPA improves the system prompt of an agent in one of our environments (the extra `optimizers`).

gepa.optimize({"system_prompt": "..."}, trainset=rows, valset=..., adapter=AgentAdapter(agent, reward), ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

try:
    from gepa.core.adapter import EvaluationBatch
except ImportError as error:
    raise ImportError("interop.gepa needs the extra optimizers: pip install 'agentic-prompting[optimizers]'") from error

from ..llm.loop import run
from ..rollout import Rollout


class AgentAdapter:
    """A `GEPAAdapter`: each row is an episode of the agent, in its environment, with the candidate as system prompt.

    Args:
        agent ([`PromptAgent`]): The agent that plays. Its weights stay as they are.
        reward (`Callable`): A reward function with TRL's signature, like all of `rewards/`.
        part (`str`, *optional*, defaults to `"system_prompt"`): The name of the candidate's text that is the system
            prompt.

    Raises:
        [`LLMError`]: From `evaluate`, if the environment failed. GEPA then skips this batch; a score of 0 would count
            against the prompt.
    """

    propose_new_texts = None

    def __init__(self, agent: Any, reward: Callable[..., Any], part: str = "system_prompt"):
        self.agent, self.reward, self.part = agent, reward, part

    def evaluate(
        self, batch: Sequence[Mapping[str, Any]], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch:
        spec = replace(self.agent.spec, system_prompt=candidate[self.part])
        rollouts = self.agent.answer_all([{**row, "prompt": spec.messages(row)} for row in batch], progress=False)
        for rollout in rollouts:
            if rollout.error is not None:
                raise rollout.error
        outputs = [rollout.answer or "" for rollout in rollouts]
        columns = {name: [row.get(name) for row in batch] for name in batch[0]}
        scores = self.reward(
            prompts=[r.row["prompt"] for r in rollouts], completions=outputs, rollout=rollouts, **columns
        )
        scores = run(scores) if inspect.iscoroutine(scores) else scores
        if any(score is None for score in scores):
            raise RuntimeError("the reward function returned no score for a finished episode")
        return EvaluationBatch(outputs, list(scores), rollouts if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: EvaluationBatch, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        rollouts: list[Rollout] = eval_batch.trajectories or []
        reflected = [
            {
                "Inputs": rollout.row.get("question", ""),
                "Generated Outputs": "\n".join(_dialogue(rollout)),
                "Feedback": f"score {score:g}; accepted answers: {rollout.row.get('answers', 'unknown')}",
            }
            for rollout, score in zip(rollouts, eval_batch.scores, strict=True)
        ]
        return dict.fromkeys(components_to_update, reflected)


def _dialogue(rollout: Rollout) -> list[str]:
    """Turns and observations as lines, in their order."""
    replies = [f"[reply] {observation.text}" for observation in rollout.observations] + [""] * len(rollout.turns)
    return [line for turn, text in zip(rollout.turns, replies, strict=False) for line in (turn.text, text) if line]
