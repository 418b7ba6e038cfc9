"""ProRefine (arXiv 2506.05305), row by row; see `papers.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentic_prompting.data import TASKS
from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.llm import ChatModel, Message, Reply, Usage
from agentic_prompting.refine import ProRefiner, RefinementResult, RolePrompts, summarize
from agentic_prompting.rewards import integer_match
from benchmarks.fidelity.check import Part, Row
from benchmarks.paper_tables.estimates import stars, wald_interval

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# Bare words, so that a scripted model can recognise the parts of its request.
PLAIN = RolePrompts(
    task="{query}",
    feedback="q={query};o={output}",
    optimizer="p={prompt};f={feedback}",
    verifier="v={query};a={output}",
)


@dataclass(frozen=True)
class Call:
    """A call of a scripted LLM."""

    role: str
    request: str  # the last message
    messages: int  # how many there are
    sampling: dict[str, Any]


class World:
    """Three scripted LLMs whose replies depend on the request alone; all calls are logged.

    The task model writes `length` words that depend on its prompt, `feedback` and `optimizer` are
    fixed maps.
    """

    def __init__(self, seed: int, length: int, changes: float = 0.6):
        self.seed = seed
        self.length = length
        self.changes = changes
        self.calls: list[Call] = []

    def output(self, prompt: str, limit: int) -> tuple[str, bool]:
        rng = random.Random(f"{self.seed} {prompt}")
        words = [f"w{rng.randrange(50)}" for _ in range(self.length)]
        return " ".join(words[:limit]), len(words) <= limit

    def feedback(self, query: str, output: str) -> str:
        return f"f{random.Random(f'{self.seed} {query} {output}').randrange(1000)}"

    def optimizer(self, prompt: str, feedback: str) -> str:
        rng = random.Random(f"{self.seed} {prompt} {feedback}")
        if rng.random() < self.changes:
            return f"prompt {rng.randrange(10_000)}"
        return prompt

    def chat(self, role: str) -> ChatModel:
        """The LLM of a role, `task`, `feedback` or `optimizer`."""

        async def reply_to(messages: Sequence[Message], **sampling: Any) -> Reply:
            request = messages[-1]["content"]
            self.calls.append(Call(role, request, messages=len(messages), sampling=sampling))
            if role == "task":
                text, complete = self.output(messages[0]["content"], sampling["max_tokens"])
                finish_reason = "stop" if complete else "length"
                return Reply(text, finish_reason=finish_reason, usage=Usage(1, len(text.split())))
            if role == "feedback":
                query, output = request.removeprefix("q=").split(";o=")
                return Reply(self.feedback(query, output), finish_reason="stop")
            if role == "optimizer":
                prompt, feedback = request.removeprefix("p=").split(";f=")
                improved = self.optimizer(prompt, feedback)
                text = f"<IMPROVED_PROMPT>{improved}</IMPROVED_PROMPT>"
                return Reply(text, finish_reason="stop")
            return Reply("wrong", finish_reason="stop")

        return reply_to


def algorithm_1(
    world: World, query: str, prompt: str, k: int, n: int
) -> tuple[list[str], list[str]]:
    """Algorithm 1 as it is printed: the outputs, and the prompts, of which the last one is p*."""
    outputs = []
    prompts = [prompt]
    for i in range(1, n + 1):
        output, is_complete = world.output(prompt, i * k)
        outputs.append(output)
        prompt = world.optimizer(prompt, world.feedback(query, output))
        prompts.append(prompt)
        if is_complete:
            break
    return outputs, prompts


def refine(world: World, **options: Any) -> RefinementResult:
    refiner = ProRefiner(
        task=world.chat("task"),
        feedback=world.chat("feedback"),
        optimizer=world.chat("optimizer"),
        prompts=PLAIN,
        **options,
    )
    return refiner.refine("p0", "q0")


def random_worlds() -> Iterator[Row]:
    differences = dict.fromkeys(
        ("outputs o_i", "prompts p*", "p* returned", "answer under p*", "steps"), 0
    )
    rng = random.Random(0)
    for seed in range(150):
        k = rng.randint(1, 10)
        n = rng.randint(1, 12)
        length = rng.randint(1, 90)
        world = World(seed, length)
        outputs, prompts = algorithm_1(world, "q0", "p0", k, n)
        result = refine(world, tokens_per_step=k, max_steps=n)
        our_outputs = [step.output for step in result.steps]
        our_prompts = [step.prompt for step in result.steps]
        our_prompts.append(result.prompt)
        differences["outputs o_i"] += our_outputs != outputs
        differences["prompts p*"] += our_prompts != prompts
        differences["p* returned"] += result.prompt != prompts[-1]
        differences["answer under p*"] += result.answer != world.output(prompts[-1], 512)[0]
        differences["steps"] += len(result.steps) != len(outputs)
    for name, count in differences.items():
        yield Row("Algorithm 1", f"150 random worlds: {name} that differ", 0, count)


def algorithm() -> Iterator[Row]:
    # An output that never ends.
    world = World(1, 10_000, changes=1.0)
    result = refine(world)
    limits = [call.sampling["max_tokens"] for call in world.calls if call.role == "task"]
    yield Row(
        "Algorithm 1",
        "in step i at most i k tokens; k = 10, n = 25",
        [10 * i for i in range(1, 26)],
        limits[:25],
    )
    yield Row(
        "Algorithm 1",
        "k n (n + 1) / 2 = 3,250 tokens before the answer",
        10 * 25 * 26 / 2,
        sum(step.tokens for step in result.steps),
    )
    yield Row(
        "Algorithm 1",
        "n steps, then the answer",
        (25, "max_steps", 26),
        (len(result.steps), result.stop_reason, len(limits)),
    )

    short = refine(World(2, 24))
    yield Row(
        "Algorithm 1",
        "24 words end in step 3",
        (3, "finished"),
        (len(short.steps), short.stop_reason),
    )

    # What each role reads.
    output = world.output("p0", 10)[0]
    feedback_request = next(call.request for call in world.calls if call.role == "feedback")
    yield Row(
        "Algorithm 1", "feedback reads the query and o_i", f"q=q0;o={output}", feedback_request
    )
    optimizer_request = next(call.request for call in world.calls if call.role == "optimizer")
    yield Row(
        "Algorithm 1",
        "the optimizer reads p* and f_i",
        f"p=p0;f={world.feedback('q0', output)}",
        optimizer_request,
    )
    lengths = {call.messages for call in world.calls}
    yield Row("Results", "stateless: a call sees its own step alone", {2}, lengths)


def variants() -> Iterator[Row]:
    world = World(1, 10_000, changes=1.0)
    refine(world, history="all", max_steps=4)
    growth = [call.messages for call in world.calls if call.role == "feedback"]
    yield Row("Results", "the ablation with the full chat history", [2, 4, 6, 8], growth)
    temperatures = {call.sampling["temperature"] for call in world.calls}
    yield Row("Implementation", "do_sample = False: every role decodes greedily", {0}, temperatures)

    writer = World(5, 0)
    writer.output = lambda prompt, limit: ("One. Two! Three?", True)  # type: ignore[method-assign]
    steps = refine(writer, unit="sentence").steps
    yield Row(
        "Implementation",
        "a step may be a sentence",
        ["One.", "One. Two!", "One. Two! Three?"],
        [(step.output or "").strip() for step in steps],
    )

    refiner = ProRefiner(*[world.chat("task")] * 3)
    for name, value in (("tokens_per_step", 10), ("max_steps", 25)):
        yield Row("Setup", f"{name} = {value}", value, getattr(refiner, name))


def verifiers() -> Iterator[Row]:
    world = World(3, 5)

    def run(setting: str, verdict: str = "wrong", **options: Any) -> RefinementResult:
        critic = _Critic(world, verdict)
        refiner = ProRefiner.from_paper(
            setting, world.chat("task"), critic, prompts=PLAIN, **options
        )
        return refiner.refine("p0", {"question": "q0", "answers": ["12"]})

    none = run("no_verifier")
    yield Row(
        "Verifier",
        "none: every query is refined",
        ("finished", None),
        (none.stop_reason, none.verdict),
    )
    right = run("verifier", verdict="right")
    first = world.output("p0", 512)[0]
    yield Row(
        "Verifier",
        "right: the first answer is used as it is",
        ("verified", first, 0),
        (right.stop_reason, right.answer, len(right.steps)),
    )
    wrong = run("verifier", verdict="wrong")
    yield Row(
        "Verifier", "wrong: the prompt is refined", ("wrong", 1), (wrong.verdict, len(wrong.steps))
    )

    # The optimal verifier: the label, by way of the score.
    best = run("optimal_verifier", score=lambda answer, golds: 1.0)
    yield Row("Verifier", "optimal: the label says right", "verified", best.stop_reason)
    worst = run("optimal_verifier", score=lambda answer, golds: 0.0)
    yield Row(
        "Verifier", "optimal: the label says wrong", ("wrong", 1), (worst.verdict, len(worst.steps))
    )


def iterations() -> Iterator[Row]:
    results = [refine(World(seed, 10 * seed)) for seed in (1, 2, 3)]
    mean = summarize(results)["steps"]
    yield Row("Figure 4", "mean number of iterations", sum((1, 2, 3)) / 3, mean)
    steps = [len(result.steps) for result in results]
    yield Row("Figure 4", "... a step for each k tokens begun", [1, 2, 3], steps)


class _Critic:
    """Feedback and optimizer of a world in one model, and a verifier that always gives the same
    verdict.
    """

    def __init__(self, world: World, verdict: str):
        self.world = world
        self.verdict = verdict

    async def __call__(self, messages: Sequence[Message], **sampling: Any) -> Reply:
        request = messages[-1]["content"]
        if request.startswith("v="):
            accuracy = int(self.verdict == "right")
            return Reply(f"<ACCURACY>{accuracy}</ACCURACY>", finish_reason="stop")
        role = "feedback" if request.startswith("q=") else "optimizer"
        return await self.world.chat(role)(messages, **sampling)


def data() -> Iterator[Row]:
    splits = {
        "bbh_object_counting": (50, 100, 100),
        "bbh_word_sorting": (50, 100, 100),
        "gsm8k_dspy": (200, 300, 1319),
        "aqua": (97_467, 254, 254),
    }
    for name, sizes in splits.items():
        rows = TASKS[name].expected_rows
        yield Row(
            "Data",
            f"{name}: {'/'.join(map(str, sizes))}",
            sizes,
            (rows["train"], rows["validation"], rows["test"]),
        )
    yield Row("Data", "svamp: 1,000 test rows", 1000, TASKS["svamp"].expected_rows["test"])
    for answer, score in (("so 5 + 8 = 13.\nAnswer: 13", 1.0), ("Answer: 12", 0.0)):
        yield Row(
            "Figure 2",
            f"object counting: {answer[-10:]!r} against 13",
            score,
            integer_match(answer, ["13"]),
        )


def table_1() -> Iterator[Row]:
    table = yaml.safe_load((CONFIGS / "eval_prorefine_table1.yaml").read_text(encoding="utf-8"))
    five = {
        "bbh_object_counting/test",
        "bbh_word_sorting/test",
        "gsm8k_dspy/test",
        "svamp/test",
        "aqua/test",
    }
    yield Row("Table 1", "the five sets are asked", set(), five - set(table["tasks"]))
    settings = {system.get("setting") for system in table["systems"].values() if system}
    yield Row(
        "Table 1",
        "all three verifier settings",
        set(),
        {"no_verifier", "verifier", "optimal_verifier"} - settings,
    )
    yield Row(
        "Table 1", "beside CoT and TextGrad", set(), {"cot", "textgrad"} - set(table["systems"])
    )
    yield Row(
        "Setup",
        "Llama-3.1-70B criticises, edits and judges",
        True,
        "3.1-70B" in table["models"]["critic"]["name"],
    )


def printed_intervals() -> Iterator[Row]:
    """Table 1's intervals are p +- 1.96 sqrt(p (1 - p) / n)."""
    printed = {  # set, method, task model: share, n, the printed interval
        "object counting, CoT, 1B": (0.48, 100, (0.382, 0.578)),
        "object counting, CoT, 3B": (0.65, 100, (0.556, 0.744)),
        "object counting, no verifier, 3B": (0.75, 100, (0.665, 0.835)),
        "word sorting, CoT, 1B": (0.11, 100, (0.048, 0.172)),
        "word sorting, optimal verifier, 8B": (0.86, 100, (0.792, 0.928)),
        "GSM8K, no verifier, 1B": (0.636, 1319, (0.610, 0.662)),
        "GSM8K, optimal verifier, 3B": (0.904, 1319, (0.888, 0.920)),
        "SVAMP, CoT, 1B": (0.689, 1000, (0.660, 0.718)),
        "SVAMP, verifier, 8B": (0.893, 1000, (0.874, 0.912)),
    }
    for name, (share, n, interval) in printed.items():
        estimate = wald_interval(round(share * n), n)
        yield Row(
            "Table 1",
            f"{name}: the printed interval",
            interval,
            (estimate.low, estimate.high),
            0.0011,
        )


def printed_stars() -> Iterator[Row]:
    # Right answers of 1,000: of the verifier, and of CoT and TextGrad.
    for rule, expected, verifier, baselines in (
        ("SVAMP, verifier, 1B: better than both, two stars", "**", 808, (689, 684)),
        ("SVAMP, verifier, 8B: better than one, a star", "*", 893, (854, 840)),
    ):
        baseline_intervals = [wald_interval(correct, 1000) for correct in baselines]
        yield Row(
            "Table 1", rule, expected, stars(wald_interval(verifier, 1000), baseline_intervals)
        )


def wilson_intervals() -> Iterator[Row]:
    """Wilson's bounds are the roots of (p - x)^2 = z^2 x (1 - x) / n."""
    z = 1.959963984540054
    for successes, n in ((48, 100), (11, 100), (0, 100), (1, 1)):
        p = successes / n
        a = 1 + z * z / n
        b = -(2 * p + z * z / n)
        c = p * p
        root = (b * b - 4 * a * c) ** 0.5
        low = (-b - root) / (2 * a)
        high = (-b + root) / (2 * a)
        estimate = wilson_interval(successes, n)
        yield Row(
            "Table 1",
            f"{successes} of {n}: Wilson's 95 % interval",
            (low, high),
            (estimate.low, estimate.high),
            1e-6,
        )


PARTS: list[Part] = [
    random_worlds,
    algorithm,
    variants,
    verifiers,
    iterations,
    data,
    table_1,
    printed_intervals,
    printed_stars,
    wilson_intervals,
]
UNTESTED = {
    "Table 1, Figure 3 (accuracies)": "need Llama 3.1 and 3.2",
    "SVAMP's 2,516 / 622 training rows": (
        "the public file has 1,000 rows, all of them the test set; nothing is trained"
    ),
    "Results (70B task model, 8B feedback)": "need those models",
    "Figures 1, 2, 5 (prompts and feedback)": "what the models wrote",
}
