"""Run by test_vllm.py under torchrun: steps over the stand-in for vLLM. Each process writes its
observations.
"""

import json
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

from support import distributed_backends as backends, vllm_stand_in

SETTINGS = json.loads(sys.argv[1])
backends.prepare(SETTINGS["backend"], SETTINGS["folder"])
vllm_stand_in.install(SETTINGS["weights"])  # before trl is imported

from agentic_prompting.trainers import TrainingStopped  # noqa: E402
from support.vllm_rounds import Rounds, by_sum, trainer_of_rounds  # noqa: E402


def trainer_for(name, *environment_and_reward, **changes):
    return trainer_of_rounds(
        SETTINGS["policy"], Path(SETTINGS["folder"]) / name, *environment_and_reward, **changes
    )


def play(name, **changes):
    """Three steps."""
    trainer = trainer_for(name, **changes)
    policy = trainer.policy
    calls = []

    class Counted(type(policy)):
        async def __call__(self, request):
            calls.append(1)
            return await super().__call__(request)

    policy.__class__ = Counted
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = (
        "loss",
        "grad_norm",
        "sampling/sampling_logp_difference/max",
        "rollout/turns",
        "rollout/truncated",
    )
    return {
        **backends.stated(trainer),
        "log": [{name: entry[name] for name in names} for entry in log],
        "calls": calls,
        "max_context": trainer.limits.max_context,
    }


def ahead(name, server):
    """Four steps with a lead of one: the number of updates before each turn, by its seed, and the
    ages.
    """
    trainer = trainer_for(
        name, async_lead=1, max_steps=4, per_device_train_batch_size=4, vllm_server_base_url=server
    )
    policy = trainer.policy
    said = {}

    class Watched(type(policy)):
        async def __call__(self, request):
            sample = await super().__call__(request)
            said[request.seed] = list(sample.updates)
            return sample

    policy.__class__ = Watched
    trainer.train()
    return {
        "said": said,
        "ages": [
            entry["async/token_age"] for entry in trainer.state.log_history if "loss" in entry
        ],
    }


def lose(name, server, when):
    """The server vanishes in the second step: while rollouts wait for it, or before the next weight
    sync.
    """

    def vanish():
        if trainer.state.global_step == 1:
            with suppress(OSError):  # gone already: there are two processes
                urllib.request.urlopen(f"{server}/vanish", data=b"{}", timeout=20)

    class Vanishing(Rounds):
        async def step(self, rollout):
            if when == "rollouts":
                vanish()
            return await super().step(rollout)

    def reward(rollout):
        if when == "rewards":
            vanish()
        return by_sum(rollout)

    trainer = trainer_for(
        name, Vanishing(), reward, vllm_server_base_url=server, vllm_server_timeout=3
    )
    try:
        trainer.train()
    except TrainingStopped as error:
        return {"said": str(error), "step": trainer.state.global_step}


def main():
    server = {"vllm_server_base_url": SETTINGS.get("server")}
    paths = {
        "direct": server,
        "collective": {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
        "colocate": {"vllm_mode": "colocate"},
        "narrow": {**server, "vllm_server_base_url": SETTINGS.get("narrow_server")},
    }
    seen = {name: play(name, **paths[name]) for name in SETTINGS["paths"]}
    seen |= {
        when: lose(when, server, when) for when, server in SETTINGS.get("vanishing", {}).items()
    }
    if "lead" in SETTINGS:
        seen["lead"] = ahead("lead", SETTINGS["lead"])
    backends.leave(SETTINGS["folder"], seen)


if __name__ == "__main__":
    main()
