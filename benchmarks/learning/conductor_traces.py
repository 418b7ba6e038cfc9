"""Scripted traces of mixed quality, from which the conductor's warm start learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentic_prompting.evaluation.systems import Row
from benchmarks.learning.conductor_baselines import TEMPLATE
from benchmarks.learning.conductor_variants import Variant
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    TWIN,
    WORKER_OF,
    Facts,
    PlanStep,
    plan_of,
    question_text,
    read_question,
    read_value,
)

MIX = {
    "decompose": 0.3,
    "pass_on": 0.32,
    "wrong": 0.12,
    "bare": 0.06,
    "impatient": 0.1,
    "partial": 0.1,
}
"""Share of each kind of trace. Passing the question on is the habit to be unlearned."""
NOUN = {"sum": "digit sum"}
UNAVAILABLE = "unavailable"


class TraceWriter:
    """Writes an episode in the text that `Workers` makes of it.

    Args:
        environment ([`Workers`]): Whose workers reply.
        row (`Mapping`): A row that the environment has reset.
        variant ([`Variant`]): How values are handed on, and whether workers are asked again.
    """

    def __init__(self, environment: Any, row: Row, variant: Variant):
        self.environment = environment
        self.variant = variant
        self.budget = row.get("budget", "high")
        # Decides what the workers get wrong, and which calls fail.
        self.luck = random.Random(f"luck {row['reset_seed']}")
        self.names = {kind: name for name, kind in row["workers"].items()}
        self.turns: list[str] = []
        self.observations: list[str] = []
        self.replies: list[str] = []

    def ask(self, thought: str, calls: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Append a turn with these calls, and the replies to it. Return the calls that failed."""
        first = len(self.replies)
        requests = [f'<ask to=" {self.names[kind]} "> {text} </ask>' for kind, text in calls]
        self.turns.append(f"<think> {thought} </think> {' '.join(requests)}")
        for kind, text in calls:
            # The scripted workers read nothing but the lines that begin with a reference.
            quoted = [
                f"#{number} : {reply}"
                for number, reply in enumerate(self.replies, 1)
                if f"#{number}" in text.split()
            ]
            model = self.environment.pool[kind].model
            if self.luck.random() < model.down:
                self.replies.append(UNAVAILABLE)
                continue
            repeat = self.luck.getrandbits(32)
            self.replies.append(model.answer("\n".join([*quoted, text]), repeat))
        shown = [f"#{number} : {reply}" for number, reply in enumerate(self.replies, 1)]
        self.observations.append("\n".join(shown[first:]))
        replies = self.replies[first:]
        return [call for call, reply in zip(calls, replies, strict=True) if reply == UNAVAILABLE]

    def finish(self, thought: str, answer: str) -> None:
        """Append the answering turn."""
        self.turns.append(f"<think> {thought} </think> <answer> {answer} </answer>")

    def describe(self, kind: str) -> str:
        """A worker's description and name, in the order of the prompt, so that two layers can copy them."""
        return f"{self.environment.pool[kind].description} {self.names[kind]}"

    def value(self, index: int) -> str:
        """The value in a reply."""
        return read_value(self.replies[index]) or "nothing"

    def text_values(self) -> list[str]:
        """What stands for each earlier step in a request."""
        values = []
        for index, reply in enumerate(self.replies):
            # A call that failed was made again.
            if reply != UNAVAILABLE:
                values.append(self.value(index) if self.variant.retypes else f"#{index + 1}")
        return values

    def choose_expert(self, operation: str, generator: random.Random) -> str:
        """A worker that knows an operation."""
        kind = WORKER_OF[operation]
        if self.variant.has_twin and kind == "facts":
            twin_share = self.variant.twin_shares[self.budget]
            kind = TWIN if generator.random() < twin_share else "facts"
        return kind

    @property
    def is_out_of_turns(self) -> bool:
        """Whether the next turn has to answer."""
        return len(self.turns) >= self.variant.max_turns - 1


def write_plan(
    writer: TraceWriter,
    steps: Sequence[PlanStep],
    generator: random.Random,
    wrong_workers: bool = False,
    levels: int = 9,
) -> None:
    """The calls of a plan, all that need nothing of each other in one turn; then the last value as the answer."""
    depths = sorted({step.depth for step in steps})[:levels]
    for depth in depths:
        level = [step for step in steps if step.depth == depth]
        calls = []
        for step in level:
            kind = writer.choose_expert(step.operation, generator)
            if wrong_workers and generator.random() < 0.6:
                kind = generator.choice(list(DESCRIPTION))
            calls.append((kind, step.request(writer.text_values())))
        if len(calls) == 1:
            operation = level[0].operation
            noun = NOUN.get(operation, operation)
            thought = f"find the {noun} with {writer.describe(calls[0][0])}"
        else:
            kinds = dict.fromkeys(kind for kind, _ in calls)
            thought = "find all with " + " ".join(map(writer.describe, kinds))
        failed = writer.ask(thought, calls)
        # Ask again what failed.
        while failed and writer.variant.retries and not writer.is_out_of_turns:
            kinds = dict.fromkeys(kind for kind, _ in failed)
            again = "ask again with " + " ".join(map(writer.describe, kinds))
            failed = writer.ask(again, failed)
        if writer.is_out_of_turns:
            break
    writer.finish("done", writer.value(len(writer.replies) - 1))


def write_trace(
    kind: str, row: Row, writer: TraceWriter, facts: Facts, generator: random.Random
) -> None:
    """One trace of a kind of `MIX`."""
    expression = read_question(row["question"])
    assert expression is not None
    steps = plan_of(expression)
    drops_thought = kind == "bare"
    if kind == "bare":
        kind = generator.choice(["decompose", "pass_on"])
    if kind in ("decompose", "wrong"):
        write_plan(writer, steps, generator, wrong_workers=kind == "wrong")
    elif kind == "partial" and len(steps) > 1:
        write_plan(writer, steps, generator, levels=1)
    elif kind == "impatient":
        guesses = facts.values.get(expression[0], ["nothing"])
        writer.finish("i know this", generator.choice(guesses))
    else:
        worker = writer.choose_expert(expression[0], generator)
        thought = f"ask the whole question with {writer.describe(worker)}"
        writer.ask(thought, [(worker, question_text(expression))])
        writer.finish("done", writer.value(0))
    if drops_thought:
        writer.turns[-1] = writer.turns[-1].partition("</think> ")[2]


def draw_traces(
    rows: Sequence[Row],
    n: int,
    environment: Any,
    facts: Facts,
    variant: Variant,
    generator: random.Random,
) -> list[dict[str, Any]]:
    """Traces of mixed quality, each of an episode with a pool of its own."""
    traces = []
    for _ in range(n):
        (kind,) = generator.choices(list(MIX), list(MIX.values()))
        row = dict(generator.choice(rows))
        prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
        seed = generator.getrandbits(48)
        row = environment.reset({**row, "reset_seed": seed, "prompt": prompt})
        writer = TraceWriter(environment, row, variant)
        write_trace(kind, row, writer, facts, generator)
        traces.append({**row, "turns": writer.turns, "observations": writer.observations})
    return traces
