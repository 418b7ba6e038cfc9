"""Scripted traces of mixed quality, from which the conductor's warm start learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentic_prompting.evaluation.systems import Row
from benchmarks.learning.conductor_baselines import TEMPLATE
from benchmarks.learning.conductor_variants import Variant
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    TWIN,
    WORKER_OF,
    Facts,
    PlanStep,
    SandboxWorkers,
    ScriptedWorker,
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
"""Share of each type of trace. Passing the question on is the habit to be unlearned."""
NOUN = {"sum": "digit sum"}
UNAVAILABLE = "unavailable"


class WorkerCall(NamedTuple):
    """A request to a worker of the pool."""

    worker: str
    request: str


class TraceWriter:
    """Writes an episode in the text that `Workers` makes of it.

    Args:
        environment ([`SandboxWorkers`]): Its workers reply.
        row (`Mapping`): A row that the environment has reset.
        variant ([`Variant`]): How values are handed on, and whether workers are asked again.
    """

    def __init__(self, environment: SandboxWorkers, row: Row, variant: Variant):
        self.environment = environment
        self.variant = variant
        self.budget: str = row.get("budget", "high")
        # Decides what the workers get wrong, and which calls fail.
        self.luck = random.Random(f"luck {row['reset_seed']}")
        self.names = {worker: name for name, worker in row["workers"].items()}
        self.turns: list[str] = []
        self.observations: list[str] = []
        self.replies: list[str] = []

    def ask(self, thought: str, calls: Sequence[WorkerCall]) -> list[WorkerCall]:
        """Append a turn with these calls, and the replies to it. Return the calls that failed."""
        requests = [
            f'<ask to=" {self.names[call.worker]} "> {call.request} </ask>' for call in calls
        ]
        self.turns.append(f"<think> {thought} </think> {' '.join(requests)}")

        # A call may quote the replies before it, those of its own turn included.
        lines = []
        failed_calls = []
        for call in calls:
            reply = self._reply_to(call)
            self.replies.append(reply)
            lines.append(f"#{len(self.replies)} : {reply}")
            if reply == UNAVAILABLE:
                failed_calls.append(call)
        self.observations.append("\n".join(lines))
        return failed_calls

    def _reply_to(self, call: WorkerCall) -> str:
        """A worker's reply to a request and the replies that it refers to."""
        model: ScriptedWorker = self.environment.pool[call.worker].model
        if self.luck.random() < model.down:
            return UNAVAILABLE
        # The scripted workers read nothing but the lines that begin with a reference.
        words = call.request.split()
        quoted = [
            f"#{number} : {reply}"
            for number, reply in enumerate(self.replies, 1)
            if f"#{number}" in words
        ]
        return model.answer("\n".join([*quoted, call.request]), self.luck.getrandbits(32))

    def finish(self, thought: str, answer: str) -> None:
        """Append the answering turn."""
        self.turns.append(f"<think> {thought} </think> <answer> {answer} </answer>")

    def describe(self, worker: str) -> str:
        """A worker's description and name, in the order of the prompt, so that two layers can copy
        them.
        """
        return f"{self.environment.pool[worker].description} {self.names[worker]}"

    def describe_workers(self, calls: Sequence[WorkerCall]) -> str:
        """The descriptions of the workers that get these calls, each once."""
        workers = dict.fromkeys(call.worker for call in calls)
        return " ".join(map(self.describe, workers))

    def value(self, index: int) -> str:
        """The value in a reply."""
        return read_value(self.replies[index]) or "nothing"

    def step_values(self) -> list[str]:
        """The text that stands for each earlier step in a request: its value, or a reference to it."""
        texts = []
        for index, reply in enumerate(self.replies):
            # A call that failed was made again.
            if reply == UNAVAILABLE:
                continue
            texts.append(self.value(index) if self.variant.retypes else f"#{index + 1}")
        return texts

    def choose_expert(self, operation: str, generator: random.Random) -> str:
        """A worker that knows an operation."""
        expert = WORKER_OF[operation]
        if self.variant.has_twin and expert == "facts":
            twin_share = self.variant.twin_shares[self.budget]
            if generator.random() < twin_share:
                return TWIN
        return expert

    @property
    def is_out_of_turns(self) -> bool:
        """Whether the next turn has to answer."""
        return len(self.turns) >= self.variant.max_turns - 1


def write_plan(
    writer: TraceWriter,
    steps: Sequence[PlanStep],
    generator: random.Random,
    wrong_workers: bool = False,
    max_levels: int = 9,
) -> None:
    """The calls of a plan, those that do not need each other in one turn; then the last value as
    the answer.
    """
    depths = sorted({step.depth for step in steps})[:max_levels]
    for depth in depths:
        level = [step for step in steps if step.depth == depth]
        calls = []
        for step in level:
            worker = writer.choose_expert(step.operation, generator)
            if wrong_workers and generator.random() < 0.6:
                worker = generator.choice(list(DESCRIPTION))
            calls.append(WorkerCall(worker, step.request(writer.step_values())))

        goal = "all"
        if len(calls) == 1:
            operation = level[0].operation
            goal = f"the {NOUN.get(operation, operation)}"
        failed_calls = writer.ask(f"find {goal} with {writer.describe_workers(calls)}", calls)

        # Ask again what failed.
        while failed_calls and writer.variant.retries and not writer.is_out_of_turns:
            thought = f"ask again with {writer.describe_workers(failed_calls)}"
            failed_calls = writer.ask(thought, failed_calls)
        if writer.is_out_of_turns:
            break
    writer.finish("done", writer.value(-1))


def write_trace(
    trace_type: str, row: Row, writer: TraceWriter, facts: Facts, generator: random.Random
) -> None:
    """One trace of a type of `MIX`."""
    expression = read_question(row["question"])
    assert expression is not None
    steps = plan_of(expression)
    drops_thought = trace_type == "bare"
    if drops_thought:
        trace_type = generator.choice(["decompose", "pass_on"])

    if trace_type in ("decompose", "wrong"):
        write_plan(writer, steps, generator, wrong_workers=trace_type == "wrong")
    elif trace_type == "partial" and len(steps) > 1:
        write_plan(writer, steps, generator, max_levels=1)
    elif trace_type == "impatient":
        guesses = facts.values.get(expression[0], ["nothing"])
        writer.finish("i know this", generator.choice(guesses))
    else:
        worker = writer.choose_expert(expression[0], generator)
        thought = f"ask the whole question with {writer.describe(worker)}"
        writer.ask(thought, [WorkerCall(worker, question_text(expression))])
        writer.finish("done", writer.value(0))

    if drops_thought:
        writer.turns[-1] = writer.turns[-1].partition("</think> ")[2]


def draw_traces(
    rows: Sequence[Row],
    n: int,
    environment: SandboxWorkers,
    facts: Facts,
    variant: Variant,
    generator: random.Random,
) -> list[dict[str, Any]]:
    """Traces of mixed quality, each of an episode with a pool of its own."""
    traces = []
    for _ in range(n):
        (trace_type,) = generator.choices(list(MIX), list(MIX.values()))
        row = dict(generator.choice(rows))
        prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
        seed = generator.getrandbits(48)
        row = environment.reset({**row, "reset_seed": seed, "prompt": prompt})
        writer = TraceWriter(environment, row, variant)
        write_trace(trace_type, row, writer, facts, generator)
        traces.append({**row, "turns": writer.turns, "observations": writer.observations})
    return traces
