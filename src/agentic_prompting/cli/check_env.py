"""`agentic-prompting check-env`: a few episodes with an environment of the user's own, without training."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .commands import line, show_reply, show_turn
from .loader import load_environment
from .options import AsJson, TaskRows, check_agent, option, say

if TYPE_CHECKING:
    from ..rollout import AgentSpec, Observation, Rollout, Sample, SampleRequest, Turn

_EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
"""By the type in a tool's schema: an argument for a call that is made up. A text is the question."""


def check_env(
    rows: TaskRows,
    name: Annotated[
        str | None,
        typer.Argument(
            help="module:name: an environment, its class, or a function of the rollout."
        ),
    ] = None,
    harness: Annotated[
        str | None, option("Instead: a command-line agent, such as codex, or mine:my_harness.")
    ] = None,
    dialect: Annotated[str, option("Of a harness that speaks several.")] = "",
    isolation: Annotated[
        str, option("Of a harness: bwrap, or none, with all rights of this user.")
    ] = "bwrap",
    request: Annotated[
        list[str] | None, option("What the agent asks; several times for several turns.")
    ] = None,
    model: Annotated[
        Path | None, option("A model that plays the agent, instead of a script.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Play three episodes with an environment of your own, without training, and show them.

    By default a script plays the agent: it sends each --request, or the question, or calls of tools with made-up
    arguments, and then answers. With --harness it writes a file, reads it and says done, inside the real program.
    """
    if (name is None) == (harness is None):
        raise ValueError("name an environment as module:name, or an agent with --harness NAME")
    if harness is not None:
        from .check_harness import check_harness

        return check_harness(harness, dialect, isolation, as_json)
    assert name is not None
    from ..rollout import AgentSpec, TagGrammar, rollout_record, template_for

    environment: Any = load_environment(name)
    if environment.play_episode is not None and model is None:
        raise ValueError(
            "a program calls the policy by itself, so no script can play it: name a model with --model"
        )
    environment.check()
    asked = (
        list(rows.load("", 0))
        if rows.dataset
        else [{"question": "what is 2 plus 2 ?", "answers": ["4"]}]
    )
    asked = [asked[i % len(asked)] for i in range(3)]
    grammar = environment.grammar or TagGrammar()
    shown = dict(environment.chat_template_kwargs)
    spec = AgentSpec(
        template_for(environment, grammar), grammar=grammar, chat_template_kwargs=shown
    )
    tools = [tool["function"] for tool in shown.get("tools") or ()]
    if model is not None:
        from ..agent import PromptAgent

        check_agent(model)
        rollouts = PromptAgent.from_pretrained(model, environment, spec).answer_all(
            asked, progress=False
        )
    else:
        rollouts = _scripted(environment, spec, asked, request, tools)
    if as_json:
        say(
            json.dumps({"episodes": [rollout_record(rollout) for rollout in rollouts]}, default=str)
        )
    else:
        for tool in tools:
            line(f"tool           {json.dumps(tool, ensure_ascii=False)}", "dim")
        line(
            f"what training would show the agent by default:\n{spec.messages(asked[0])[-1]['content']}\n",
            "dim",
        )
        for number, rollout in enumerate(rollouts, start=1):
            line(f"episode {number}: {rollout.row['question']}", "bold")
            for i, turn in enumerate(rollout.turns):
                show_turn(turn)
                for heard in rollout.observations[i : i + 1]:
                    show_reply("environment", heard)
    return _conclude(rollouts, bool(tools), model is not None, as_json)


def _scripted(
    environment: Any,
    spec: AgentSpec,
    rows: Sequence[Any],
    requests: Sequence[str] | None,
    tools: Sequence[Any],
) -> list[Rollout]:
    """An episode for each row, played by a script."""
    from ..llm import run
    from ..rollout import Limits, Rollout, play_all, reset_rows

    begun = run(reset_rows(environment, [{**row, "prompt": spec.messages(row)} for row in rows]))
    rollouts = [Rollout([i], row=row, seed=i) for i, row in enumerate(begun)]
    agent: Any = _ScriptedAgent(spec.grammar, rollouts, requests, tools)
    play_all(rollouts, agent, environment, agent, Limits(max_turns=len(requests or "x") + 1))
    return rollouts


def _conclude(rollouts: Sequence[Rollout], tools: bool, by_model: bool, as_json: bool) -> int:
    """Print what came back, without counting a tool's errors and a script's own answers; the exit status."""

    def mistaken(one: Observation) -> bool:
        return one.error is not None or (tools and one.text.startswith("Error: "))

    heard = [one for rollout in rollouts for one in rollout.observations]
    wrong = [one for one in heard if mistaken(one)]
    failed = [str(rollout.error) for rollout in rollouts if rollout.error is not None]
    replies, errors = len(heard) - len(wrong), max(len(wrong), len(failed))
    calls = [one.counts for one in rollouts if "program/calls" in one.counts]
    if calls:  # a program's single call has no observation
        made, sequences = (
            int(sum(one[f"program/{what}"] for one in calls)) for what in ("calls", "sequences")
        )
        said = f"calls of the policy: {made} in {sequences} sequences"
    else:
        said = f"{replies} repl{'y' if replies == 1 else 'ies'}" if replies else "no reply"
    said += f", {errors} error{'s' * (errors > 1)}" if errors else ""
    if heard and not calls:
        said += f", the slowest took {max(one.seconds for one in heard):.2f} s"
    elif (
        not any(turn.kind == "act" for rollout in rollouts for turn in rollout.turns) and not errors
    ):
        said += (
            ": no tool was called, see --request"
            if tools
            else ": it was never asked, see --request"
        )
    if by_model:
        ends = Counter(rollout.status.replace("_", " ") for rollout in rollouts)
        said += "; " + ", ".join(f"{count} {status}" for status, count in ends.items())
    if not as_json:
        line(f"{len(rollouts)} episodes: {said}")
    if failed:
        print(
            f"agentic-prompting: the environment failed: {' '.join(failed[0].split())}",
            file=sys.stderr,
        )
    elif wrong and not replies:
        fix = 'give one that works: --request \'{"name": "...", "arguments": {...}}\''
        print(
            f"agentic-prompting: every call failed: {' '.join(wrong[0].text.split())}; {fix}",
            file=sys.stderr,
        )
    return int(bool(failed or (wrong and not replies)))


class _ScriptedAgent:
    """A policy that sends its requests and then answers, with its own chat format: its tokens are characters."""

    def __init__(
        self,
        grammar: Any,
        rollouts: Sequence[Rollout],
        requests: Sequence[str] | None,
        tools: Sequence[Mapping[str, Any]],
    ):
        self.grammar, self.rollouts, self.requests, self.tools = grammar, rollouts, requests, tools

    async def __call__(self, request: SampleRequest) -> Sample:
        from ..rollout import Sample

        rollout = self.rollouts[request.context[0]]  # its number is its prompt
        asks = self.requests or [self._made_up(rollout)]
        if len(rollout.turns) < len(asks):
            tag, text = (
                getattr(self.grammar, "act", getattr(self.grammar, "call", None)),
                asks[len(rollout.turns)],
            )
        else:
            tag, text = getattr(self.grammar, "answer", None), rollout.row["answers"][0]
        think = getattr(self.grammar, "think", "think")
        return Sample(
            [*map(ord, f"<{think}> scripted </{think}> <{tag}> {text} </{tag}>" if tag else text)]
        )

    def _made_up(self, rollout: Rollout) -> str:
        """The question; or a call of a tool, in each episode of another one, with all arguments that it needs."""
        if not self.tools:
            return str(rollout.row["question"])
        tool = self.tools[rollout.seed % len(self.tools)]
        parameters = tool.get("parameters") or {}
        known = parameters.get("properties") or {}
        arguments = {
            name: (
                known[name].get("enum")
                or [_EXAMPLES.get(known[name].get("type"), rollout.row["question"])]
            )[0]
            for name in parameters.get("required") or ()
        }
        return json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)

    def of(self, row: Mapping[str, Any]) -> Any:
        return self

    def parse(self, ids: Sequence[int]) -> Turn:
        return self.grammar.parse("".join(map(chr, ids)))

    def observation_ids(self, text: str, after: Sequence[int]) -> list[int]:
        before, behind = self.grammar.frame
        return [*map(ord, before + self.grammar.escape(text) + behind)]
