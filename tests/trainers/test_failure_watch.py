"""Failed rollouts that end a run, or do not."""

import pytest

from agentic_prompting.llm import Misconfigured, ServerFailed
from agentic_prompting.programs import ProgramFailed
from agentic_prompting.rollout import Observation, Rollout, RolloutFacts
from agentic_prompting.trainers.batch_monitor import FailureWatch

ANSWERED = RolloutFacts.of(Rollout([1]).finish("answered"))
FAILED = RolloutFacts.of(Rollout([1]).fail(Observation(error=ServerFailed("down"))))
FATAL = RolloutFacts.of(Rollout([1]).fail(Observation(error=Misconfigured("no key"))))


def test_only_a_full_window_of_failures_stops():
    watch = FailureWatch(window=2, max_share=0.5)
    assert not watch.check_batch([FAILED, FAILED])
    reason = watch.check_batch([FAILED, ANSWERED])
    assert "75%" in reason and "ServerFailed" in reason


def test_a_recovered_environment_does_not_stop():
    watch = FailureWatch(window=2, max_share=0.1)
    watch.check_batch([FAILED, FAILED])
    assert not watch.check_batch([ANSWERED, ANSWERED])


def test_a_fatal_error_stops_at_once():
    reason = FailureWatch(window=5, max_share=1.0).check_batch([ANSWERED, FATAL, FAILED])
    assert "Misconfigured" in reason and "no key" in reason


def test_a_program_that_raises_is_told_of_mistakes(caplog):
    raised = RolloutFacts.of(Rollout([1]).fail(Observation(error=ProgramFailed("raised"))))
    reason = FailureWatch(window=1, max_share=0.1).check_batch([raised])
    assert "mistakes=" in reason and "mistakes=" in caplog.text
    caplog.clear()
    reason = FailureWatch(window=1, max_share=0.1).check_batch([FAILED])
    assert "mistakes=" not in reason and "mistakes=" not in caplog.text


@pytest.mark.parametrize(
    ("batches", "has_reason"),
    [
        ([[FAILED, FAILED]], True),
        ([[FAILED, ANSWERED], [FAILED, FAILED]], False),
        ([[FAILED, FAILED], [ANSWERED, ANSWERED]], False),
        ([], False),
    ],
)
def test_a_run_without_a_success_has_failed(batches, has_reason):
    watch = FailureWatch(window=9, max_share=1.0)
    for batch in batches:
        assert not watch.check_batch(batch)
    assert bool(watch.failure_reason()) == has_reason


def test_the_first_failure_is_logged_once(caplog):
    watch = FailureWatch(window=9, max_share=0.5)
    watch.check_batch([FAILED], hint="; see FILE")
    watch.check_batch([FAILED], hint="; see FILE")
    (line,) = caplog.messages
    assert "1 of 1 rollouts" in line and "50%" in line and line.endswith("; see FILE")
