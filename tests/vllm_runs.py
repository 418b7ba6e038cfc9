"""Run by test_vllm.py under torchrun: steps over the stand-in for vLLM, and what each process saw."""

import json
import sys
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import distributed_backends as backends
import vllm_stand_in

SETTINGS = json.loads(sys.argv[1])
backends.prepare(SETTINGS["backend"], SETTINGS["folder"])
vllm_stand_in.install(SETTINGS["weights"])  # before trl is imported

from datasets import Dataset  # noqa: E402

from agentic_prompting import MultiTurnGRPOTrainer, TrainingStopped  # noqa: E402
from agentic_prompting.rollout import Observation, TagGrammar  # noqa: E402
from agentic_prompting.rollout.grammar import Turn  # noqa: E402
from test_trainer import arguments  # noqa: E402


@dataclass(frozen=True)
class Asks(TagGrammar):
    """Whatever is written is a request: what a random model samples is played on as it is."""

    def parse(self, text):
        return Turn(text, "act", True, request=text)


class Rounds:
    """Replies as often as the row says, with texts of uneven length."""

    grammar = Asks()

    async def step(self, rollout):
        if len(rollout.turns) >= rollout.row["rounds"]:
            return None
        return Observation(text="Nairobi " * (1 + rollout.seed % 3))


def trainer_for(name, environment=None, reward=lambda rollout: float(sum(rollout.ids) % 7), **changes):
    """The rows of one process have 1 round, those of the other 3, and prompts of other lengths."""
    prompts = [[{"role": "user", "content": "Kenya " * (1 + 3 * i)}] for i in range(8)]
    rows = [{"prompt": prompt, "rounds": 1 + 2 * (i % 2)} for i, prompt in enumerate(prompts)]
    return MultiTurnGRPOTrainer(
        model=SETTINGS["policy"],
        environment=environment or Rounds(),
        reward_funcs=lambda rollout, **kwargs: [reward(one) for one in rollout],
        args=arguments(
            Path(SETTINGS["folder"]) / name, num_generations=4, max_steps=3, max_turn_tokens=6, shuffle_dataset=False,
            max_completion_length=80, use_vllm=True, learning_rate=1e-2, **changes,
        ),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip


def play(name, **changes):
    """Three steps."""
    trainer = trainer_for(name, **changes)
    policy, calls = trainer.policy, []

    class Counted(type(policy)):
        async def __call__(self, request):
            calls.append(1)
            return await super().__call__(request)

    policy.__class__ = Counted
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = ("loss", "grad_norm", "sampling/sampling_logp_difference/max", "rollout/turns", "rollout/truncated")
    return {
        **backends.stated(trainer),
        "log": [{name: entry[name] for name in names} for entry in log],
        "calls": calls,
        "max_context": trainer.limits.max_context,
    }


def lose(name, server, when):
    """The server vanishes in the second step: while rollouts wait for it, or before it is to get the next weights."""

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
        return float(sum(rollout.ids) % 7)

    trainer = trainer_for(
        name, Vanishing(), reward, vllm_mode="server", vllm_server_base_url=server, vllm_server_timeout=3
    )
    try:
        trainer.train()
    except TrainingStopped as error:
        return {"said": str(error), "step": trainer.state.global_step}


def main():
    server = {"vllm_mode": "server", "vllm_server_base_url": SETTINGS.get("server")}
    paths = {
        "direct": server,
        "collective": {**server, "vllm_server_calls": "collective"},
        "colocate": {"vllm_mode": "colocate"},
        "narrow": {**server, "vllm_server_base_url": SETTINGS.get("narrow_server")},
    }
    seen = {name: play(name, **paths[name]) for name in SETTINGS["paths"]}
    seen |= {when: lose(when, server, when) for when, server in SETTINGS.get("vanishing", {}).items()}
    backends.leave(SETTINGS["folder"], seen)


if __name__ == "__main__":
    main()
