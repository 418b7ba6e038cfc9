"""Mathematics as a reward: equal as expressions, and `None` where the grader failed."""

import threading
import time

import pytest

from agentic_prompting.rewards import math_equal, math_match, math_reward
from agentic_prompting.rollout import FreeText, Rollout, Sample, parse_turn

pytest.importorskip("math_verify", reason="needs the [math] extra")

EQUAL = {
    r"so it is \boxed{432}": "432",
    "The final answer is 432.": "432",
    "Final Answer:\n432": "432",
    r"\boxed{\frac12}": "0.5",
    r"\boxed{0.5}": r"\frac{1}{2}",
    r"\boxed{1+x}": "x+1",
    r"\boxed{1,296}": "1296",
    r"\boxed{7} no, \boxed{8}": "8",
    r"\boxed{\sqrt{2}}": r"$\sqrt 2$",
    r"\boxed{\text{east}}": "east",
}


@pytest.mark.parametrize(("text", "answer"), EQUAL.items(), ids=EQUAL)
def test_equal(text, answer):
    assert math_equal(text, answer) is True


@pytest.mark.parametrize(
    "text", [r"\boxed{433}", "I tried 432 and then stopped", "", r"\boxed{", r"\boxed{\frac{}{}}"]
)
def test_not_equal(text):
    assert math_equal(text, "432") is False


# Answers as agents write them, right and wrong.
RIGHT = {
    "12.": "12",
    "$12$.": "12",
    "x = 12.": "12",
    "1,000.": "1000",
    "**12**": "12",
    "\\[12\\]": "12",
    "12 apples.": "12",
    "12°": "12",
    "90^\\circ": "90",
    "about 12 apples": "12",
    "5 + 7 = 12 apples": "12",
    "12": "12 apples",
    "**x = 12**": "12",
    "The answer is 12.": "12",
    "18.90": "\\$18.90",
    "\\$18.90": "\\$18.90",
    "1000": "\\$1,000",
    "32348": "\\$32,\\!348",
    "5": "€5",
    "5 €": "£5",
    "-$5": "-5",
    "US$5.00": "5",
    "5 dollars": "\\$5",
    "$0.50": "0.5",
    "−5": "-5",
    "\\frac{1}{2}.": "0.5",
    "3/4 cups": "0.75",
    "0.333333": "1/3",
    "1e-9": "10^{-9}",
    "2.5e-9": "2.5 \\times 10^{-9}",
    "0.0000001": "10^{-7}",
    "east.": "\\text{east}",
    "1 and 2": "1,2",
}
WRONG = {
    "6": "\\$5",
    "12 or 13": "13",
    "not 12": "12",
    "3, 4": "4",
    "12 thousand": "12",
    "10-12": "12",
    "x=13": "12",
    "1e-9": "2e-9",
    "0.0000001": "0.0000002",
    "10^{-9}": "2 \\times 10^{-9}",
    "1e-7": "0",
    "\\{0.0000001\\}": "\\{0.0000002\\}",
    "x = 0.0000001": "x = 0.0000003",
    "0.33": "1/3",
    "9" * 2000: "12",
    "": "12",
}


@pytest.mark.parametrize(("answer", "accepted"), RIGHT.items(), ids=RIGHT)
def test_right_answers_as_agents_write_them(answer, accepted):
    assert math_match(answer, [accepted]) == 1.0


@pytest.mark.parametrize(
    ("answer", "accepted"), WRONG.items(), ids=[*list(WRONG)[:-2], "long", "empty"]
)
def test_wrong_answers_as_agents_write_them(answer, accepted):
    assert math_match(answer, [accepted]) == 0.0


def test_a_number_in_prose_is_no_final_answer():
    replies = [
        "I tried 432",
        "<think>The final answer is 432",
        "The final answer is 431. I hope 432 is wrong",
        "432",
    ]
    assert math_reward(None, replies, answers=[["432"]] * 4) == [0.0] * 4
    replies = [
        "The final answer is 432. I hope it is right.",
        "**Answer:**\n\n$$432$$",
        "So the answer is: **432**",
    ]
    assert math_reward(None, replies, answers=[["432"]] * 3) == [1.0] * 3


def test_a_final_answer_that_is_repeated_is_as_long():
    long = "+".join(["x"] * 800)
    assert math_match(long, [long]) == 1.0


HARD = ["10^{10^{10}} - 1", "9^{9^{9^{9}}}", "10000000!"]


def test_no_answer_stalls_other_threads():
    """Outside of the main thread, where rewards are called, a computation held the interpreter's
    lock for ever.
    """
    verdicts = []

    def grade():
        verdicts.extend(
            math_equal(f"\\boxed{{{answer}}}", "1", timeout_seconds=1)
            for answer in [*HARD, "1", "2"]
        )

    thread = threading.Thread(target=grade)
    thread.start()
    longest = 0.0
    before = time.monotonic()
    while thread.is_alive():
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
        before = time.monotonic()
    assert verdicts == [None, None, None, True, False]
    assert longest < 30, "the lock was held until the end of a computation of hours"


def test_the_grading_process_gets_no_secrets(monkeypatch):
    from agentic_prompting.rewards import math_process as module

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    started = []
    popen = module.subprocess.Popen

    def start(*arguments, **options):
        started.append(options["env"])
        return popen(*arguments, **options)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module, "_processes", {})
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math_equal("\\boxed{4}", "2+2")))
    thread.start()
    thread.join()
    assert verdicts == [True] and len(started) == 1
    assert "OPENAI_API_KEY" not in started[0] and "sk-secret" not in str(started[0])


def episode(text, status="answered"):
    rollout = Rollout([1])
    rollout.add_turn(Sample([2]), parse_turn(text))
    rollout.status = status
    return rollout


def test_reward():
    said = [r"\boxed{4}", [{"role": "assistant", "content": r"\boxed{5}"}]]
    assert math_reward(None, said, answers=[["3", "4"], ["4"]]) == [1.0, 0.0]
    rollouts = [
        episode("<answer>8/2</answer>"),
        episode(r"\boxed{4}", "malformed"),
        episode(r"\boxed{4}", "failed"),
    ]
    assert math_reward(None, [""] * 3, answers=[["4"]] * 3, rollout=rollouts) == [1.0, 1.0, None]
    free = Rollout([1])
    free.add_turn(Sample([2]), FreeText().parse("Twice two. The final answer is 4.\n"))
    free.status = "answered"
    assert math_reward(None, [""], answers=[["4"]], rollout=[free]) == [1.0]
    with pytest.raises(ValueError, match="answers"):
        math_reward(None, ["x"], answers=["4"])
    with pytest.raises(ValueError, match="answers"):
        math_reward(None, ["x"], answers=[[]])


def test_a_grader_that_runs_out_of_time_is_none():
    hard = r"\boxed{10^{10^{10}} - 1}"
    assert math_equal(hard, "1", timeout_seconds=1) is None
    verdicts = []
    thread = threading.Thread(
        target=lambda: verdicts.append(math_equal(r"\boxed{2+2}", "4", timeout_seconds=1))
    )
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_a_grader_that_crashes_is_none(monkeypatch):
    import math_verify

    def crash(*_, **__):
        raise RecursionError("too deep")

    monkeypatch.setattr(math_verify, "verify", crash)
    assert math_reward(None, [r"\boxed{4}", "nothing"], answers=[["4"], ["4"]]) == [None, 0.0]


def test_an_answer_that_cannot_be_read_is_none(monkeypatch):
    assert math_equal(r"\boxed{4}", "") is None


def test_without_the_library_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"agentic-prompting\[math\]"):
        math_reward(None, [r"\boxed{4}"], answers=[["4"]])
