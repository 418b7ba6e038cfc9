"""One batch played by a [`ChatModel`]: every prompt on every problem, N times, all calls at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import ChatModel, Reply, Usage
from ..rollout import AgentSpec, Grammar, Rollout, Sample
from .evidence import Attempt, Evidence, Trial, question_of, truth_of
from .system_prompt import Place, SystemPrompt

Reward = Callable[..., Sequence[float | None]]
"""TRL's reward signature: called with `prompts`, `completions`, `rollout` and the columns of the rows, all lists."""


@dataclass(frozen=True)
class Failures:
    """What went wrong in a batch.

    Args:
        share (`float`): Of the rollouts, those without a reward.
        fatal (`bool`): Whether one of the errors cannot get better by waiting.
        first (`str`): The error to tell a person: the first fatal one, else the first.
    """

    share: float
    fatal: bool
    first: str


def play(
    policy: ChatModel,
    prompts: Sequence[SystemPrompt],
    rows: Sequence[Mapping[str, Any]],
    reward: Reward,
    spec: AgentSpec,
    place: Place,
    repeats: Sequence[int],
    sampling: Mapping[str, Any],
) -> tuple[list[Trial], Failures, Usage]:
    """Ask, wait for all, score.

    Args:
        policy ([`ChatModel`]): The model.
        prompts (`Sequence[SystemPrompt]`): M different ones.
        rows (`Sequence[Mapping]`): b problems.
        reward (`Callable`): A failed call is not shown to it: its reward is `None`.
        spec ([`AgentSpec`]): How a row becomes a conversation.
        place (`str`): Where the system prompt goes.
        repeats (`Sequence[int]`): The numbers of the N samples of each conversation.
        sampling (`Mapping`): Passed on with every call.

    Returns:
        One [`Trial`] per prompt, the [`Failures`], and the usage of all calls.
    """
    conversations = [[prompt.messages(spec.messages(row), place) for row in rows] for prompt in prompts]
    futures = [
        policy.submit(conversation, repeat=repeat, **sampling)
        for of_prompt in conversations
        for conversation in of_prompt
        for repeat in repeats
    ]
    replies = [future.result() for future in futures]
    asked = [row for _ in prompts for row in rows for _ in repeats]
    rewards = _score(reward, asked, replies, spec.grammar)
    attempts = [Attempt(reply.text, score) for reply, score in zip(replies, rewards, strict=True)]
    size = len(repeats)
    cells = [tuple(attempts[start : start + size]) for start in range(0, len(attempts), size)]
    trials = [
        Trial(
            prompt,
            tuple(
                Evidence(question_of(row), truth_of(row), cells[number * len(rows) + column])
                for column, row in enumerate(rows)
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    return trials, _failures(replies, rewards), sum((reply.usage for reply in replies), Usage())


def _score(
    reward: Reward, rows: Sequence[Mapping[str, Any]], replies: Sequence[Reply], grammar: Grammar
) -> list[float | None]:
    """Rewards of all replies that are none of them an error, in one call; `None` for the others."""
    answered = [number for number, reply in enumerate(replies) if reply.error is None]
    scores: list[float | None] = [None] * len(replies)
    if not answered:
        return scores
    shown = [rows[number] for number in answered]
    texts = [replies[number].text for number in answered]
    columns = {name: [row[name] for row in shown] for name in shown[0] if name not in ("prompt", "completion")}
    given = reward(
        prompts=[row.get("prompt") or row["question"] for row in shown],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        rollout=[_rollout(row, text, grammar) for row, text in zip(shown, texts, strict=True)],
        **columns,
    )
    for number, score in zip(answered, given, strict=True):
        scores[number] = None if score is None else float(score)
    return scores


def _rollout(row: Mapping[str, Any], text: str, grammar: Grammar) -> Rollout:
    """A reply as an episode of one turn, for rewards that read rollouts. It has no tokens: one stands for the turn."""
    rollout = Rollout([0], dict(row))
    turn = grammar.parse(text)
    rollout.sampled(Sample([0]), turn)
    rollout.status = "answered" if turn.kind == "answer" else "malformed"
    return rollout


def _failures(replies: Sequence[Reply], rewards: Sequence[float | None]) -> Failures:
    errors = [reply.error for reply in replies if reply.error is not None]
    fatal = [error for error in errors if error.fatal]
    missing = sum(score is None for score in rewards)
    first = [*fatal, *errors]
    return Failures(missing / len(rewards), bool(fatal), str(first[0]) if first else "the reward gave None")
