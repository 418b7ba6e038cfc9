"""Run by test_distributed_fire.py under torchrun: a job of two processes whose environment fails,
and one whose budget runs out. Each process writes its observations.
"""

import json
import os
import sys
from pathlib import Path

from datasets import Dataset

from agentic_prompting import OpenAIChat
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.sandbox import as_rows, make_split
from agentic_prompting.trainers import TrainingStopped
from support import distributed_backends as backends
from support.failing_runs import Flaky, watched_run
from support.training import Acts, trainer_for


def rows():
    return Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))


def sums(trainer):
    """The exact sums of the weights after each step."""
    return [sum(float(t.double().abs().sum()) for t in weights.values()) for weights in trainer]


def failing(settings):
    """The second step fails on both processes, the third on the first process alone."""
    down = {1, 2} if os.environ["RANK"] == "0" else {1}
    folder = Path(settings["folder"]) / "failing"
    trainer, watch = watched_run(
        settings["policy"],
        folder,
        rows(),
        down,
        chat=Flaky(),
        max_steps=3,
        per_device_train_batch_size=2,
        weight_decay=0.5,
        beta=0.05,
    )
    failed = [
        entry["rollout/failed"] for entry in trainer.state.log_history if "rollout/failed" in entry
    ]
    return {**backends.stated(trainer), "weights": sums(watch.weights), "failed": failed}


def spending(settings):
    """15 tokens a call, 2 calls a step on each process: the last call of the second step finds 90
    tokens spent.
    """
    with OpenAIChat("m", settings["url"], price=(1e6, 1e6), max_concurrency=1) as chat:
        trainer = trainer_for(
            settings["policy"],
            Path(settings["folder"]) / "spending",
            rows(),
            chat,
            budget_tokens=90,
            max_steps=9,
            per_device_train_batch_size=2,
            check_environment=False,
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        try:
            trainer.train()
        except TrainingStopped as stopped:
            return {
                "stopped": str(stopped),
                "step": trainer.state.global_step,
                "tokens": chat.usage.tokens,
            }
    return {}


def main(settings):
    backends.prepare(settings["backend"], settings["folder"])
    backends.leave(
        settings["folder"], {"failing": failing(settings), "spending": spending(settings)}
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
