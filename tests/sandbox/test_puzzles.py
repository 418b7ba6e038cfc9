"""ProRefine's sandbox: puzzles with known answers, and four models that see no more than real ones
do.
"""

import random
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm import ScriptedChat, complete, fill
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner
from agentic_prompting.refine.templates import FEEDBACK, OPTIMIZER, VERIFIER
from agentic_prompting.rewards import REASONING_SCORERS, read_verdict
from agentic_prompting.sandbox.puzzles import (
    BE_CAREFUL,
    COUNTING,
    FAULTS,
    KEEP_SHORT,
    NO_STEPS,
    SORTING,
    PuzzleCritic,
    PuzzleOptimizer,
    PuzzleSolver,
    PuzzleVerifier,
    make_puzzles,
    puzzle_models,
    read_puzzle,
    score_puzzle,
)

ROWS = make_puzzles(200, seed=3)
SORT = "Sort the following words alphabetically: List: hat bar cap bad cot man map zoo pin pig"
COUNT = "I have two plums, a carrot, three figs, and a goat. How many fruits do I have?"


def said(chat, template, **values):
    return complete(chat, fill(template, **values)).text


# Puzzles
# -------------------------------------------------------------------------------------------------------------


def test_answers_are_right_by_the_real_sets_rules():
    for row in ROWS:
        words = row["question"].partition("List: ")[2].split()
        if row["task"] == SORTING:
            assert row["answers"] == [" ".join(sorted(words))] and len(set(words)) == len(words)
        assert REASONING_SCORERS[row["task"]](f"Answer: {row['answers'][0]}", row["answers"]) == 1.0
        assert score_puzzle(f"Answer: {row['answers'][0]}", row["answers"]) == 1.0


def test_questions_are_distinct_seeded_and_can_be_read_back():
    assert len({row["question"] for row in ROWS}) == len({row["id"] for row in ROWS}) == 200
    assert make_puzzles(50, seed=3) == ROWS[:50] and make_puzzles(50, seed=4) != ROWS[:50]
    assert [row["task"] for row in ROWS[:4]] == [SORTING, COUNTING] * 2
    for row in ROWS:
        puzzle = read_puzzle(row["question"])
        assert (puzzle.answer, puzzle.question) == (row["answers"][0], row["question"])


def test_the_global_generator_is_left_alone():
    random.seed(5)
    before = random.getstate()
    complete(puzzle_models()["task"], make_puzzles(3)[0]["question"])
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (COUNT, "5"),
        ("I have a duck. How many animals do I have?", "1"),
        ("I have ten plums, and a fig. How many fruits do I have?", None),
        ("I have two plums, and a spaceship. How many fruits do I have?", None),
        ("I have two plums, and a fig. How many spaceships do I have?", None),
        ("How many?", None),
        ("", None),
    ],
)
def test_what_is_a_puzzle(question, answer):
    puzzle = read_puzzle(question)
    assert (puzzle and puzzle.answer) == answer


@given(st.text(max_size=60))
def test_any_text_can_be_read(text):
    read_puzzle(text)
    assert isinstance(PuzzleSolver().answer(text, text), str)


# Models
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 10, 1000])
def test_partial_outputs_are_beginnings_of_the_whole(limit):
    solver = PuzzleSolver()
    for row in ROWS[:20]:
        whole = solver.answer("", row["question"])
        reply = complete(solver, row["question"], max_tokens=limit, temperature=0)
        assert whole.startswith(reply.text) and reply.usage.completion_tokens <= limit
        assert reply.finish_reason == ("stop" if reply.text == whole else "length")


def share_right(prompt, kind):
    rows = [row for row in ROWS if row["task"] == kind]
    solver = PuzzleSolver()
    return sum(
        score_puzzle(solver.answer(prompt, row["question"]), row["answers"]) for row in rows
    ) / len(rows)


@pytest.mark.parametrize("kind", [SORTING, COUNTING])
def test_advice_in_the_prompt_prevents_mistakes(kind):
    advice = [fault.advice for fault in FAULTS.values() if fault.task == kind]
    plain = share_right(START_PROMPTS[kind], kind)
    warned = share_right("\n".join(advice), kind)
    assert plain < 0.65 and warned > 0.85
    assert share_right("\n".join([*advice, KEEP_SHORT]), kind) < warned - 0.2
    assert share_right(f"{START_PROMPTS[kind]} {BE_CAREFUL}", kind) == plain


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_seen_in_the_steps_and_turned_into_its_advice(name):
    fault = FAULTS[name]
    question = SORT if FAULTS[name].task == SORTING else COUNT
    solver = PuzzleSolver(carelessness=1.0, in_spite=0.0)
    others = "\n".join(other.advice for key, other in FAULTS.items() if key != name)
    output = solver.answer(others, question)
    feedback = said(
        PuzzleCritic(misses=0.0, alarms=0.0),
        FEEDBACK,
        query=question,
        output=output,
        state="The end.",
    )
    assert feedback == fault.remark
    improved = said(
        PuzzleOptimizer(vague=0.0, untagged=0.0), OPTIMIZER, prompt=others, feedback=feedback
    )
    assert improved == f"<IMPROVED_PROMPT>{others}\n{fault.advice}</IMPROVED_PROMPT>"
    right = solver.answer(f"{others}\n{fault.advice}", question)
    assert score_puzzle(right, [read_puzzle(question).answer]) == 1.0
    assert (
        said(PuzzleCritic(misses=0.0, alarms=0.0), FEEDBACK, query=question, output=right, state="")
        == "CORRECT"
    )


@pytest.mark.parametrize("row", ROWS[:30])
def test_right_work_is_never_blamed_however_short_it_is_cut(row):
    """A critic that is never wrong has no remark on any beginning of a right answer."""
    chat = PuzzleCritic(misses=0.0, alarms=0.0)
    words = PuzzleSolver(carelessness=0.0).answer("", row["question"]).split(" ")
    for end in range(1, len(words) + 1):
        output = " ".join(words[:end])
        assert (
            said(chat, FEEDBACK, query=row["question"], output=output, state="cut off") == "CORRECT"
        ), output


def test_an_answer_without_steps_gets_its_steps_back():
    solver = PuzzleSolver(carelessness=1.0)
    output = solver.answer(KEEP_SHORT, SORT)
    assert output.startswith("Answer: ")
    feedback = said(PuzzleCritic(misses=0.0), FEEDBACK, query=SORT, output=output, state="")
    assert feedback == NO_STEPS
    improved = said(
        PuzzleOptimizer(vague=0.0), OPTIMIZER, prompt=f"Sort.\n{KEEP_SHORT}", feedback=feedback
    )
    assert KEEP_SHORT not in improved and "\n" in PuzzleSolver().answer(improved, SORT)


def test_errors_come_at_their_rates():
    right = [(row["question"], f"Answer: {row['answers'][0]}") for row in ROWS]
    verdicts = [read_verdict(said(PuzzleVerifier(), VERIFIER, query=q, output=a)) for q, a in right]
    assert 0.8 < sum(v is True for v in verdicts) / 200 < 0.97
    assert 0 < sum(v is None for v in verdicts) < 15
    alarms = sum(
        said(PuzzleCritic(), FEEDBACK, query=q, output=a, state="") != "CORRECT" for q, a in right
    )
    assert 0.08 < alarms / 200 < 0.23
    replies = [
        said(PuzzleOptimizer(), OPTIMIZER, prompt=q, feedback=FAULTS["ties"].remark)
        for q, _ in right
    ]
    assert 0.04 < sum(BE_CAREFUL in reply for reply in replies) / 200 < 0.18
    assert 0.01 < sum("<IMPROVED_PROMPT>" not in reply for reply in replies) / 200 < 0.1


def test_nobody_is_shown_the_answer():
    """Accepted answers are in no message to any model, and the results do not change with them."""
    asked = []

    class Watched(ScriptedChat):
        def __init__(self, model):
            self.model_asked = model
            super().__init__(lambda messages: "")

        async def __call__(self, messages, **options):
            asked.extend(message["content"] for message in messages)
            return await self.model_asked(messages, **options)

    watched = {role: Watched(model) for role, model in puzzle_models().items()}
    rows = [{**row, "answers": ["the secret"]} for row in ROWS[:20]]
    results = ProRefiner(**watched).refine_all("Sort.", rows, progress=False)
    assert len(asked) > 100 and not any("the secret" in text for text in asked)
    without = ProRefiner(**puzzle_models()).refine_all(
        "Sort.", [row["question"] for row in rows], progress=False
    )
    assert [result.answer for result in results] == [result.answer for result in without]


def test_refining_helps_and_the_better_verifier_helps_more():
    rows = make_puzzles(400, seed=11)
    models = puzzle_models()
    right = {}
    for name, verifier in {
        "verifier": models["verifier"],
        "optimal": LabelVerifier(score_puzzle),
    }.items():
        refiner = ProRefiner(models["task"], models["feedback"], models["optimizer"], verifier)
        results = refiner.refine_all(START_PROMPTS[SORTING], rows, progress=False)
        right[name] = sum(
            score_puzzle(r.answer, row["answers"]) for r, row in zip(results, rows, strict=True)
        )
        right["none"] = sum(
            score_puzzle(r.initial_answer, row["answers"])
            for r, row in zip(results, rows, strict=True)
        )
    assert right["none"] + 80 < right["verifier"] < right["optimal"] < 400


def test_it_needs_no_torch():
    code = "import sys; import agentic_prompting.sandbox.puzzles; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )
