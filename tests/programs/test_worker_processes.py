"""Functions as agents in processes of their own."""

import os
import re
import subprocess
import sys
import time
import types

import pytest

from agentic_prompting.programs import Program
from support import worker_agents
from support.programs import play_program


@pytest.fixture
def made():
    programs = []

    def make(agent, workers=1, **options):
        programs.append(Program(agent, workers=workers, **options))
        return programs[-1]

    yield make
    for program in programs:
        program.close()


def is_there(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so, seconds=20):
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)
    return is_so()


@pytest.mark.parametrize("agent", [worker_agents.answers, worker_agents.answers_plainly])
def test_rollouts_are_spread_over_the_workers(made, agent):
    program = made(agent, workers=2)
    rollouts, _ = play_program(program, n=6)
    assert [one.answer for one in rollouts] == ["hello"] * 6, rollouts[0].error
    pids = [rollout.returned["pid"] for rollout in rollouts]
    assert sorted(pids.count(pid) for pid in {*pids}) == [3, 3] and os.getpid() not in pids
    assert not any(one.returned["torch"] for one in rollouts), (
        "a worker imports the agent's module alone"
    )
    again, _ = play_program(program, n=2)
    assert {one.returned["pid"] for one in again} <= {*pids}
    program.close()
    assert wait_until(lambda: not any(map(is_there, pids)))


def test_a_worker_hands_on_the_system_prompt(made):
    row = {
        "question": "q",
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}],
    }
    rollout, policy = play_program(made(worker_agents.answers), row=row)
    assert rollout.returned["system_prompt"] == "be brief"
    assert "be brief" not in policy.contexts()[0]


@pytest.mark.parametrize(
    ("mistakes", "status"), [((), "failed"), ((worker_agents.Unreadable,), "malformed")]
)
@pytest.mark.parametrize("agent", [worker_agents.answers, worker_agents.answers_plainly])
def test_what_an_agent_raises_in_a_worker(made, agent, mistakes, status):
    rollout, _ = play_program(made(agent, mistakes=mistakes), row={"do": "raise"})
    assert rollout.status == status
    if status == "failed":
        place = r"the program raised Unreadable: this and that \(.*worker_agents.py:\d+ in do\)"
        assert re.search(place, str(rollout.error))
        assert 'raise Unreadable("this", "that")' in rollout.error.__notes__[0]


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("exit", "the worker of the program has ended with 3"),
        ("sys.exit", "the program raised SystemExit: 4"),
        ("unpicklable", "Can't pickle"),
        ("unreadable", "missing 1 required positional argument"),
    ],
)
def test_a_worker_that_cannot_answer_fails_its_rollouts_and_is_replaced(made, do, says):
    program = made(worker_agents.answers)
    failed, _ = play_program(program, row={"do": do})
    assert failed.status == "failed" and says in str(failed.error), failed.error
    played, _ = play_program(program)
    assert played.answer == "hello", played.error


def test_a_worker_that_cannot_import_the_agent_says_why(made, monkeypatch):
    module = types.ModuleType("here_alone")
    exec("def agent(row, base_url, api_key): ...", vars(module))
    monkeypatch.setitem(sys.modules, "here_alone", module)
    failed, _ = play_program(made(module.agent))
    assert "has ended" in str(failed.error) and "No module named 'here_alone'" in str(failed.error)


def test_an_agent_out_of_time_is_cancelled_in_its_worker(made, tmp_path):
    row = {"seconds": 60, "file": str(tmp_path / "file")}
    rollout, _ = play_program(made(worker_agents.waits, timeout=8), row=row)
    assert "longer than 8 seconds" in str(rollout.error)
    assert wait_until((tmp_path / "file").exists)


def test_agents_that_compute_leave_the_trainers_process_free(made):
    """Four rollouts that hold an interpreter for 2 s each cost this one next to nothing.

    In threads of this process they would take 2 s of its processor time together.
    """
    program = made(worker_agents.computes, workers=2)
    play_program(program, n=2, row={"seconds": 0})  # imports
    before = time.process_time()
    rollouts, _ = play_program(program, n=4, row={"seconds": 2})
    assert all(rollout.answer == "hello" for rollout in rollouts), rollouts[0].error
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (lambda row, base_url, api_key: "x", "function at the top of a module"),
        (["echo"], "must be a function"),
    ],
)
def test_agents_that_a_worker_cannot_have(agent, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Program(agent, workers=1)


SCRIPT = """
import sys
from support import worker_agents
from support.programs import play_program
from agentic_prompting.programs import Program

if "own" in sys.argv:
    def agent(row, base_url, api_key): ...
    Program(agent, workers=1)
program = Program(worker_agents.answers, workers=2)
rollouts, _ = play_program(program, n=2)
print(*[one.returned["pid"] for one in rollouts], flush=True)
sys.stdin.read()
"""


def script(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def test_workers_end_with_a_trainer_that_is_killed():
    with script() as process:
        pids = [*map(int, process.stdout.readline().split())]
        assert len({*pids}) == 2 and all(map(is_there, pids))
        process.kill()
    assert wait_until(lambda: not any(map(is_there, pids)))


def test_an_agent_of_the_script_itself_is_refused():
    assert "put it into a module of its own" in script("own").communicate()[1]
