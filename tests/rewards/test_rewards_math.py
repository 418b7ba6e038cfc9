"""Mathematics as a reward: equal as expressions, and `None` where the grader failed."""

import threading

import pytest

from agentic_prompting.rewards import math_equal, math_reward
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


@pytest.mark.parametrize("text", [r"\boxed{433}", "I tried 432 and then stopped", "", r"\boxed{", r"\boxed{\frac{}{}}"])
def test_not_equal(text):
    assert math_equal(text, "432") is False


def episode(text, status="answered"):
    rollout = Rollout([1])
    rollout.add_turn(Sample([2]), parse_turn(text))
    rollout.status = status
    return rollout


def test_reward():
    said = [r"\boxed{4}", [{"role": "assistant", "content": r"\boxed{5}"}]]
    assert math_reward(None, said, answers=[["3", "4"], ["4"]]) == [1.0, 0.0]
    rollouts = [episode("<answer>8/2</answer>"), episode(r"\boxed{4}", "malformed"), episode(r"\boxed{4}", "failed")]
    assert math_reward(None, [""] * 3, answers=[["4"]] * 3, rollout=rollouts) == [1.0, 1.0, None]
    free = Rollout([1])
    free.add_turn(Sample([2]), FreeText().parse("Twice two. The final answer is 4.\n"))
    free.status = "answered"
    assert math_reward(None, [""], answers=[["4"]], rollout=[free]) == [1.0]
    with pytest.raises(ValueError, match="must be a list"):
        math_reward(None, ["x"], answers=["4"])
    with pytest.raises(ValueError, match="answers is empty"):
        math_reward(None, ["x"], answers=[[]])


def test_a_grader_that_runs_out_of_time_is_none():
    hard = r"\boxed{10^{10^{10}} - 1}"
    assert math_equal(hard, "1", timeout_seconds=1) is None
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math_equal(r"\boxed{2+2}", "4", timeout_seconds=1)))
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
