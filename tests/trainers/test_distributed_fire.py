"""Failures and a budget in a job of two processes: one decision, one bill."""

import pytest

from agentic_prompting.llm import Budget
from support.distributed_backends import launch, read
from support.misbehaving import MisbehavingServer


@pytest.fixture(scope="module")
def seen(tiny_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fire")
    with MisbehavingServer(say=lambda request: "the answer is Kenya .") as server:
        settings = {
            "policy": str(tiny_policy),
            "folder": str(folder),
            "backend": "ddp",
            "url": server.base_url,
        }
        launch("distributed_fire.py", 2, settings)
        processes = read(folder, 2)
    assert [process["failing"]["world"] for process in processes] == [2, 2]
    return processes, folder, server


def test_a_step_that_failed_everywhere_moves_nothing_and_one_that_failed_here_moves_both(seen):
    first, second = (process["failing"] for process in seen[0])
    assert first["failed"] == [0, 1, 0.5] and first["weights"] == second["weights"]
    assert first["weights"][0] == first["weights"][1] != first["weights"][2]


def test_the_budget_is_the_jobs(seen):
    """Spent by both together, stopped at the same step on both, with one checkpoint and the whole
    bill on each.
    """
    (first, second), folder, server = seen
    for process in (first["spending"], second["spending"]):
        assert process["step"] == 1 and "BudgetExceeded" in process["stopped"]
    spent = Budget(path=folder / "spending" / "spending.sqlite").spent().tokens
    assert (
        spent
        == first["spending"]["tokens"] + second["spending"]["tokens"]
        == 15 * len(server.requests)
    )
    assert 90 <= spent <= 90 + 2 * 15  # over by the calls on their way, one for each process
    assert f"environment ${spent}.0000 ({spent} tokens)" in first["spending"]["stopped"]
    assert (folder / "spending" / "checkpoint-1" / "trainer_state.json").exists()
