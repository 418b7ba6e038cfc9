"""`sampling/logp_difference`: how far the sampler's log-probabilities are from the trainer's,
logged while training.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.trainers.batch_monitor import LOGP_BOUND, logp_difference
from agentic_prompting.trainers.patches import compute_importance_ratio
from support.asking import Asks, Counts
from support.training import Acts, one_batch, trainer_for

MEAN = "sampling/logp_difference/mean"
MAX = "sampling/logp_difference/max"
TRLS = "sampling/sampling_logp_difference/mean"


def build(policy, folder, rows, **changes):
    chat = ScriptedChat(["the answer is Swahili ."] * 100)
    return trainer_for(
        policy, folder, rows, chat, **{"max_steps": 3, "temperature": 1.5, **changes}
    )


def log_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def shift(trainer, by):
    """Make the policy report log-probabilities that are off; `None`: none for every second turn."""

    class Shifted(type(trainer.policy)):
        async def __call__(self, request):
            sample = await super().__call__(request)
            self.calls = getattr(self, "calls", 0) + 1
            known = by is not None or self.calls % 2
            return replace(
                sample,
                logprobs=[logprob + (by or 0.0) for logprob in sample.logprobs] if known else None,
            )

    trainer.policy.__class__ = Shifted


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_step_logs_it_and_it_is_rounding(
    asking_policy, rows, tmp_path, caplog, precision, accumulate
):
    """Of the agent's tokens alone: the trainer has no log-probabilities of observations, the
    sampler no others.
    """
    trainer = build(
        asking_policy,
        tmp_path,
        rows,
        bf16=precision == "bf16",
        gradient_accumulation_steps=accumulate,
        per_device_train_batch_size=4 // accumulate,
        eval_strategy="steps",
        eval_steps=1,
        options={"eval_dataset": rows.select(range(2))},
    )
    trainer.train()
    entries = log_of(trainer)
    assert len(entries) == 3 and all("rollout/observation_tokens" in entry for entry in entries)
    largest = {"float32": 1e-4, "bf16": 0.15}[precision]
    assert all(0 < entry[MEAN] <= entry[MAX] < largest for entry in entries)
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluated) == 3
    assert not any("logp_difference" in name for entry in evaluated for name in entry)
    assert "log-probabilities" not in caplog.text


def test_a_sampler_that_is_wrong_is_warned_of_once(asking_policy, rows, tmp_path, caplog):
    trainer = build(asking_policy, tmp_path, rows)
    shift(trainer, 2 * LOGP_BOUND)
    trainer.train()
    assert all(entry[MEAN] == pytest.approx(2 * LOGP_BOUND, abs=1e-4) for entry in log_of(trainer))
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "log-probabilities" in record.getMessage()
    ]
    assert len(warnings) == 1 and f"{2 * LOGP_BOUND:.2g}" in warnings[0]


def test_tokens_without_log_probabilities_do_not_count(asking_policy, rows, tmp_path):
    trainer = build(asking_policy, tmp_path, rows)
    shift(trainer, None)
    trainer.train()
    largest = [entry[MAX] for entry in log_of(trainer) if MAX in entry]
    assert largest and max(largest) < 1e-4, "no NaN, and no 0 in the place of what is not known"


def test_a_policy_without_log_probabilities_logs_nothing(tiny_policy, rows, tmp_path):
    trainer = build(tiny_policy, tmp_path, rows)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert len(log_of(trainer)) == 3 and not any(MEAN in entry for entry in log_of(trainer))


def test_only_updates_by_the_weights_that_sampled_count(asking_policy, rows, tmp_path):
    """The second update on a batch compares other weights."""
    trainer = build(
        asking_policy, tmp_path, rows, num_iterations=2, max_steps=4, learning_rate=1e-2
    )
    trainer.train()
    assert [MEAN in entry for entry in log_of(trainer)] == [True, False, True, False]
    assert all(entry.get(MAX, 0) < 1e-4 for entry in log_of(trainer))


def test_a_batch_played_ahead_has_trls_name_for_it(tiny_policy, rows, tmp_path, caplog):
    """Older weights sampled it: TRL's ratio corrects for that, and TRL's metric includes it."""
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, environment=Counts(), async_lead=1, max_staleness=2
    )
    trainer.policy = BatchEngine(Asks(trainer), on_callers_thread=True)
    trainer.train()
    assert len(log_of(trainer)) == 2 and all(entry[TRLS] > LOGP_BOUND for entry in log_of(trainer))
    assert not any(MEAN in entry for entry in log_of(trainer))
    assert "log-probabilities" not in caplog.text


def test_where_trl_logs_it_ours_only_warns(tiny_policy, rows, tmp_path, caplog):
    """As with vLLM: TRL computes the trainer's log-probabilities before the update, for its ratio."""
    trainer = build(tiny_policy, tmp_path, rows)
    trainer._last_loaded_step = 0
    with compute_importance_ratio(trainer):
        one_batch(trainer, Asks)
    assert trainer._metrics["train"][TRLS][0] > LOGP_BOUND and "log-probabilities" in caplog.text
    assert not trainer._metrics["train"][MEAN]


@pytest.mark.parametrize(
    "elsewhere", [[0.0, 0.0, 0.0], [3.0, 6.0, 1.0]], ids=["a rank without tokens", "two ranks"]
)
def test_all_processes_count(elsewhere):
    """Every process takes part, whether it has tokens or not."""
    theirs = torch.tensor([elsewhere])
    accelerator = SimpleNamespace(gather=lambda values: torch.cat([values, theirs.to(values)]))
    batch = {
        "completion_mask": torch.tensor([[1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1]]),
        "sampler_logps": torch.tensor([[-1.0, -9.0, math.nan, -9.0]]),
    }
    metrics = logp_difference(torch.tensor([[-1.5, -2.0, -3.0, -4.0]]), batch, accelerator)
    total, tokens, largest = elsewhere
    assert metrics == {MEAN: (0.5 + total) / (1 + tokens), MAX: max(0.5, largest)}
    batch["tool_mask"] = torch.zeros(1, 4)
    metrics = logp_difference(torch.zeros(1, 4), batch, accelerator)
    assert metrics == ({MEAN: total / tokens, MAX: largest} if tokens else {})


def test_numbers_that_are_no_numbers_show():
    """Of the trainer: only what the sampler does not know is left out."""
    batch = {name: torch.ones(1, 1) for name in ("completion_mask", "tool_mask", "sampler_logps")}
    metrics = logp_difference(
        torch.tensor([[math.nan]]), batch, SimpleNamespace(gather=lambda values: values)
    )
    assert math.isnan(metrics[MEAN])
