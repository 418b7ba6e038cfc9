"""Verifiers that are not models."""

import asyncio
import threading

import pytest

from agentic_prompting.refine import (
    LabelVerifier,
    ProRefiner,
    summarize,
    verifiers,
)
from agentic_prompting.rewards import exact_match
from support.refine_models import PROMPT, QUERY, Log, models, refined, words


@pytest.mark.parametrize("verdict", [True, False, None])
def test_a_callable_verifier(verdict):
    seen = []
    log = Log()
    result = refined(
        log, verifier=lambda query, output: seen.append((query.text, output)) or verdict
    )
    assert seen == [(QUERY, words(35, "v0w"))]
    assert result.verdict == {True: "right", False: "wrong", None: "none"}[verdict]
    assert result.stop_reason == ("verified" if verdict else "finished")
    assert "verifier" not in log.roles


def test_an_async_verifier_is_awaited():
    async def judge(query, output):
        await asyncio.sleep(0)
        return query.text == QUERY

    assert refined(Log(), verifier=judge).verdict == "right"


def test_plain_verifiers_run_one_after_another_on_one_thread():
    threads = set()
    running = []
    most = []

    def judge(query, output):
        threads.add(threading.current_thread())
        running.append(query)
        most.append(len(running))
        inner = ProRefiner(**models(Log(), length=5)).refine(
            PROMPT, query.text
        )  # it may wait for models of its own
        running.pop()
        return bool(inner.answer)

    refiner = ProRefiner(**models(Log()), verifier=judge)
    results = refiner.refine_all(PROMPT, [f"Question {i}?" for i in range(20)], progress=False)
    assert {result.verdict for result in results} == {"right"}
    assert len(threads) == 1
    assert max(most) == 1


@pytest.mark.parametrize(
    ("verifier", "kind"),
    [
        (lambda query, output: 1 / 0, "ZeroDivisionError"),
        (lambda query, output: "wrong", "TypeError"),
        (lambda query, output: next(iter(())), "StopIteration"),  # which no future can hold
    ],
)
def test_a_verifier_with_a_bug_is_a_counted_failure(verifier, kind):
    result = refined(Log(), verifier=verifier)
    assert (result.verdict, result.stop_reason, result.error) == ("none", "finished", None)
    assert [(failure.role, failure.step, failure.kind) for failure in result.failures] == [
        ("verifier", 0, kind)
    ]
    assert summarize([result])["verdict/none"] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_verifier_that_hangs_fails_and_the_next_runs(monkeypatch, is_async):
    monkeypatch.setattr(verifiers, "VERIFIER_SECONDS", 0.2)
    released = threading.Event()

    def hang(query, answer):
        released.wait(60)
        return True

    async def hang_async(query, answer):
        await asyncio.sleep(60)

    try:
        result = refined(Log(), verifier=hang_async if is_async else hang)
        assert (result.verdict, result.stop_reason) == ("none", "finished")
        assert [(failure.role, failure.kind) for failure in result.failures] == [
            ("verifier", "TimedOut")
        ]
        assert refined(Log(), verifier=lambda query, answer: True).verdict == "right"
    finally:
        released.set()


def test_a_label_verifier_without_labels():
    log = Log()
    refiner = ProRefiner(**models(log), verifier=LabelVerifier(exact_match))
    with pytest.raises(ValueError, match=r"LabelVerifier\(exact_match.* query 1 has none"):
        refiner.refine_all(PROMPT, [{"question": QUERY, "answers": ["4"]}, QUERY])
    assert log.calls == []
