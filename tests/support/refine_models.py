"""Models that follow simple rules, for the tests of `refine/`; one common log has all their
requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from agentic_prompting.llm import LLMError, Reply, ServerFailed, Usage
from agentic_prompting.refine import ProRefiner

PROMPT = "Think step by step."
QUERY = "How many drums?"


@dataclass
class Log:
    """Calls of all models in the order they were made: `(role, messages, sampling)`; `fail_at`
    positions fail.
    """

    calls: list[tuple[str, list[dict], dict]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    fail_at: set[int] = field(default_factory=set)
    error: LLMError = ServerFailed("scripted failure")

    @property
    def roles(self) -> list[str]:
        return [role for role, _, _ in self.calls]


class RuleModel:
    """A [`ChatModel`]: `rule(system, user)` gives the whole text, of which `max_tokens` words are
    written.
    """

    def __init__(self, role: str, log: Log, rule):
        self.role = role
        self.log = log
        self.rule = rule
        self.model = f"{role}-rule"

    async def __call__(self, messages, *, repeat=None, session=None, **sampling: Any) -> Reply:
        number = len(self.log.calls)
        self.log.calls.append((self.role, [dict(message) for message in messages], sampling))
        self.log.sessions.append(session)
        return self._reply(number, messages, sampling)

    def _reply(self, number, messages, sampling):
        if number in self.log.fail_at:
            return Reply(error=self.log.error)
        words = self.rule(messages[0]["content"], messages[-1]["content"]).split(" ")
        limit = sampling.get("max_tokens", 10**9)
        text = " ".join(words[:limit])
        finish = "length" if len(words) > limit else "stop"
        return Reply(text=text, finish_reason=finish, usage=Usage(7, min(limit, len(words))))


def words(count: int, tag: str = "w") -> str:
    """A text of `count` words: `w0 w1 ...`."""
    return " ".join(f"{tag}{i}" for i in range(count))


def version(prompt: str) -> int:
    """The number of times that [`improve`] improved a prompt."""
    return len(re.findall(r"\+", prompt))


def answer(length: int):
    """A task model's rule: `length` words that depend on the prompt, then the end of sequence."""
    return lambda system, user: words(length, f"v{version(system)}w")


def critic(system: str, user: str) -> str:
    return (
        f"Feedback on {len(user)} characters, "
        f"{'unfinished' if 'not finished' in user else 'complete'}."
    )


def improve(system: str, user: str) -> str:
    """An optimizer's rule: the prompt in its request, with a plus sign."""
    prompt = user.removeprefix("Prompt:\n").split("\n\nFeedback:\n")[0]
    return f"Here it is. <IMPROVED_PROMPT>{prompt}+</IMPROVED_PROMPT>"


def keep(system: str, user: str) -> str:
    return improve(system, user).replace("+<", "<")


def models(
    log: Log, length: int = 35, optimizer=improve, feedback=critic, verifier=None
) -> dict[str, RuleModel]:
    """Keyword arguments of `ProRefiner`."""
    rules = {"task": answer(length), "feedback": feedback, "optimizer": optimizer}
    if verifier is not None:
        rules["verifier"] = verifier
    return {role: RuleModel(role, log, rule) for role, rule in rules.items()}


QUERIES = [f"Question {i}?" for i in range(20)]


def untimed(result):
    steps = tuple(replace(step, seconds=0.0) for step in result.steps)
    return replace(result, seconds=0.0, steps=steps)


def refiner(log=None, **options):
    return ProRefiner(**{**models(log if log is not None else Log()), "max_steps": 4, **options})


def refined(log, queries=QUERY, **options):
    """`ProRefiner.refine` with rule models; those options that are not the models' own are the
    refiner's.
    """
    rules = {
        name: options.pop(name) for name in ("length", "optimizer", "feedback") if name in options
    }
    verifier = options.get("verifier")
    if callable(verifier) and verifier in (says_right, says_wrong, says_nothing):
        rules["verifier"] = options.pop("verifier")
    refiner = ProRefiner(**models(log, **rules), **{"max_steps": 6, **options})
    return refiner.refine(PROMPT, queries)


def says_right(system, user):
    return "It is. <ACCURACY>1</ACCURACY>"


def says_wrong(system, user):
    return "No. <ACCURACY> 0 </ACCURACY>"


def says_nothing(system, user):
    return "Hard to tell."
