"""Resuming in one process: every place a checkpoint can be at, what a killed save leaves, and other sizes of the job.

Several processes are in test_distributed.py.
"""

import logging
import os
from concurrent.futures import Future

import pytest
import torch

from agentic_prompting import LLMEnvironment, TrainingStopped
from agentic_prompting.llm import Misconfigured
from agentic_prompting.rollout import Observation
from agentic_prompting.sandbox import Oracle
from distributed_runs import Uneven
from test_trainer import trainer_for

TIMES = ("train_runtime", "step_time", "latency", "samples_per_second", "steps_per_second", "cached", "train_loss")


def build(policy, folder, rows, environment=None, **changes):
    """Batches of 4 rows' worth of micro-batches; 4 rows, so that an epoch is short."""
    changes = {
        "num_generations": 2, "per_device_train_batch_size": 4, "max_turn_tokens": 8, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 1, **changes,
    }  # fmt: skip
    options = changes.pop("options", None)
    trainer = trainer_for(
        policy, folder, rows.select(range(4)), environment=environment or LLMEnvironment(Oracle()), options=options,
        **changes,
    )  # fmt: skip
    trainer.sampler = Uneven(trainer)
    return trainer


def log_of(trainer, after):
    """Everything that is logged after a step, but how long it took."""
    return [
        {name: value for name, value in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
        if entry["step"] > after and "loss" in entry
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 2},
        {"num_iterations": 2},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 2},
        {"logging_steps": 2, "num_iterations": 2},
    ],
    ids=lambda options: "-".join(f"{name}{value}" for name, value in options.items()) or "plain",
)
def test_from_every_checkpoint(tiny_policy, rows, tmp_path, options):
    """At the end of an epoch and within one, at the edge of a block of rollouts and inside: bit for bit the same."""
    whole = build(tiny_policy, tmp_path / "whole", rows, **options)
    whole.train()
    assert whole.state.epoch > 1.1 and len({entry["loss"] for entry in log_of(whole, 0)}) > 1
    for step in (1, 3, 4):
        again = build(tiny_policy, tmp_path / f"from{step}", rows, **{**options, "save_strategy": "no"})
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        expected = log_of(whole, step)
        assert log_of(again, step) == expected and expected
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, again.model.state_dict()[name])


class Counts:
    """An environment whose replies depend on how often it was asked before."""

    def __init__(self):
        self.asked = 0

    def step(self, rollout):
        self.asked += 1
        future = Future()
        future.set_result(Observation(text="Nairobi " * (1 + self.asked % 4)))
        return future

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_the_environments_state_is_kept(tiny_policy, rows, tmp_path):
    whole, again = (build(tiny_policy, tmp_path / name, rows, Counts()) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert log_of(again, 3) == log_of(whole, 3) and again.environment.asked == whole.environment.asked > 6


def test_going_on_after_training_stopped_in_the_middle_of_a_step(tiny_policy, rows, tmp_path):
    """The environment dies at the second of two generations of one step: resumed, the step is done as a whole, on the
    same rows and with the same rollouts. (Not to the last bit: the order of micro-batches is drawn anew.)"""

    class Dies:
        def __init__(self, after):
            self.left, self.oracle = after, LLMEnvironment(Oracle())

        def step(self, rollout):
            self.left -= 1
            if self.left < 0:
                raise Misconfigured("gone")
            return self.oracle.step(rollout)

    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3, "save_strategy": "no"}
    whole = build(tiny_policy, tmp_path / "whole", rows, **options)
    asked = [0]
    step = whole.environment.step
    whole.environment.step = lambda rollout: asked.__setitem__(0, asked[0] + 1) or step(rollout)
    whole.train()
    stopped = build(tiny_policy, tmp_path / "stopped", rows, Dies(asked[0] // 3 + asked[0] // 6 + 1), **options)
    with pytest.raises(TrainingStopped, match=r"stopped at step 1: .*gone"):
        stopped.train()
    assert stopped._step == 3, "in the middle of the second step"
    again = build(tiny_policy, tmp_path / "stopped", rows, **options)
    again.train(resume_from_checkpoint=True)
    for name in ("reward", "rollout/agent_tokens", "environment/calls"):
        assert [entry[name] for entry in log_of(again, 1)] == [entry[name] for entry in log_of(whole, 1)]


def folders(path):
    return sorted(entry for entry in os.listdir(path) if "checkpoint" in entry or entry.startswith("."))


@pytest.mark.parametrize("moment", ["resume_state", "_save_rng_state", "_save"])
def test_a_save_that_is_cut_short_leaves_the_one_before(tiny_policy, rows, tmp_path, moment):
    """Even with room for one only; and what it left behind is gone after the next save."""
    options = {"save_total_limit": 1, "max_steps": 3}
    trainer = build(tiny_policy, tmp_path, rows, **options)
    working = getattr(trainer, moment)

    def cut_short(*args, **kwargs):
        if trainer.state.global_step == 2:
            raise KeyboardInterrupt("killed")
        return working(*args, **kwargs)

    setattr(trainer, moment, cut_short)
    with pytest.raises(KeyboardInterrupt, match="killed"):
        trainer.train()
    assert set(folders(tmp_path)) - {".saving"} == {"checkpoint-1"}
    again = build(tiny_policy, tmp_path, rows, **options)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in log_of(again, 1)] == [2, 3]
    assert folders(tmp_path) == ["checkpoint-3"]


def test_limit_and_best(tiny_policy, rows, tmp_path):
    """`save_total_limit` with `load_best_model_at_end`: the last and the best stay, under their own names."""
    trainer = build(
        tiny_policy, tmp_path, rows, save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps",
        eval_steps=1, max_steps=4, metric_for_best_model="seen", greater_is_better=True, options={"eval_dataset": rows},
    )  # fmt: skip
    kept = []

    def evaluate(*args, **kwargs):  # the second is the best
        trainer.model.train()
        kept.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        metrics = {"eval_seen": 0.9 if len(kept) == 2 else 0.1}
        trainer.log(dict(metrics))
        return metrics

    trainer.evaluate = evaluate
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert folders(tmp_path) == ["checkpoint-2"]
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, kept[1][name]) or torch.equal(kept[1][name], kept[2][name])
    assert not any(torch.equal(kept[1][name], kept[3][name]) for name in kept[0] if "q_proj" in name)


def test_a_second_run_in_the_same_folder_replaces_its_checkpoints(tiny_policy, rows, tmp_path):
    for seed in (1, 2):
        trainer = build(tiny_policy, tmp_path, rows, max_steps=1, seed=seed)
        trainer.train()
    assert folders(tmp_path) == ["checkpoint-1"]
    assert torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False).seed == 2


def test_without_our_file_it_goes_on_and_says_so(tiny_policy, rows, tmp_path, caplog):
    """From weights and optimizer. Another number of processes is in test_distributed.py."""
    build(tiny_policy, tmp_path, rows, num_iterations=2, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "exact_resume_0.pt").unlink()
    again = build(tiny_policy, tmp_path, rows, num_iterations=2, max_steps=5, save_strategy="no")
    with caplog.at_level(logging.WARNING, logger="agentic_prompting"):
        again.train(resume_from_checkpoint=True)
    assert "not exactly the uninterrupted one" in caplog.text and again.state.global_step == 5
