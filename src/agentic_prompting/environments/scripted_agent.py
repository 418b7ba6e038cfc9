"""[`play_script`]: episodes in an environment, to try it out, with a script as the agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..llm import run
from ..rollout import (
    AgentSpec,
    AskGrammar,
    Environment,
    Limits,
    Rollout,
    Sample,
    SampleRequest,
    Turn,
    play_all,
    reset_rows,
)

_EXAMPLE_ARGUMENTS = {
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}
"""By the type in a tool's schema: an argument for a call that is made up. A text is the question."""


def play_script(
    environment: Environment,
    spec: AgentSpec,
    rows: Sequence[Mapping[str, Any]],
    requests: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Rollout]:
    """Play an episode for each row, in which a script sends requests and then the accepted answer.

    Args:
        environment ([`Environment`]): Answers the requests.
        spec ([`AgentSpec`]): The prompt and the grammar of the agent.
        rows (`Sequence[dict]`): Rows with `question` and `answers`.
        requests (`Sequence[str]`, *optional*): The requests of each episode, with the tags of the
            grammar or without; a conductor's without a worker's name goes to every worker. Defaults
            to the question or, with tools, to a call of one of them,
            of another one in each episode.
        tools (`Sequence[dict]`, *optional*): The schemas of the tools: `name` and `parameters`.
    """
    # Let the environment prepare each row.
    prompted_rows = [{**row, "prompt": spec.messages(row)} for row in rows]
    reset = run(reset_rows(environment, prompted_rows))
    # Each prompt is the number of its rollout, by which the script knows which one it plays.
    rollouts = [Rollout([number], row=row, seed=number) for number, row in enumerate(reset)]
    agent: Any = _ScriptedPolicy(spec.grammar, rollouts, requests, tools)
    # A turn for each request, and one for the answer.
    max_turns = max(1, len(requests)) + 1
    play_all(rollouts, agent, environment, agent, Limits(max_turns=max_turns))
    return rollouts


class _ScriptedPolicy:
    """A policy that sends its requests and then answers, with its own chat format.

    Its tokens are characters.
    """

    def __init__(
        self,
        grammar: Any,
        rollouts: Sequence[Rollout],
        requests: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
    ):
        self.grammar = grammar
        self.rollouts = rollouts
        self.requests = requests
        self.tools = tools

    async def __call__(self, request: SampleRequest) -> Sample:
        rollout = self.rollouts[request.context[0]]  # the prompt is the rollout's number
        # The next request or, after the last one, the first accepted answer.
        requests = self.requests or [self._make_request(rollout)]
        if len(rollout.turns) < len(requests):
            # Grammars call the tag of a request `act` or `call`.
            tag = getattr(self.grammar, "act", getattr(self.grammar, "call", None))
            text = _without_tag(requests[len(rollout.turns)], tag)
            action = f"<{tag}> {text} </{tag}>"
            if isinstance(self.grammar, AskGrammar):
                action = _name_workers(text, tag, rollout.row.get("workers") or ())
        else:
            tag = getattr(self.grammar, "answer", None)
            text = rollout.row["answers"][0]
            action = f"<{tag}> {text} </{tag}>"
        # A grammar without such a tag takes the text as it is.
        if tag:
            think = getattr(self.grammar, "think", "think")
            text = f"<{think}> scripted </{think}> {action}"
        return Sample([ord(character) for character in text])

    def _make_request(self, rollout: Rollout) -> str:
        """Return the question, or a call of a tool with all required arguments."""
        question = str(rollout.row["question"])
        if not self.tools:
            return question
        # The seed is the number of the episode.
        tool = self.tools[rollout.seed % len(self.tools)]
        parameters = tool.get("parameters") or {}
        properties = parameters.get("properties") or {}
        arguments = {}
        # A value that fits the schema of each required argument.
        for name in parameters.get("required") or ():
            schema = properties[name]
            if schema.get("enum"):
                arguments[name] = schema["enum"][0]
            else:
                arguments[name] = _EXAMPLE_ARGUMENTS.get(schema.get("type"), question)
        return json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)

    def for_row(self, row: Mapping[str, Any]) -> Any:
        return self

    def parse(self, ids: Sequence[int]) -> Turn:
        return self.grammar.parse("".join(map(chr, ids)))

    def observation_ids(self, text: str, after: Sequence[int]) -> list[int]:
        prefix, suffix = self.grammar.frame
        framed = prefix + self.grammar.escape(text) + suffix
        return [ord(character) for character in framed]


def _name_workers(request: str, tag: str | None, workers: Iterable[str]) -> str:
    """Return a conductor's turn: the request to every worker, unless it names its workers itself."""
    if request.startswith(f"<{tag} "):
        return request
    return " ".join(f'<{tag} to="{worker}">{request}</{tag}>' for worker in workers)


def _without_tag(request: str, tag: str | None) -> str:
    """Return a request without the grammar's tags around it."""
    text = request.strip()
    if tag and text.startswith(f"<{tag}>") and text.endswith(f"</{tag}>"):
        text = text.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>").strip()
    return text
