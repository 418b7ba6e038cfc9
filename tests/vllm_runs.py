"""Run by test_vllm.py under torchrun: steps over the stand-in for vLLM, and what each process saw."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import distributed_backends as backends
import vllm_stand_in

SETTINGS = json.loads(sys.argv[1])
backends.prepare(SETTINGS["backend"], SETTINGS["folder"])
vllm_stand_in.install(SETTINGS["weights"])  # before trl is imported

from datasets import Dataset  # noqa: E402

from agentic_prompting import MultiTurnGRPOTrainer  # noqa: E402
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


def play(name, **changes):
    """Three steps; the rows of one process have 1 round, those of the other 3, and prompts of other lengths."""
    prompts = [[{"role": "user", "content": "Kenya " * (1 + 3 * i)}] for i in range(8)]
    rows = [{"prompt": prompt, "rounds": 1 + 2 * (i % 2)} for i, prompt in enumerate(prompts)]
    trainer = MultiTurnGRPOTrainer(
        model=SETTINGS["policy"],
        environment=Rounds(),
        reward_funcs=lambda rollout, **kwargs: [float(sum(one.ids) % 7) for one in rollout],
        args=arguments(
            Path(SETTINGS["folder"]) / name, num_generations=4, max_steps=3, max_turn_tokens=6, shuffle_dataset=False,
            max_completion_length=80, use_vllm=True, learning_rate=1e-2, **changes,
        ),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
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


def main():
    server = {"vllm_mode": "server", "vllm_server_base_url": SETTINGS["server"]}
    paths = {
        "direct": server,
        "collective": {**server, "vllm_server_calls": "collective"},
        "colocate": {"vllm_mode": "colocate"},
        "narrow": {**server, "vllm_server_base_url": SETTINGS["narrow_server"]},
    }
    backends.leave(SETTINGS["folder"], {name: play(name, **paths[name]) for name in SETTINGS["paths"]})


if __name__ == "__main__":
    main()
