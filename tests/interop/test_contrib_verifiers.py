"""`examples/contrib/verifiers_tasks.py`: task sets in an interpreter of their own (`make foreign`),
and against a stand-in for its process, which also misbehaves.
"""

import asyncio
import json
import logging
import os
import sys
import textwrap
from pathlib import Path

import pytest
import verifiers_tasks
from verifiers_tasks import VerifiersTasks

from agentic_prompting.llm import ServerFailed, TimedOut, Unreachable
from agentic_prompting.llm.loop import run
from agentic_prompting.rollout import Rollout, Sample

ROOT = Path(__file__).parents[2]

STAND_IN = """
    import json, os, sys, time
    for line in sys.stdin:
        asked = json.loads(line)
        text = asked.get("text")
        if "rows" in asked:
            answer = {"rows": [{"task": n, "question": f"The capital {n}?"} for n in range(2)][: asked["rows"]]}
        elif "begin" in asked:
            answer = {"episode": "e", "messages": [{"role": "user", "content": f"The capital {asked['begin']}?"}]}
        elif text == "die":
            sys.exit(3)
        elif text == "hang":
            continue
        elif text == "close":  # the output ends, the process does not
            os.close(1)
            time.sleep(3600)
        elif text == "child":  # the process ends, its output does not
            os.fork() and os._exit(4)
            time.sleep(20)
            os._exit(0)
        elif text == "endless":
            while True:
                os.write(1, b"x" * 65536)
        elif text == "outage":
            answer = {"error": "the judge is down, wrong key sk-abcdef123456"}
        elif text == "Kenya.":
            answer = {"messages": [{"role": "user", "content": "You said Kenya. Its capital?"}]}
        elif text and text.startswith("{"):
            answer = json.loads(text)
        else:
            if text == "stray":
                stray = ("hello", "[]", "3", "null", "{}", '{"id": "x"}', '{"id": [1]}', '{"id": 999}', "[" * 100000)
                print(*stray, "Bearer abcdef123456", sep="\\n", flush=True)
                sys.stdout.buffer.write(b"\\xff\\xfe\\n")
            answer = {"reward": float(text is not None), "metrics": {}}
        print(json.dumps({**answer, "id": asked["id"]}), flush=True)
"""


@pytest.fixture
def bridged(tmp_path, monkeypatch):
    """A task set behind a process that answers as the bridge does."""
    bridge = tmp_path / "bridge.py"
    bridge.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(verifiers_tasks, "_BRIDGE", bridge)
    tasks = VerifiersTasks("any", sys.executable)
    yield tasks
    tasks.close()


def begun(tasks: VerifiersTasks, **columns: object) -> Rollout:
    return Rollout(
        [1], row=run(tasks.reset({"prompt": [{"role": "user", "content": "Play."}], **columns}))
    )


def step(tasks: VerifiersTasks, rollout: Rollout, text: str):
    rollout.add_turn(Sample([1]), tasks.grammar.parse(text))
    return run(tasks.step(rollout))


def reward_of(tasks: VerifiersTasks, rollout: Rollout) -> float | None:
    return run(tasks.reward(rollout=[rollout]))[0]


def test_a_task_set_in_another_process(bridged):
    assert [row["task"] for row in bridged.rows()] == [0, 1] and len(bridged.rows(1)) == 1
    rollout = begun(bridged, task=1)
    assert rollout.row["prompt"] == [{"role": "user", "content": "The capital 1?"}]
    observation = step(bridged, rollout, "Kenya.")
    assert observation.text == "You said Kenya. Its capital?"
    rollout.add_observation(observation, [2])
    assert step(bridged, rollout, "<think>hm</think>Nairobi") is None
    assert reward_of(bridged, rollout) == 1.0
    stopped = begun(bridged, task=1)  # by its turn limit: the last turn has not been sent yet
    stopped.add_turn(Sample([1]), bridged.grammar.parse("Kenya."))
    assert reward_of(bridged, stopped) == 0.0


def test_a_process_that_ends_is_an_outage_and_is_started_again(bridged):
    for text, kind in (("outage", ServerFailed), ("die", Unreachable)):
        rollout = begun(bridged, task=0)
        failed = step(bridged, rollout, text)
        assert isinstance(failed.error, kind) and "abcdef123456" not in str(failed.error)
        assert reward_of(bridged, rollout.fail(failed)) is None
    assert step(bridged, begun(bridged, task=0), "Nairobi") is None
    rollout = begun(bridged, task=0)
    bridged.timeout = 0.01
    assert isinstance(step(bridged, rollout, "hang").error, TimedOut)


@pytest.mark.parametrize(("text", "code"), [("die", "3"), ("close", "-9"), ("child", "4")])
def test_an_end_is_reported_when_it_comes_and_not_after_the_timeout(bridged, text, code):
    bridged.timeout = 60
    error = step(bridged, begun(bridged, task=0), text).error
    assert isinstance(error, Unreachable) and f"ended with {code}" in str(error)
    assert step(bridged, begun(bridged, task=0), "Nairobi") is None


def test_stray_lines_are_skipped_and_logged(bridged, caplog):
    caplog.set_level(logging.WARNING)
    bridged.timeout = 30
    rollout = begun(bridged, task=0)
    assert step(bridged, rollout, "stray") is None and reward_of(bridged, rollout) == 1.0
    assert "hello" in caplog.text and "abcdef123456" not in caplog.text


def test_a_turn_that_the_limit_kept_back_is_scored_on_another_loop_too(bridged):
    """A trainer awaits rewards on a loop of its own."""
    rollout = begun(bridged, task=0)
    rollout.add_turn(Sample([1]), bridged.grammar.parse("Nairobi"))  # `max_turns=1`: no step
    assert asyncio.run(asyncio.wait_for(bridged.reward([rollout]), 20)) == [1.0]


def test_a_line_without_end_restarts_the_process(bridged, monkeypatch):
    monkeypatch.setattr(verifiers_tasks, "_LONGEST_LINE", 1 << 20)
    error = step(bridged, begun(bridged, task=0), "endless").error
    assert isinstance(error, Unreachable) and "could not be read" in str(error)
    assert step(bridged, begun(bridged, task=0), "Nairobi") is None


@pytest.mark.parametrize(
    "answer",
    [
        '{"x": 1}',
        '{"messages": 3}',
        '{"messages": [3]}',
        '{"messages": [{"role": "user"}]}',
        '{"reward": "much"}',
        '{"reward": null}',
        '{"reward": true}',
        '{"reward": NaN}',
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_outage(bridged, answer):
    rollout = begun(bridged, task=0)
    assert isinstance(step(bridged, rollout, answer).error, ServerFailed)
    stopped = begun(bridged, task=0)
    stopped.add_turn(Sample([1]), bridged.grammar.parse(answer))
    assert reward_of(bridged, stopped) is None


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_a_task_with_an_image_is_not_played_as_text(bridged):
    shown = [{"type": "text", "text": "What is this?"}, PICTURE]
    answer = json.dumps({"messages": [{"role": "user", "content": shown}]})
    error = step(bridged, begun(bridged, task=0), answer).error
    assert isinstance(error, ServerFailed) and "image_url" in str(error)


def test_text_in_parts_is_text(bridged):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    observation = step(bridged, begun(bridged, task=0), json.dumps({"messages": messages}))
    assert observation.text.strip() == "one\ntwo"


def test_a_task_sets_own_fields_can_be_set(bridged):
    tasks = VerifiersTasks("any", python=sys.executable, taskset={"num_tasks": 100}, id="other")
    assert tasks.config == {"id": "other", "taskset": {"id": "any", "num_tasks": 100}}


def test_reset_never_raises(bridged, tmp_path):
    for row in ({"task": object()}, {"task": {1, 2}}):
        assert isinstance(begun(bridged, **row).row["environments"], ServerFailed)
    nowhere = VerifiersTasks("any", tmp_path / "no-python")
    assert isinstance(begun(nowhere, task=0).row["environments"], Unreachable)
    with pytest.raises(Unreachable, match="cannot be started"):
        nowhere.rows()
    assert reward_of(nowhere, begun(nowhere, task=0)) is None


@pytest.mark.slow
def test_task_sets_of_verifiers(monkeypatch):
    python = (
        Path(os.environ.get("FOREIGN", ROOT / ".venv-foreign")) / "verifiers" / "bin" / "python"
    )
    if not python.exists():
        pytest.skip("needs verifiers in an environment of its own: make foreign")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("foreign")))
    tasks = VerifiersTasks("capitals", python)
    rows = tasks.rows()
    assert [row["question"] for row in rows] == ["The capital of Kenya?", "The capital of Peru?"]
    rollout = begun(tasks, **rows[1])
    assert [message["role"] for message in rollout.row["prompt"]] == ["system", "user"]
    assert step(tasks, rollout, "<think>Nairobi?</think>Lima") is None
    assert reward_of(tasks, rollout) == 1.0
    assert rollout.row["environments"]["metrics"] == {"replies": 1.0}
    for text, kind in (("outage", ServerFailed), ("die", Unreachable)):
        rollout = begun(tasks, **rows[0])
        failed = step(tasks, rollout, text)
        assert isinstance(failed.error, kind) and reward_of(tasks, rollout.fail(failed)) is None
    assert isinstance(begun(tasks, task=99).row["environments"], ServerFailed)
    tasks.close()

    tasks = VerifiersTasks("talk", python)
    rollout = begun(tasks, **tasks.rows()[0])
    observation = step(tasks, rollout, "Kenya.")
    assert observation.text == "You said Kenya. Its capital?"
    rollout.add_observation(observation, [2])
    assert step(tasks, rollout, "It is Nairobi.") is None and reward_of(tasks, rollout) == 1.5
    stopped = begun(tasks, task=0)
    assert step(tasks, stopped, "Kenya.").text and reward_of(tasks, stopped) == 0.5
    tasks.close()

    tasks = VerifiersTasks("pictures", python)
    assert [row["question"] for row in tasks.rows()] == ["The capital\nof Kenya?", "Which country?"]
    rollout = begun(tasks, task=0)
    assert rollout.row["prompt"][-1]["content"] == "The capital\nof Kenya?"
    assert step(tasks, rollout, "Nairobi") is None and reward_of(tasks, rollout) == 1.0
    tasks.close()

    tasks = VerifiersTasks("pictures", python, taskset={"shown": "first"})
    for _ in range(2):
        with pytest.raises(ServerFailed, match="image_url"):
            tasks.rows()
    assert tasks.rows(1)[0]["task"] == 0, "the tasks before it keep their numbers"
    assert isinstance(begun(tasks, task=1).row["environments"], ServerFailed)
    tasks.close()

    tasks = VerifiersTasks("pictures", python, taskset={"shown": "later"})
    failed = step(tasks, begun(tasks, **tasks.rows()[0]), "Nairobi")
    assert isinstance(failed.error, ServerFailed) and "image_url" in str(failed.error)
    tasks.close()

    with pytest.raises(ServerFailed, match="none_such"):
        VerifiersTasks("none_such", python).rows()
