"""ProRefine against other uses of as many calls, in the sandbox, by the protocol in
docs/evidence.md.

    python -m benchmarks.learning.prorefine_budget  # seeds 701 to 705, 200 puzzles of each kind, two minutes
    python -m benchmarks.learning.prorefine_budget --seeds 1 --n 40

The other methods are best of n with ProRefine's verifier, self-consistency, self-refine with
ProRefine's critic, and Algorithm 1 with a critic that does not look at the answer. Each has the
smallest size at which it spends at least as many calls, or tokens, of all roles together as
ProRefine. All models are scripted, so that the order of the methods depends on the models' errors,
above all on whether a further sample repeats a slip; hence there are three task models. The figures
say nothing about real models.

Appends a record for each row to `--records`, from which `recompute.py` makes the table of
docs/prorefine.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab import RECORDS, Records, interval, markdown, share, shown

SEEDS = (701, 702, 703, 704, 705)
PUZZLES = 200
LARGEST = 40
TASKS = ("bbh_word_sorting", "bbh_object_counting")
ANEW = {1.0: "in every sample", 0.5: "in the samples of half of the puzzles", 0.0: "in none"}
"""What the table says of a share of puzzles whose further samples slip anew."""
BUDGETS = ("calls", "tokens")
OURS = "ProRefine, verifier"
FIRST = "the first answer"
OTHERS = (
    "best of n, the same verifier",
    "self-consistency",
    "self-refine",
    "Algorithm 1 without a critic",
)


class Answer(NamedTuple):
    """A method's answer to a puzzle, and the calls and tokens of all roles together; tokens are
    words here.
    """

    text: str
    calls: int
    tokens: int


# --- one puzzle: every size of a method at once ---------------------------------------------------


class Models:
    """The scripted models of a seed, asked one call at a time with ProRefine's own requests.

    Args:
        seed (`int`): The seed of all models.
        task (`str`): One of `TASKS`.
        new_slips (`float`): The share of puzzles whose further samples slip anew; the others repeat
            the first sample.
    """

    def __init__(self, seed: int, task: str, new_slips: float):
        from agentic_prompting.refine import START_PROMPTS, RolePrompts
        from agentic_prompting.sandbox.puzzles import PuzzleOptimizer, puzzle_models

        self.seed = seed
        self.new_slips = new_slips
        self.start = START_PROMPTS[task]
        self.role_prompts = RolePrompts()
        self.models: dict[str, Any] = puzzle_models(seed)
        # Turns every remark into the advice that it means.
        self.reader = PuzzleOptimizer(seed, vague=0.0, untagged=0.0)

    def solve(self, prompt: str, question: str, sample: int = 0) -> Answer:
        """The task model's answer; another `sample` of the same question may slip elsewhere."""
        from agentic_prompting.sandbox.puzzles import PuzzleSolver

        repeats_slips = random.Random(f"{self.seed} {question}").random() >= self.new_slips
        seed = self.seed
        if sample and not repeats_slips:
            seed = 1000 * self.seed + sample
        text = PuzzleSolver(seed).answer(prompt, question)
        # As the model counts its own usage.
        tokens = _words(prompt, question) + len(text.split(" "))
        return Answer(text, 1, tokens)

    def ask(self, role: str, **values: str) -> Answer:
        """The reply of one of ProRefine's roles to its request with these values."""
        from agentic_prompting.llm import fill

        system = self.role_prompts.role(role)
        request = fill(getattr(self.role_prompts, role), **values)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        text = self.models[role].reply(messages)
        return Answer(text, 1, _words(system, request, text))

    def add_advice(self, prompt: str, remarks: str) -> str:
        """The prompt with advice added for the remarks."""
        from agentic_prompting.llm import fill

        request = fill(self.role_prompts.optimizer, prompt=prompt, feedback=remarks)
        text = self.reader.reply([{"role": "user", "content": request}])
        return text.removeprefix("<IMPROVED_PROMPT>").removesuffix("</IMPROVED_PROMPT>")


def _words(*texts: str) -> int:
    return sum(len(text.split()) for text in texts)


def _sum_costs(parts: Sequence[Answer], text: str) -> Answer:
    """An answer that costs what its parts cost together."""
    calls = sum(part.calls for part in parts)
    tokens = sum(part.tokens for part in parts)
    return Answer(text, calls, tokens)


def best_of(models: Models, question: str, largest: int = LARGEST) -> list[Answer]:
    """The answers for n = 1 to `largest`: sample until the verifier accepts; the last sample counts
    if none passes.
    """
    calls: list[Answer] = []
    answers: list[Answer] = []
    for sample in range(largest):
        answer = models.solve(models.start, question, sample)
        verdict = models.ask("verifier", query=question, output=answer.text)
        calls += [answer, verdict]
        answers.append(_sum_costs(calls, answer.text))
        if "<ACCURACY>1" in verdict.text:
            break
    return answers + answers[-1:] * (largest - len(answers))


def self_consistency(models: Models, question: str, largest: int = LARGEST) -> list[Answer]:
    """The answers for n = 1 to `largest`: the most frequent result, the first among equally
    frequent ones.
    """
    samples = [models.solve(models.start, question, sample) for sample in range(largest)]
    votes = Counter[str]()
    answers = []
    for n, sample in enumerate(samples, 1):
        votes[sample.text.rpartition("Answer: ")[2]] += 1
        most_frequent = votes.most_common(1)[0][0]
        answers.append(_sum_costs(samples[:n], f"Answer: {most_frequent}"))
    return answers


def self_refine(models: Models, question: str, largest: int = LARGEST) -> list[Answer]:
    """The answers after 1 to `largest` rounds of critique and rewriting, which end when the critic
    has no remark.
    """
    prompt = models.start
    answer = models.solve(prompt, question)
    calls = [answer]
    answers: list[Answer] = []
    for sample in range(1, largest + 1):
        remarks = models.ask(
            "feedback", query=question, output=answer.text, state=models.role_prompts.complete
        )
        calls.append(remarks)
        if remarks.text == "CORRECT":
            answers.append(_sum_costs(calls, answer.text))
            break
        prompt = models.add_advice(prompt, remarks.text)
        answer = models.solve(prompt, question, sample)
        calls.append(answer)
        answers.append(_sum_costs(calls, answer.text))
    return answers + answers[-1:] * (largest - len(answers))


def refined(
    seed: int, task: str, rows: Sequence[Mapping[str, Any]], blind: bool, **settings: Any
) -> list[Answer]:
    """The answers of Algorithm 1 with its verifier; a `blind` critic makes random remarks, at no
    cost.
    """
    from agentic_prompting.llm import ScriptedChat
    from agentic_prompting.refine import START_PROMPTS, ProRefiner
    from agentic_prompting.sandbox.puzzles import FAULTS, TOO_LONG, puzzle_models

    remarks = [TOO_LONG, "CORRECT"]
    remarks += [fault.remark for fault in FAULTS.values() if fault.task == task]

    def remark_blindly(messages: Sequence[Mapping[str, str]]) -> str:
        return random.Random(f"{seed} {messages[-1]['content']}").choice(remarks)

    models = dict(puzzle_models(seed))
    if blind:
        models["feedback"] = ScriptedChat(remark_blindly)
    refiner = ProRefiner(**models, **settings)
    answers = []
    for result in refiner.refine_all(START_PROMPTS[task], rows, progress=False):
        calls = 0
        tokens = 0
        for role, usage in result.usage.items():
            # Random remarks cost nothing.
            if blind and role == "feedback":
                continue
            calls += usage.calls
            tokens += usage.prompt_tokens + usage.completion_tokens
        answers.append(Answer(result.answer, calls, tokens))
    return answers


# --- one seed and task ----------------------------------------------------------------------------


def mean(answers: Sequence[Answer], budget: str) -> float:
    return statistics.fmean(getattr(answer, budget) for answer in answers)


def smallest(sizes: Sequence[Sequence[Answer]], budget: str, least: float) -> int:
    """The index of the first size whose mean is at least `least`; of the last one if there is none."""
    for index, answers in enumerate(sizes):
        if mean(answers, budget) >= least:
            return index
    return len(sizes) - 1


def measure(seed: int, task: str, n: int) -> list[dict[str, Any]]:
    """The records of a seed and task, one for each row of the table."""
    from agentic_prompting.sandbox.puzzles import make_puzzles, score_puzzle

    rows = make_puzzles(n, seed, (task,))
    questions = [row["question"] for row in rows]

    def make_record(method: str, answers: Sequence[Answer], **case: Any) -> dict[str, Any]:
        correct = ""
        for answer, row in zip(answers, rows, strict=True):
            correct += str(int(score_puzzle(answer.text, row["answers"])))
        means = {budget: round(mean(answers, budget), 3) for budget in BUDGETS}
        about = {"seed": seed, "kind": task, "method": method}
        return {**about, "correct": correct, **means, **case}

    ours = refined(seed, task, rows, blind=False)
    first_models = Models(seed, task, 0.0)
    first = [first_models.solve(first_models.start, question) for question in questions]
    records = [make_record(OURS, ours), make_record(FIRST, first)]

    # Algorithm 1 without a critic does not depend on further samples.
    without_critic: dict[int, Sequence[Answer]] = {}
    for steps in (1, 2, 3, 5, 8, 12, 25):
        without_critic[steps] = refined(seed, task, rows, blind=True, max_steps=steps)

    for new_slips in ANEW:
        # By method and size the answers to all questions.
        models = Models(seed, task, new_slips)
        answers_of: dict[str, dict[int, Sequence[Answer]]] = {}
        for name, method in zip(OTHERS[:-1], (best_of, self_consistency, self_refine), strict=True):
            by_question = [method(models, question) for question in questions]
            answers_of[name] = dict(enumerate(zip(*by_question, strict=True), start=1))
        answers_of[OTHERS[-1]] = without_critic

        # The smallest size of each method that spends as much as ProRefine.
        for budget, (name, by_size) in product(BUDGETS, answers_of.items()):
            index = smallest(list(by_size.values()), budget, mean(ours, budget))
            size = list(by_size)[index]
            case = {"size": size, "anew": new_slips, "budget": budget}
            records.append(make_record(name, by_size[size], **case))
    return records


# --- what the records say -------------------------------------------------------------------------


def by_seed(records: Sequence[Mapping[str, Any]], **case: Any) -> dict[int, float]:
    """Accuracy per seed of the records that belong to a case, the mean over the tasks."""
    scores: dict[int, list[float]] = {}
    for record in records:
        if record.items() >= case.items():
            scores.setdefault(record["seed"], []).append(share(record["correct"]))
    return {seed: statistics.fmean(values) for seed, values in scores.items()}


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, budget and task model: `values` by seed, `minus` ProRefine's, mean
    calls and tokens.
    """
    ours = by_seed(records, method=OURS)
    cases: list[dict[str, Any]] = [{"method": OURS}, {"method": FIRST}]
    for budget, new_slips, method in product(BUDGETS, ANEW, OTHERS):
        cases.append({"method": method, "budget": budget, "anew": new_slips})
    rows = []
    for case in cases:
        entries = [record for record in records if record.items() >= case.items()]
        if not entries:
            continue
        values = by_seed(entries)
        minus = [values[seed] - ours[seed] for seed in values]
        means = {}
        for budget in BUDGETS:
            means[budget] = statistics.fmean(entry[budget] for entry in entries)
        rows.append({**case, "values": list(values.values()), "minus": minus, "mean": means})
    return rows


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """All rows as a Markdown table."""
    rows = []
    for row in rows_of(records):
        # ProRefine and the first answer belong to no budget and no task model.
        condition = [row["budget"], ANEW[row["anew"]]] if "budget" in row else ["", ""]
        minus = "" if row["method"] == OURS else shown(row["minus"], "+")
        calls = f"{row['mean']['calls']:.1f}"
        tokens = f"{row['mean']['tokens']:.0f}"
        rows.append([*condition, row["method"], shown(row["values"]), minus, calls, tokens])
    titles = (
        "equal",
        "it slips anew",
        "method",
        "accuracy [95 %]",
        "minus ProRefine [95 %]",
        "calls",
        "tokens",
    )
    return markdown(titles, rows)


def against(records: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the comparisons in which ProRefine is above, below, or not clearly different."""
    rows = [row for row in rows_of(records) if "budget" in row]
    # Comparisons in which ProRefine is not clearly above the other method, by method.
    not_above: Counter[str] = Counter()
    below = 0
    for row in rows:
        difference = interval(row["minus"])
        if difference["high"] is None or difference["high"] >= 0:
            not_above[row["method"]] += 1
        if difference["low"] is not None and difference["low"] > 0:
            below += 1
    of_each = len(BUDGETS) * len(ANEW)
    listed = ", ".join(f"{name} in {count} of {of_each}" for name, count in not_above.items())
    unclear = not_above.total() - below
    return (
        f"of {len(rows)} comparisons ProRefine is above the other in "
        f"{len(rows) - not_above.total()}, below it in {below}, and in {unclear} no difference was "
        f"seen (not above: {listed or 'none'})"
    )


def lift(records: Sequence[Mapping[str, Any]]) -> str:
    """The gain of refining over the first answer, paired by seed."""
    ours = by_seed(records, method=OURS)
    first = by_seed(records, method=FIRST)
    return shown([ours[seed] - first[seed] for seed in ours])


def each_seed(records: Sequence[Mapping[str, Any]]) -> str:
    """ProRefine's accuracy seed by seed."""
    ours = by_seed(records, method=OURS)
    return ", ".join(f"{score:.3f} ({seed})" for seed, score in ours.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="ProRefine against other uses of its calls, in the sandbox."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument(
        "--n", type=int, default=PUZZLES, help=f"puzzles of each kind; default: {PUZZLES}"
    )
    parser.add_argument(
        "--records", type=Path, help="default: records/..., for other seeds or numbers runs/..."
    )
    options = parser.parse_args()
    is_protocol = tuple(options.seeds) == SEEDS and options.n == PUZZLES
    folder = RECORDS if is_protocol else Path("runs")
    records = Records(options.records or folder / "prorefine_budget.jsonl.gz")
    for seed, task in records.missing(("seed", "kind"), product(options.seeds, TASKS)):
        records.add(*measure(seed, task, options.n))
    entries = records.read()
    print(
        "ProRefine in the sandbox (scripted models; says nothing about real ones)\n\n"
        f"{table(entries)}\n\n{against(entries)}"
    )


if __name__ == "__main__":
    main()
