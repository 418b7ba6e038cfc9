"""Two processes on a CPU under DDP, ZeRO-2, ZeRO-3 and FSDP2, against one process: the same run.

The episodes of one process have one turn, those of the other three. One launch per back end plays
all of it, under a time limit of its own; every test looks at what the launch says it was.
"""

import re
import shutil

import numpy as np
import pytest

from support.distributed_backends import TYPES, launch, launch_under_torchrun, read
from support.distributed_runs import BY_NAME, fewer
from support.marks import LONG

PARTS = ["prompt_r1-full", "prompt_r1-lora", "espl-full", "espl-lora", "several-full"]
SHARDED = {"zero3", "fsdp2"}
# ZeRO-2 shards less than ZeRO-3, by the same code.
BACKENDS = [pytest.param(one, marks=LONG) if one == "zero2" else one for one in TYPES]


@pytest.fixture(scope="module")
def play(tiny_policy, tmp_path_factory):
    """What each process saw, by back end and number of processes; each launched once, when first
    asked for.
    """
    seen = {}
    kept = tmp_path_factory.mktemp("kept")

    def runs(backend, processes=2):
        if (backend, processes) not in seen:
            folder = tmp_path_factory.mktemp(f"{backend}{processes}")
            settings = {
                "policy": str(tiny_policy),
                "folder": str(folder),
                "backend": backend,
                "processes": processes,
            }
            launch(
                "distributed_runs.py",
                processes,
                {**settings, "resume": backend != "zero2"},
            )
            seen[backend, processes] = read(folder, processes)
            if backend != "zero2" and processes == 2:
                shutil.move(folder / "whole-prompt_r1" / "checkpoint-5", kept / backend)
            shutil.rmtree(folder)  # checkpoints of twelve runs
        return seen[backend, processes]

    runs.checkpoint = lambda backend: (runs(backend), kept / backend)[1]  # of two processes
    return runs


def column(run, name):
    return [entry[name] for entry in run["log"]]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_losses(play, backend, part):
    """With uneven episodes, LoRA or all weights, beta > 0: to 1e-5 what one process computes."""
    one = play("ddp", 1)[0][part]
    others = [process[part] for process in play(backend)]
    for process, turns in zip(others, (1, 3), strict=True):
        assert (process["type"], process["world"]) == (TYPES[backend], 2)
        assert process["sharded"] == (backend in SHARDED)
        assert set(process["calls"]) == {turns}, (
            "every rollout of a process has so many turns: they are uneven"
        )
        for name in ("loss", "kl", "entropy", "reward", "reward_std"):
            assert np.allclose(column(process, name), column(one, name), rtol=0, atol=1e-5), name
        assert np.allclose(column(process, "grad_norm"), column(one, "grad_norm"), rtol=1e-4)
        assert column(process, "num_tokens") == column(one, "num_tokens")
    assert max(column(one, "kl")) > 1e-3 and max(column(one, "grad_norm")) > 1e-3, (
        "there is something to compare"
    )


@pytest.mark.parametrize("part", PARTS)
def test_all_processes_record_one_run(play, part):
    """Their clocks differ by a minute; with two runs the report would leave out the records of the
    earlier one.
    """
    first, second = play("ddp")
    assert first[part]["run"] == second[part]["run"]


@pytest.mark.parametrize("part", PARTS)
def test_advantages_do_not_depend_on_the_processes(play, part):
    """eq 1-2 of E-SPL, eq 14 of Prompt-R1: wherever a group's rows are computed."""
    alone = play("ddp", 1)[0][part]["advantages"]
    processes = play("ddp")
    for step in range(3):
        spread = [
            advantage for process in processes for advantage in process[part]["advantages"][step]
        ]
        assert np.allclose(spread, alone[step], atol=1e-6) and np.ptp(alone[step]) > 0


@pytest.mark.parametrize("part", ["espl-full", "espl-lora"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_espl_population_is_the_same_everywhere(play, backend, part):
    """Selections, ratings, crossovers and children: on both processes, and as on one.

    The paper's reflection, and with LoRA one call.
    """
    one = play("ddp", 1)[0][part]
    first, second = [process[part] for process in play(backend)]
    assert first["population"] == second["population"] == one["population"]
    assert one["population"]["batches"] == 3 and len(one["population"]["population"]["members"]) > 1


def test_logged_means_are_over_all_rollouts(play):
    """Episodes of one and of three turns, unevenly spread: the logged mean is that of the whole
    batch.
    """
    for process in play("ddp"):
        assert column(process["prompt_r1-full"], "rollout/turns") == [2, 2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_by_environment_are_those_of_one_process(play, backend):
    """Each process has the rows of one environment alone, which play one turn and three."""
    one = play("ddp", 1)[0]["several-full"]
    for process in play(backend):
        for name in BY_NAME:
            assert np.allclose(
                column(process["several-full"], name), column(one, name), rtol=0, atol=1e-6
            ), name
    assert column(one, "environments/even/turns") == [1, 1, 1]
    assert column(one, "environments/odd/turns") == [3, 3, 3]


@pytest.mark.parametrize("method", ["prompt_r1", "espl"])
@pytest.mark.parametrize(
    ("backend", "processes"), [("ddp", 1), ("ddp", 2), ("zero3", 2), ("fsdp2", 2)]
)
def test_resumed_run_is_the_uninterrupted_one(play, backend, processes, method):
    """Bit for bit, from a checkpoint in the second epoch and inside of a block of reused rollouts."""
    for process in play(backend, processes):
        whole, again = (process["resume"][method][name] for name in ("whole", "again"))
        assert again["type"] == ("NO" if processes == 1 else TYPES[backend])
        assert again["sharded"] == (backend in SHARDED)
        assert column(again, "step")[-2:] == [6, 7] and again["log"][-2:] == whole["log"][-2:]
        assert column(whole, "epoch")[4] == 1.25 and whole["log"][5]["grad_norm"] > 0
        assert again["population"] == whole["population"]


@pytest.mark.parametrize(
    "backend", ["ddp", pytest.param("zero3", marks=LONG), pytest.param("fsdp2", marks=LONG)]
)
def test_carried_groups_are_equally_many_everywhere(tiny_policy, tmp_path, backend):
    """With replies of different speed, at each step, each group once; and what is gone on with
    takes what was left. As many losses on both; under E-SPL one population.
    """
    settings = {
        "policy": str(tiny_policy),
        "folder": str(tmp_path),
        "backend": backend,
        "processes": 2,
    }
    launch("distributed_runs.py", 2, {**settings, "carry": True})
    for method in ("prompt_r1", "espl"):
        processes = [process[method] for process in read(tmp_path, 2)]
        for life, left in enumerate((range(12), None)):
            steps = [process["groups"][life] for process in processes]
            assert {len(numbers) for process in steps for numbers, *_ in process} == {1}
            numbers = sorted(
                number for process in steps for groups, *_ in process for number in groups
            )
            if (
                left is None
            ):  # from the fourth step on, what the first life had used by then is not used again
                before = [
                    number
                    for process in processes
                    for groups, *_ in process["groups"][0][:3]
                    for number in groups
                ]
                left = sorted(set(range(12)) - set(before))
                # Each turn of those was sampled in the first life and is not sampled again.
                assert [process["asked"][1] for process in processes] == [0, 0]
            assert numbers == list(left)
            first, second = (process["outcomes"][life] for process in processes)
            assert column(first, "loss") == column(second, "loss")
            assert first["population"] == second["population"]
            assert (first["type"], first["sharded"]) == (TYPES[backend], backend in SHARDED)


@pytest.mark.parametrize(
    ("backend", "lead"), [("ddp", 0), pytest.param("zero3", 0, marks=LONG), ("ddp", 1)]
)
def test_a_failing_process_takes_the_others_with_it(tiny_policy, tmp_path, backend, lead):
    """An exception in a rollout on one of two processes: both end, and both say where and what."""
    settings = {
        "policy": str(tiny_policy),
        "folder": str(tmp_path),
        "backend": backend,
        "processes": 2,
    }
    settings |= {"planted": {"async_lead": lead, "full_determinism": not lead}}
    if backend == "ddp":
        codes, said = launch("distributed_runs.py", 2, settings, check=False, timeout=240)
        assert (
            "[rank0]: agentic_prompting.trainers.policies.batch_samplers.PeerFailed: process 1 of "
            "2 " in said
        )
    else:  # under ZeRO-3 the launcher may end the other before it has heard
        codes, said = launch_under_torchrun("distributed_runs.py", 2, settings, timeout=240)
    assert all(code > 0 for code in codes), "each ended by itself"
    assert "[rank1]: ArithmeticError: planted in the sampler" in said
    assert "process 1 of 2" in said
    assert re.search(
        f"failed in the rollouts of step {'[12]' if lead else 1}; the other processes", said
    )


def test_on_another_number_of_processes_it_goes_on(play, tiny_policy, tmp_path, caplog):
    """From weights and optimizer, and says what is no longer exact."""
    settings = {"policy": str(tiny_policy), "folder": str(tmp_path), "processes": 1}
    with caplog.at_level("WARNING", logger="agentic_prompting"):
        fewer({**settings, "checkpoint": str(play.checkpoint("ddp"))})
    assert "the checkpoint is of 2 processes, this job has 1: weights" in caplog.text


def test_deepspeed_on_another_number_of_processes_is_refused_in_one_line(
    play, tiny_policy, tmp_path
):
    settings = {
        "policy": str(tiny_policy),
        "folder": str(tmp_path),
        "backend": "zero3",
        "processes": 1,
    }
    settings["checkpoint"] = str(play.checkpoint("zero3"))
    codes, printed = launch("distributed_runs.py", 1, settings, check=False)
    said = [
        line
        for line in printed.splitlines()
        if "by DeepSpeed for 2 processes, this job has 1: co" in line
    ]
    assert codes[0] > 0 and said and all("ValueError: " in line for line in said), printed[-3000:]
