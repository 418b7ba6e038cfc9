"""Two processes on a CPU (DDP, gloo). Each launch asserts its world size: a wrong set-up runs as one process, rc 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


def launch(script, processes, *arguments):
    """Run `script` under torchrun, under a time limit of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
        str(HERE / script), *map(str, arguments),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def seen(tiny_policy, tmp_path_factory):
    """What one process saw, and what each of two saw, of the same steps."""
    found = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"processes{processes}")
        launch("distributed_runs.py", processes, tiny_policy, folder, 8 // processes)
        found[processes] = [json.loads((folder / f"seen-{i}.json").read_text()) for i in range(processes)]
        for process in found[processes]:
            assert [run["world"] for run in process.values()] == [processes] * 2
    return found


def test_espl_population_is_the_same_everywhere(seen):
    """Selections, ratings, crossovers and children: on both processes, and as on one."""
    one, (first, second) = seen[1][0]["espl"]["state"], [process["espl"]["state"] for process in seen[2]]
    assert first == second
    assert first["batches"] == one["batches"] and len(first["population"]["members"]) > 1
    assert first["population"] == one["population"]


@pytest.mark.parametrize("method", ["espl", "prompt_r1"])
def test_advantages_do_not_depend_on_the_processes(seen, method):
    """eq 1-2 of E-SPL, eq 14 of Prompt-R1: wherever a group's rows are computed."""
    for step in range(3):
        spread = [advantage for process in seen[2] for advantage in process[method]["advantages"][step]]
        alone = seen[1][0][method]["advantages"][step]
        assert np.allclose(spread, alone, atol=1e-6) and np.ptp(alone) > 0


@pytest.mark.parametrize("method", ["espl", "prompt_r1"])
def test_weights_and_losses_are_the_same_everywhere(seen, method):
    one, (first, second) = seen[1][0][method], [process[method] for process in seen[2]]
    assert first["weights"] == second["weights"] == pytest.approx(one["weights"], rel=1e-6)
    assert np.allclose(first["losses"], one["losses"], atol=1e-5)


def test_logged_means_are_over_all_rollouts(seen):
    """Episodes of one and of two turns, unevenly spread: the logged mean is that of the whole batch."""
    one, first = seen[1][0]["prompt_r1"], seen[2][0]["prompt_r1"]
    assert first["turns"] == one["turns"] and any(1 < turns < 2 for turns in one["turns"])
