"""ProRefine (arXiv 2506.05305), row by row; see `fidelity.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentic_prompting.data import TASKS
from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.llm import Reply, Usage
from agentic_prompting.refine import ProRefiner, RefinementResult, RolePrompts, summarize
from agentic_prompting.rewards import integer_match
from benchmarks.fidelity.check import Part, Row

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# Bare words, so that a scripted model can recognise the parts of its request.
PLAIN = RolePrompts(
    task="{query}",
    feedback="q={query};o={output}",
    optimizer="p={prompt};f={feedback}",
    verifier="v={query};a={output}",
)


class World:
    """Three scripted LLMs whose replies depend on the request alone; all calls are logged.

    The task model writes `length` words that depend on its prompt, `feedback` and `optimizer` are fixed maps.
    """

    def __init__(self, seed: int, length: int, changes: float = 0.6):
        self.seed = seed
        self.length = length
        self.changes = changes
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def output(self, prompt: str, limit: int) -> tuple[str, bool]:
        rng = random.Random(f"{self.seed} {prompt}")
        words = [f"w{rng.randrange(50)}" for _ in range(self.length)]
        return " ".join(words[:limit]), len(words) <= limit

    def feedback(self, query: str, output: str) -> str:
        return f"f{random.Random(f'{self.seed} {query} {output}').randrange(1000)}"

    def optimizer(self, prompt: str, feedback: str) -> str:
        rng = random.Random(f"{self.seed} {prompt} {feedback}")
        return f"prompt {rng.randrange(10_000)}" if rng.random() < self.changes else prompt

    def chat(self, role: str) -> Any:
        async def answer(messages: Sequence[Any], **sampling: Any) -> Reply:
            said = messages[-1]["content"]
            self.calls.append((role, said, {**sampling, "shown": len(messages)}))
            if role == "task":
                text, complete = self.output(messages[0]["content"], sampling["max_tokens"])
                return Reply(
                    text,
                    finish_reason="stop" if complete else "length",
                    usage=Usage(1, len(text.split())),
                )
            if role == "feedback":
                query, output = said.removeprefix("q=").split(";o=")
                return Reply(self.feedback(query, output), finish_reason="stop")
            if role == "optimizer":
                prompt, feedback = said.removeprefix("p=").split(";f=")
                return Reply(
                    f"<IMPROVED_PROMPT>{self.optimizer(prompt, feedback)}</IMPROVED_PROMPT>",
                    finish_reason="stop",
                )
            return Reply("wrong", finish_reason="stop")

        return answer


def algorithm_1(
    world: World, query: str, prompt: str, k: int, n: int
) -> tuple[list[str], list[str], str]:
    """Algorithm 1 as it is printed: the outputs, the prompts, p*."""
    outputs = []
    prompts = [prompt]
    for i in range(1, n + 1):
        output, ended = world.output(prompt, i * k)
        outputs.append(output)
        prompt = world.optimizer(prompt, world.feedback(query, output))
        prompts.append(prompt)
        if ended:
            break
    return outputs, prompts, prompt


def refined(world: World, **options: Any) -> RefinementResult:
    return ProRefiner(
        **{role: world.chat(role) for role in ("task", "feedback", "optimizer")},
        prompts=PLAIN,
        **options,
    ).refine("p0", "q0")


def algorithm() -> Iterator[Row]:
    parted: dict[str, int] = dict.fromkeys(
        ("outputs o_i", "prompts p*", "p* returned", "answer under p*", "steps"), 0
    )
    rng = random.Random(0)
    for seed in range(150):
        k = rng.randint(1, 10)
        n = rng.randint(1, 12)
        length = rng.randint(1, 90)
        world = World(seed, length)
        outputs, prompts, last = algorithm_1(world, "q0", "p0", k, n)
        result = refined(world, tokens_per_step=k, max_steps=n)
        parted["outputs o_i"] += [step.output for step in result.steps] != outputs
        parted["prompts p*"] += [*(step.prompt for step in result.steps), result.prompt] != prompts
        parted["p* returned"] += result.prompt != last
        parted["answer under p*"] += result.answer != world.output(last, 512)[0]
        parted["steps"] += len(result.steps) != len(outputs)
    for what, number in parted.items():
        yield Row("Algorithm 1", f"150 random worlds: {what} that differ", 0, number)
    world = World(1, 10_000, changes=1.0)
    result = refined(world)
    limits = [sampling["max_tokens"] for role, _, sampling in world.calls if role == "task"]
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
    short = refined(World(2, 24))
    yield Row(
        "Algorithm 1",
        "24 words end in step 3",
        (3, "finished"),
        (len(short.steps), short.stop_reason),
    )
    told = {
        role: next(said for name, said, _ in world.calls if name == role)
        for role in ("feedback", "optimizer")
    }
    output = world.output("p0", 10)[0]
    yield Row(
        "Algorithm 1", "feedback reads the query and o_i", f"q=q0;o={output}", told["feedback"]
    )
    yield Row(
        "Algorithm 1",
        "the optimizer reads p* and f_i",
        f"p=p0;f={world.feedback('q0', output)}",
        told["optimizer"],
    )
    shown = {sampling["shown"] for role, _, sampling in world.calls}
    yield Row("Results", "stateless: a call sees its own step alone", {2}, shown)
    world = World(1, 10_000, changes=1.0)
    refined(world, history="all", max_steps=4)
    growth = [sampling["shown"] for role, _, sampling in world.calls if role == "feedback"]
    yield Row("Results", "the ablation with the full chat history", [2, 4, 6, 8], growth)
    heat = {sampling["temperature"] for _, _, sampling in world.calls}
    yield Row("Implementation", "do_sample = False: every role decodes greedily", {0}, heat)
    writer = World(5, 0)
    writer.output = lambda prompt, limit: ("One. Two! Three?", True)  # type: ignore[method-assign]
    pieces = [step.output for step in refined(writer, unit="sentence").steps]
    growing = ["One.", "One. Two!", "One. Two! Three?"]
    yield Row(
        "Implementation",
        "a step may be a sentence",
        growing,
        [(piece or "").strip() for piece in pieces],
    )
    for name, value in (("tokens_per_step", 10), ("max_steps", 25)):
        yield Row(
            "Setup",
            f"{name} = {value}",
            value,
            getattr(ProRefiner(*[world.chat("task")] * 3), name),
        )


def verifiers() -> Iterator[Row]:
    def run(setting: str, length: int = 5, **options: Any) -> tuple[World, RefinementResult]:
        world = World(3, length)
        critic = _Critic(world, options.pop("says", "wrong"))
        refiner = ProRefiner.from_paper(
            setting, world.chat("task"), critic, prompts=PLAIN, **options
        )
        return world, refiner.refine("p0", {"question": "q0", "answers": ["12"]})

    world, none = run("no_verifier")
    yield Row(
        "Verifier",
        "none: every query is refined",
        ("finished", None),
        (none.stop_reason, none.verdict),
    )
    world, right = run("verifier", says="right")
    first = world.output("p0", 512)[0]
    yield Row(
        "Verifier",
        "right: the first answer is used as it is",
        ("verified", first, 0),
        (right.stop_reason, right.answer, len(right.steps)),
    )
    world, wrong = run("verifier", says="wrong")
    yield Row(
        "Verifier", "wrong: the prompt is refined", ("wrong", 1), (wrong.verdict, len(wrong.steps))
    )
    world, best = run("optimal_verifier", score=lambda answer, golds: 1.0)
    yield Row("Verifier", "optimal: the label says right", "verified", best.stop_reason)
    world, worst = run("optimal_verifier", score=lambda answer, golds: 0.0)
    yield Row(
        "Verifier", "optimal: the label says wrong", ("wrong", 1), (worst.verdict, len(worst.steps))
    )
    steps = [len(refined(World(seed, 10 * seed)).steps) for seed in (1, 2, 3)]
    mean = summarize([refined(World(seed, 10 * seed)) for seed in (1, 2, 3)])["steps"]
    yield Row("Figure 4", "mean number of iterations", sum((1, 2, 3)) / 3, mean)
    yield Row("Figure 4", "... a step for each k tokens begun", [1, 2, 3], steps)


class _Critic:
    """Feedback and optimizer of a world in one model, and a verifier that always gives the same verdict."""

    def __init__(self, world: World, says: str):
        self.world = world
        self.says = says

    async def __call__(self, messages: Sequence[Any], **sampling: Any) -> Reply:
        said = messages[-1]["content"]
        if said.startswith("v="):
            return Reply(f"<ACCURACY>{int(self.says == 'right')}</ACCURACY>", finish_reason="stop")
        role = "feedback" if said.startswith("q=") else "optimizer"
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
    for said, gold, score in (("so 5 + 8 = 13.\nAnswer: 13", "13", 1.0), ("Answer: 12", "13", 0.0)):
        yield Row(
            "Figure 2",
            f"object counting: {said[-10:]!r} against 13",
            score,
            integer_match(said, [gold]),
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


def intervals() -> Iterator[Row]:
    """Table 1's are p +- 1.96 sqrt(p (1 - p) / n); Wilson's are the roots of (p - x)^2 = z^2 x (1 - x) / n."""
    from benchmarks.paper_tables.estimates import stars, wald_interval

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
    verifier, cot, textgrad = (wald_interval(round(p * 1000), 1000) for p in (0.808, 0.689, 0.684))
    yield Row(
        "Table 1",
        "SVAMP, verifier, 1B: better than both, two stars",
        "**",
        stars(verifier, [cot, textgrad]),
    )
    verifier, cot, textgrad = (wald_interval(round(p * 1000), 1000) for p in (0.893, 0.854, 0.840))
    yield Row(
        "Table 1",
        "SVAMP, verifier, 8B: better than one, a star",
        "*",
        stars(verifier, [cot, textgrad]),
    )
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


PARTS: list[Part] = [algorithm, verifiers, data, table_1, intervals]
UNTESTED = {
    "Table 1, Figure 3 (accuracies)": "need Llama 3.1 and 3.2",
    "SVAMP's 2,516 / 622 training rows": "the public file has 1,000 rows, all of them the test set; nothing is trained",
    "Results (70B task model, 8B feedback)": "need those models",
    "Figures 1, 2, 5 (prompts and feedback)": "what the models wrote",
}
