"""The paths to vLLM over the stand-in of vllm_stand_in.py: two processes, uneven turns, uneven
prompts, and the weights of every update. What the real one does is for machines with a GPU.
"""

import pytest

from support.distributed_backends import TYPES, launch, read
from support.forked import BEFORE_TRL
from support.vllm_stand_in import Server

# Under ZeRO-3 only where its gathers and the pushing of weights could get in each other's way.
PATHS = {"ddp": ["direct", "collective", "colocate", "narrow"], "zero3": ["collective", "direct"]}


@pytest.fixture(scope="module", params=PATHS)
def seen(request, tiny_policy, tmp_path_factory):
    """What each of two processes saw of all paths in one launch, and what the server did."""
    folder = tmp_path_factory.mktemp("vllm")
    weights = tmp_path_factory.mktemp("weights")
    with (
        Server(tiny_policy, weights, slow_update=0.3) as server,
        Server(tiny_policy, weights, max_model_len=40) as narrow,
    ):
        settings = {
            "policy": str(tiny_policy),
            "folder": str(folder),
            "weights": str(weights),
            "backend": request.param,
            "server": server.url,
            "narrow_server": narrow.url,
            "paths": PATHS[request.param],
        }
        launch("vllm_runs.py", 2, settings, imported=BEFORE_TRL)
    processes = read(folder, 2)
    for process in processes:
        for run in process.values():
            assert (run["type"], run["world"]) == (TYPES[request.param], 2)
            assert run["sharded"] == (request.param == "zero3")
    return {"processes": processes, "updates": server.updates, "asked": server.asked}


def test_sampled_and_recomputed_logprobs_agree(seen):
    """After every update: the engine has this step's weights, and each rollout got its own
    continuations.
    """
    for process in seen["processes"]:
        for path, run in process.items():
            assert len(run["log"]) == 3 and all(
                entry["grad_norm"] > 1e-3 for entry in run["log"]
            ), "the weights move"
            assert (
                max(entry["sampling/sampling_logp_difference/max"] for entry in run["log"]) <= 1e-5
            ), path


def test_processes_are_uneven(seen):
    first, second = seen["processes"]
    for path in first:
        assert path == "narrow" or first[path]["log"][0]["rollout/turns"] == 2  # of 1 and 3
        assert len(second[path]["calls"]) > len(first[path]["calls"])
    assert seen["updates"] == 3 and set(seen["asked"]) == {1}, (
        "one rollout per request, whatever the processes do"
    )


def test_the_servers_limit_ends_rollouts_as_truncated(seen):
    """Its `max_model_len` is shorter than the model's own: no request is refused, the rollouts end."""
    for process in seen["processes"]:
        if "narrow" not in process:
            continue
        assert process["narrow"]["max_context"] == 40 < process["direct"]["max_context"]
        assert any(entry["rollout/truncated"] > 0 for entry in process["narrow"]["log"])


def test_turns_go_on_while_the_weights_are_pushed(tiny_policy, tmp_path):
    """With a lead, by TRL's push: the turns under way end first, and each token is as old as it
    says.
    """
    with Server(tiny_policy, tmp_path, slow_update=0.3) as server:
        settings = {
            "policy": str(tiny_policy),
            "folder": str(tmp_path),
            "weights": str(tmp_path),
            "backend": "ddp",
            "paths": [],
            "lead": server.url,
        }
        launch("vllm_runs.py", 2, settings, imported=BEFORE_TRL)
    assert server.updates == 4
    for process in read(tmp_path, 2):
        assert process["lead"]["ages"][0] == 0 < process["lead"]["ages"][-1]
        for seed, updates in process["lead"]["said"].items():
            assert set(updates) == {server.made[int(seed)] - 1}, (
                "the first push has the weights of no update"
            )


def test_training_without_its_server_saves_and_says_the_address(tiny_policy, tmp_path):
    """The server goes while rollouts wait for it, or before it is to get the next weights."""
    with Server(tiny_policy, tmp_path) as one, Server(tiny_policy, tmp_path) as other:
        servers = {"rollouts": one.url, "rewards": other.url}
        settings = {
            "policy": str(tiny_policy),
            "folder": str(tmp_path),
            "weights": str(tmp_path),
            "backend": "ddp",
            "paths": [],
            "vanishing": servers,
        }
        launch("vllm_runs.py", 2, settings, timeout=200, imported=BEFORE_TRL)
    for process in read(tmp_path, 2):
        for when, stopped_at in (("rollouts", 1), ("rewards", 2)):
            assert process[when]["step"] == stopped_at
            assert servers[when] in process[when]["said"]
            assert "resume_from_checkpoint" in process[when]["said"]
            assert (tmp_path / when / f"checkpoint-{stopped_at}" / "model.safetensors").exists()
