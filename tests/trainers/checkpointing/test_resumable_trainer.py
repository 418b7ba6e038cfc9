"""Resuming in one process: every place a checkpoint can be at, what a killed save leaves, and other
sizes of the job.

Several processes are in test_distributed.py.
"""

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from agentic_prompting import LLMEnvironment
from agentic_prompting.llm import Misconfigured
from agentic_prompting.rollout import Observation, read_rollouts
from agentic_prompting.sandbox import Oracle
from agentic_prompting.trainers import TrainingStopped
from agentic_prompting.trainers.checkpointing.find_checkpoint import find_damage
from support.distributed_runs import uneven
from support.training import trainer_for

TIMES = (
    "train_runtime",
    "step_time",
    "latency",
    "samples_per_second",
    "steps_per_second",
    "cached",
    "train_loss",
)


def build(policy, folder, rows, environment=None, **changes):
    """Batches of 4 rows' worth of micro-batches; 4 rows, so that an epoch is short."""
    changes = {
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_turn_tokens": 8,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        **changes,
    }
    options = changes.pop("options", None)
    trainer = trainer_for(
        policy,
        folder,
        rows.select(range(4)),
        environment=environment or LLMEnvironment(Oracle()),
        options=options,
        **changes,
    )
    uneven(trainer)
    return trainer


def log_of(trainer, after):
    """Everything that is logged after a step, but how long it took."""
    return [
        {name: value for name, value in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
        if entry["step"] > after and "loss" in entry
    ]


def test_a_script_that_only_calls_train_does_what_its_option_says(tiny_policy, rows, tmp_path):
    """`--resume_from_checkpoint` of a script: transformers parses it and leaves it unread."""
    build(tiny_policy, tmp_path, rows, max_steps=2).train()
    for value, first in (("true", 2), (str(tmp_path / "checkpoint-1"), 1)):
        again = build(tiny_policy, tmp_path, rows, max_steps=3, resume_from_checkpoint=value)
        steps = []
        again.add_callback(OnStep(lambda state, steps=steps: steps.append(state.global_step)))
        again.train()
        assert steps == list(range(first + 1, 4))


class OnStep(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_step_end(self, args, state, control, **kwargs):
        self.seen(state)


class OnBegin(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "per_device_train_batch_size": 2,
        },
        {"num_iterations": 2},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 2},
        {"logging_steps": 2, "num_iterations": 2},
    ],
    ids=lambda options: (
        "-".join(f"{name}{value}" for name, value in options.items())[:60] or "plain"
    ),
)
def test_from_every_checkpoint(tiny_policy, rows, tmp_path, options):
    """At the end of an epoch and within one, at the edge of a block of rollouts and inside: bit for
    bit the same.
    """
    whole = build(tiny_policy, tmp_path / "whole", rows, **options)
    whole.train()
    assert whole.state.epoch > 1.1 and len({entry["loss"] for entry in log_of(whole, 0)}) > 1
    for step in (1, 3, 4):
        again = build(
            tiny_policy, tmp_path / f"from{step}", rows, **{**options, "save_strategy": "no"}
        )
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        expected = log_of(whole, step)
        assert log_of(again, step) == expected and expected
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, again.model.state_dict()[name])


class Counts:
    """An environment whose replies depend on how often it was asked before."""

    def __init__(self):
        self.asked = 0

    async def step(self, rollout):
        self.asked += 1
        return Observation(text="Nairobi " * (1 + self.asked % 4))

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_the_environments_state_is_kept(tiny_policy, rows, tmp_path):
    whole, again = (
        build(tiny_policy, tmp_path / name, rows, Counts()) for name in ("whole", "again")
    )
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert log_of(again, 3) == log_of(whole, 3)
    assert again.environment.asked == whole.environment.asked > 6


def test_going_on_after_training_stopped_in_the_middle_of_a_step(tiny_policy, rows, tmp_path):
    """The environment dies at the second of two generations of one step: resumed, the step is done
    as a whole, on the same rows and with the same rollouts. (Not to the last bit: the order of
    micro-batches is drawn anew.)
    """

    class Dies:
        def __init__(self, after):
            self.left, self.oracle = after, LLMEnvironment(Oracle())

        async def step(self, rollout):
            self.left -= 1
            if self.left < 0:
                raise Misconfigured("gone")
            return await self.oracle.step(rollout)

    options = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
        "max_steps": 3,
        "save_strategy": "no",
        "entropy_coef": 0.1,
    }
    whole = build(tiny_policy, tmp_path / "whole", rows, **options)
    asked = [0]
    step = whole.environment.step
    whole.environment.step = lambda rollout: asked.__setitem__(0, asked[0] + 1) or step(rollout)
    whole.train()
    stopped = build(
        tiny_policy, tmp_path / "stopped", rows, Dies(asked[0] // 3 + asked[0] // 6 + 1), **options
    )
    with pytest.raises(TrainingStopped, match=r"stopped at step 1: .*gone"):
        stopped.train()
    assert stopped._step == 3, "in the middle of the second step"
    again = build(tiny_policy, tmp_path / "stopped", rows, **options)
    again.train(resume_from_checkpoint=True)
    for name in ("reward", "rollout/agent_tokens", "environment/calls"):
        assert [entry[name] for entry in log_of(again, 1)] == [
            entry[name] for entry in log_of(whole, 1)
        ]
    losses = [[entry["loss"] for entry in log_of(trainer, 1)] for trainer in (again, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and abs(losses[1][0]) > 1e-3


def folders(path):
    return sorted(
        entry for entry in os.listdir(path) if "checkpoint" in entry or entry.startswith(".")
    )


@pytest.mark.parametrize("moment", ["_exact_state", "_save_rng_state", "_save"])
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
    """`save_total_limit` with `load_best_model_at_end`: the last and the best stay, under their own
    names.
    """
    trainer = build(
        tiny_policy,
        tmp_path,
        rows,
        save_total_limit=1,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=4,
        metric_for_best_model="seen",
        greater_is_better=True,
        options={"eval_dataset": rows},
    )
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
    assert not any(
        torch.equal(kept[1][name], kept[3][name]) for name in kept[0] if "q_proj" in name
    )


REFUSED = r"holds another run: continue it \(resume_from_checkpoint=True\), move it aside \(overwrite=True\), or use"


def test_a_second_run_in_a_folder_is_refused_in_a_line(tiny_policy, rows, tmp_path):
    """The rollouts of both would be those of one run: 128 a step instead of 64."""
    first = build(tiny_policy, tmp_path, rows, max_steps=1)
    first.train()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for again in (first, build(tiny_policy, tmp_path, rows, max_steps=1)):
        with pytest.raises(ValueError, match=REFUSED) as refused:
            again.train()
        assert "\n" not in str(refused.value)
    assert kept == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 1


def test_overwrite_keeps_the_old_run_beside_the_new_one(tiny_policy, rows, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "replies.sqlite").write_text("paid for")
    for seed, resume in ((1, None), (2, None), (3, "false")):  # as a command line gives it
        options = {"max_steps": 1, "overwrite": True, "resume_from_checkpoint": resume}
        trainer = build(tiny_policy, folder, rows, seed=seed, **options)
        trainer.train()
    for name, seed in (("run.previous", 1), ("run.previous-2", 2), ("run", 3)):
        assert folders(tmp_path / name) == ["checkpoint-1"]
        assert (
            torch.load(
                tmp_path / name / "checkpoint-1" / "training_args.bin", weights_only=False
            ).seed
            == seed
        )
        assert len(list(read_rollouts(tmp_path / name / "rollouts"))) == 4
    assert (folder / "replies.sqlite").read_text() == "paid for"
    with pytest.raises(ValueError, match="overwrite.*checkpoint-1.*model"):
        build(folder / "checkpoint-1", folder, rows, overwrite=True)
    assert folders(folder) == ["checkpoint-1"]


def test_evaluating_first_is_no_second_run(tiny_policy, rows, tmp_path, caplog):
    trainer = trainer_for(tiny_policy, tmp_path, rows, max_steps=1)
    trainer.evaluate(rows.select(range(2)))
    trainer.train()
    assert trainer.state.global_step == 1
    assert "another run" not in caplog.text
    # The second start of such a script is warned before its evaluation has been played.
    again = trainer_for(tiny_policy, tmp_path, rows, max_steps=1)
    again._generate_and_score_completions = lambda rows: pytest.fail(caplog.text)
    with pytest.raises(pytest.fail.Exception, match=REFUSED):
        again.evaluate(rows.select(range(2)))


def test_without_our_file_it_goes_on_and_says_so(tiny_policy, rows, tmp_path, caplog):
    """From weights and optimizer. Another number of processes is in test_distributed.py."""
    build(tiny_policy, tmp_path, rows, num_iterations=2, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "exact_resume_0.pt").unlink()
    again = build(tiny_policy, tmp_path, rows, num_iterations=2, max_steps=5, save_strategy="no")
    with caplog.at_level(logging.WARNING, logger="agentic_prompting"):
        again.train(resume_from_checkpoint=True)
    assert "not exactly the uninterrupted one" in caplog.text and again.state.global_step == 5


# --- at the end -----------------------------------------------------------------------------------


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same_weights(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_same_command_after_the_last_step_trains_nothing(tiny_policy, rows, tmp_path):
    """In the middle of an epoch, where transformers would take one step more; and a shorter run
    than the one saved.
    """
    whole = build(tiny_policy, tmp_path, rows, max_steps=3)
    whole.train()
    saved = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob("*")
        if path.is_file() and "check" in str(path)
    }
    for steps in (3, 2):
        again = build(tiny_policy, tmp_path, rows, max_steps=steps)
        again.policy = None  # nobody is asked
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 3 and same_weights(weights_of(whole), weights_of(again))
    assert saved == {path: path.stat().st_mtime_ns for path in saved}, (
        "nor is any checkpoint written anew"
    )
    more = build(tiny_policy, tmp_path, rows, max_steps=4)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 4, "a longer run goes on"


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_longer_run_learns_from_its_first_step(tiny_policy, rows, tmp_path, caplog, scheduler):
    """The optimizer of the checkpoint has the rate 0, with which its schedule ended."""
    options = {"lr_scheduler_type": scheduler, "learning_rate": 1e-3, "logging_steps": 1}
    whole = build(tiny_policy, tmp_path / "whole", rows, max_steps=4, **options)
    whole.train()
    expected = [entry["learning_rate"] for entry in log_of(whole, 0)]
    finished = build(tiny_policy, tmp_path / "run", rows, max_steps=2, **options)
    finished.train()
    assert "follows the new schedule" not in caplog.text

    longer = build(tiny_policy, tmp_path / "run", rows, max_steps=4, **options)
    before = []
    after = []
    longer.add_callback(OnBegin(lambda: before.append(weights_of(longer))))
    longer.add_callback(OnStep(lambda state: after.append(weights_of(longer))))
    longer.train(resume_from_checkpoint=True)
    assert [entry["learning_rate"] for entry in log_of(longer, 2)] == expected[2:]
    assert not same_weights(before[0], after[0])
    assert caplog.text.count("max_steps 2 -> 4") == 1


def test_an_unchanged_resume_names_no_schedule(tiny_policy, rows, tmp_path, caplog):
    build(tiny_policy, tmp_path, rows, max_steps=3).train()
    for folder in ("checkpoint-3", "checkpoint-2"):
        again = build(tiny_policy, tmp_path, rows, max_steps=3)
        again.train(resume_from_checkpoint=str(tmp_path / folder))
    assert "schedule" not in caplog.text


def test_rotation_goes_by_steps_whatever_the_clock_said(tiny_policy, rows, tmp_path):
    """Checkpoints from a node whose clock is ahead, or copied later: the newest is the one with the
    most steps.
    """
    build(tiny_policy, tmp_path, rows, max_steps=2).train()
    for step in (1, 2):
        os.utime(tmp_path / f"checkpoint-{step}", (4e9 + 100 * step, 4e9 + 100 * step))
    again = build(tiny_policy, tmp_path, rows, max_steps=4, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    assert folders(tmp_path) == ["checkpoint-3", "checkpoint-4"]


# --- what is damaged ------------------------------------------------------------------------------


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, cut)
            for name in (
                "model.safetensors",
                "optimizer.pt",
                "exact_resume_0.pt",
                "trainer_state.json",
            )
        ),
        *(
            (name, Path.unlink)
            for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
        ),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_whole_one_before_it(
    tiny_policy, rows, tmp_path, caplog, name, damage
):
    whole = build(tiny_policy, tmp_path, rows, max_steps=3)
    whole.train()
    damage(tmp_path / "checkpoint-3" / name)
    again = build(tiny_policy, tmp_path, rows, max_steps=3)
    with caplog.at_level(logging.WARNING, logger="agentic_prompting"):
        again.train(resume_from_checkpoint=True)
    assert name in caplog.text and "checkpoint-3" in caplog.text and "checkpoint-2" in caplog.text
    assert [entry["step"] for entry in log_of(again, 2)] == [3]
    assert same_weights(weights_of(whole), weights_of(again))
    assert not find_damage(tmp_path / "checkpoint-3"), "and is replaced by a whole one"


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error_that_names_the_file(
    tiny_policy, rows, tmp_path
):
    build(tiny_policy, tmp_path, rows, max_steps=1).train()
    again = build(tiny_policy, tmp_path, rows)
    for name in ("trainer_state.json", "exact_resume_0.pt", "optimizer.pt", "model.safetensors"):
        path = tmp_path / "checkpoint-1" / name
        whole = path.read_bytes()
        cut(path)
        for checkpoint, what_to_do in (
            (str(path.parent), "resume from an earlier"),
            (True, "move them away"),
        ):
            with pytest.raises(
                ValueError, match=f"checkpoint-1.*{name} cannot be read.*{what_to_do}"
            ) as raised:
                again.train(resume_from_checkpoint=checkpoint)
            assert "\n" not in str(raised.value) and "miniz" not in str(raised.value)
        path.write_bytes(whole)


def test_weights_alone_can_be_gone_on_from(tiny_policy, rows, tmp_path, caplog):
    """Where no optimizer was to be saved none is missed; it is said."""
    build(tiny_policy, tmp_path, rows, max_steps=1, save_only_model=True).train()
    again = build(tiny_policy, tmp_path, rows, max_steps=2, save_strategy="no")
    with caplog.at_level(logging.WARNING, logger="agentic_prompting"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and "not exactly the uninterrupted one" in caplog.text


def test_one_run_at_a_time_in_a_folder(tiny_policy, rows, tmp_path):
    """The second is refused before it touches anything; a lock that a killed run left behind is no
    hindrance.
    """
    (tmp_path / "training.lock").write_text("left behind")
    first, second = (build(tiny_policy, tmp_path, rows, max_steps=1) for _ in range(2))

    class Meanwhile(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            with pytest.raises(
                ValueError, match="another run.*" + re.escape(str(tmp_path))
            ) as raised:
                second.train()
            assert "\n" not in str(raised.value)
            self.tried = True

    meanwhile = Meanwhile()
    first.add_callback(meanwhile)
    first.train()
    assert meanwhile.tried and second.state.global_step == 0
    with pytest.raises(ValueError, match=REFUSED):
        second.train()
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 1, "free again"


def test_a_state_that_no_checkpoint_could_be_read_with_is_an_error_at_the_start(
    tiny_policy, rows, tmp_path
):
    """Every checkpoint would be written, and refused by each resume."""

    class Keeps(Oracle):
        def state_dict(self):
            return {"seen": np.arange(3)}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    environment = Keeps()
    environment.step = lambda rollout: Observation("Kenya")
    with pytest.raises(ValueError, match=r"state_dict\(\).*environment"):
        build(tiny_policy, tmp_path, rows, environment).train()
    assert not list(tmp_path.iterdir())
