"""Groups that are carried over to later steps: who is waited for, what is learnt from, what a killed run finds again.

Several processes are in test_distributed.py.
"""

import asyncio
import threading
from collections import Counter

from transformers import TrainerCallback

from agentic_prompting.rollout import BatchEngine, Observation, Sample
from agentic_prompting.trainers.carry_over import CarryOver
from test_trainer import trainer_for

LEAD = {"lead": 1, "max_staleness": 2, "num_generations": 2, "per_device_train_batch_size": 4, "max_turn_tokens": 8}


class Asks:
    """Asks once, then answers; log-probabilities as a policy of one token would give them."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self, requests):
        return [self.sample(request) for request in requests]

    def sample(self, request):
        chat_format = self.trainer.chat_format
        asked = "<interaction_response>" in chat_format.tokenizer.decode(request.context)
        act = "<answer> yen </answer>" if asked else "<interaction_prompt> which country ? </interaction_prompt>"
        ids = chat_format.turn_ids(f"<think> {'yen ' * (1 + request.seed % 2)}</think> {act}")
        return Sample(ids, [-0.5] * len(ids))


class Counts:
    """Answers at once; counts which turn of which rollout it was asked about."""

    def __init__(self):
        self.asked = Counter()

    async def step(self, rollout):
        self.asked[rollout.seed, len(rollout.turns)] += 1
        return Observation("Nairobi")


def build(policy, folder, rows, environment=None, **changes):
    trainer = trainer_for(
        policy, folder, rows, environment=environment or Counts(), **{**LEAD, "max_steps": 4, **changes}
    )
    trainer.policy = BatchEngine(Asks(trainer), lent=True)
    return trainer


class OnStep(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        self.act(state.global_step)


def used(trainer):
    """Keeps the groups that each step used: (step, number, born)."""
    seen, take = [], CarryOver.take

    def watched(self, wanted):
        groups = take(self, wanted)
        seen.append([(self.updates, group.number, group.born) for group in groups])
        return groups

    trainer.watched = watched
    return seen, watched


def test_a_step_does_not_wait_for_a_straggler(tiny_policy, rows, tmp_path, monkeypatch):
    """A reply that comes only when two steps have passed: it holds up nobody before its group is due, and is used."""
    free = threading.Event()

    class Slow(Counts):
        first = None

        async def step(self, rollout):
            self.first = self.first or rollout.seed
            if rollout.seed == self.first:
                await asyncio.to_thread(free.wait, 60)
            return await super().step(rollout)

    trainer = build(tiny_policy, tmp_path, rows, Slow())
    seen, watched = used(trainer)
    monkeypatch.setattr(CarryOver, "take", watched)
    trainer.add_callback(OnStep(lambda step: step == 2 and free.set()))
    trainer.train()
    numbers = [number for step in seen for _, number, _ in step]
    assert sorted(numbers) == list(range(8)), "every group once, none is dropped"
    assert numbers.index(0) >= 4 and all(len(step) == 2 for step in seen)
    assert max(step - born for groups in seen for step, _, born in groups) == 2
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["async/groups_in_flight"] for entry in logged] == [2, 2, 2, 0], "the last steps start nothing new"
    assert logged[0]["async/token_age"] == 0 and max(entry["async/token_age_max"] for entry in logged) == 2
