"""Groups that are carried over to later steps: who is waited for, what is learnt from, what a
killed run finds again.

Several processes are in test_distributed.py.
"""

import asyncio
import shutil
import threading
from collections import Counter

import pytest
import torch
from filelock import FileLock
from transformers import TrainerCallback

from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment
from agentic_prompting.llm import ScriptedChat, Usage
from agentic_prompting.rollout import BatchEngine, Rollout, Sample, Turn
from agentic_prompting.trainers import TrainingStopped
from agentic_prompting.trainers.async_rollouts import AsyncSource, InFlightFile
from benchmarks.speed import async_training
from support.asking import Asks, Counts, Policy
from support.espl_training import Reference
from support.training import LEAD, arguments, trainer_for, vars_for


class OnStep(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        self.act(state.global_step)


@pytest.fixture
def steps(monkeypatch):
    """The groups that each step used."""
    seen = []
    take = AsyncSource.take_groups

    def watched(self, wanted, place):
        seen.append(take(self, wanted, place))
        return seen[-1]

    monkeypatch.setattr(AsyncSource, "take_groups", watched)
    return seen


def build(policy, folder, rows, environment=None, **changes):
    trainer = trainer_for(
        policy,
        folder,
        rows,
        environment=environment or Counts(),
        **{**LEAD, "max_steps": 4, **changes},
    )
    trainer.policy = BatchEngine(Asks(trainer), on_callers_thread=True)
    return trainer


def log_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


# --- who is waited for ----------------------------------------------------------------------------


def test_a_step_does_not_wait_for_a_straggler(tiny_policy, rows, tmp_path, steps):
    """A reply that comes only when two steps have passed: it holds up nobody before its group is
    due, and is used.
    """
    free = threading.Event()

    class Slow(Counts):
        first = None

        async def step(self, rollout):
            self.first = self.first or rollout.seed
            if rollout.seed == self.first:
                await asyncio.to_thread(free.wait, 60)
            return await super().step(rollout)

    trainer = build(tiny_policy, tmp_path, rows, Slow())
    trainer.add_callback(OnStep(lambda step: step == 2 and free.set()))
    trainer.train()
    numbers = [group.number for groups in steps for group in groups]
    assert sorted(numbers) == list(range(8)), "every group once, none is dropped"
    assert numbers.index(0) >= 4 and all(len(groups) == 2 for groups in steps)
    assert max(group.used_at - group.started_at for groups in steps for group in groups) == 2
    logged = log_of(trainer)
    assert [entry["async/groups_in_flight"] for entry in logged] == [2, 2, 2, 0], (
        "the last steps start nothing new"
    )
    assert logged[0]["async/token_age"] == 0
    assert max(entry["async/token_age_max"] for entry in logged) == 2
    assert all(
        0 <= entry[f"async/{who}_idle"] <= 1 for entry in logged for who in ("trainer", "policy")
    )


def test_no_group_is_older_than_the_limit_when_it_is_used(tiny_policy, rows, tmp_path, steps):
    """Two steps' worth of slow groups of the same age: a step can use half of them, so one has to
    begin earlier.
    """
    free = threading.Event()

    class Slow(Counts):
        async def step(self, rollout):
            if rollout.group < 4:
                await asyncio.to_thread(free.wait, 2)
            return await super().step(rollout)

    trainer = build(tiny_policy, tmp_path, rows, Slow(), async_lead=2, max_staleness=2, max_steps=5)
    trainer.add_callback(OnStep(lambda step: step == 2 and free.set()))
    trainer.train()
    ages = [group.used_at - group.started_at for groups in steps for group in groups]
    assert len(ages) == 10 and max(ages) == 2


def test_rows_come_in_the_order_in_which_trl_deals_them_out(tiny_policy, rows, tmp_path, steps):
    """Over two epochs and a half, of a data set that does not fill its last batch."""
    seen = {}
    for lead in (0, 1):
        trainer = build(
            tiny_policy, tmp_path / str(lead), rows.select(range(5)), async_lead=lead, max_steps=5
        )
        questions = []
        generate = trainer._generate_and_score_completions

        def watched(inputs, questions=questions, generate=generate):
            questions += [row["question"] for row in inputs]
            return generate(inputs)

        trainer._generate_and_score_completions = watched
        trainer.train()
        seen[lead] = questions
    played = sorted((group for groups in steps for group in groups), key=lambda group: group.number)
    assert [rollout.row["question"] for group in played for rollout in group.rollouts] == seen[0]


def test_replies_are_shared_by_the_groups_of_one_step_only(tiny_policy, rows, tmp_path, steps):
    """All ask the same.

    A step's worth of groups, whenever they are played, shares one reply; others get their own.
    """
    chat = ScriptedChat(["Nairobi"])
    trainer = build(tiny_policy, tmp_path, rows, LLMEnvironment(chat, share_replies="step"))
    trainer.train()
    batches = [
        {rollout.batch for rollout in group.rollouts} for groups in steps for group in groups
    ]
    numbers = [group.number for groups in steps for group in groups]
    by_step = {number // 2: batch for number, (batch,) in zip(numbers, batches, strict=True)}
    assert len(set(by_step.values())) == 4 == len(chat.calls)


def test_replies_are_shared_however_many_steps_are_played_ahead():
    """Episodes of three steps and their stragglers take turns; each step's request is sent once."""
    chat = ScriptedChat(["Nairobi"])
    environment = LLMEnvironment(chat, share_replies="step")

    async def ask():
        for _ in range(2):
            for batch in range(5):
                rollout = Rollout([1], batch=f"0.lead.{batch}")
                rollout.add_turn(Sample([1]), Turn("", "act", True, request="which country ?"))
                await environment.step(rollout)

    asyncio.run(ask())
    assert len(chat.calls) == 5


def test_evaluation_is_on_the_weights_at_hand(tiny_policy, rows, tmp_path):
    trainer = build(
        tiny_policy,
        tmp_path,
        rows,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        options={"eval_dataset": rows},
    )
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluated) == 2 and not [name for name in evaluated[0] if "async" in name]


# --- what is learnt from --------------------------------------------------------------------------


@pytest.mark.parametrize("clip_max", [3.0, 0.01])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_the_loss_is_corrected_by_what_the_sampler_said(
    tiny_policy, rows, tmp_path, mode, clip_max
):
    """TRL's ratio, bounded, without vLLM: of the agent's tokens now and when they were sampled."""
    ratio = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": clip_max}
    trainer = build(tiny_policy, tmp_path, rows, max_steps=2, **ratio)
    batches = []
    generate = trainer._generate_and_score_completions
    losses = []
    clipped = []

    def watched(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = watched
    trainer.train()
    for batch in batches:
        mask = batch["completion_mask"] * batch["tool_mask"]
        diff = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask
        assert torch.all(batch["sampling_per_token_logps"][mask.bool()] == -0.5)
        whole = (diff if mode.startswith("token") else diff.sum(1, keepdim=True)).exp()
        expected = whole.clamp(max=clip_max)
        assert torch.allclose(batch["importance_sampling_ratio"], expected) and expected.min() < 0.5
        counted = whole[mask.bool()] if mode.startswith("token") else whole[:, 0]
        clipped.append((counted > clip_max).double().mean().item())
    for entry, share in zip(log_of(trainer), clipped, strict=True):
        assert entry["async/clipped"] == pytest.approx(share) and (share == 0 or clip_max < 1)
        least, mean, most = (
            entry[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")
        )
        assert 0 <= least <= mean <= most <= clip_max
    assert any(clipped) == (clip_max < 1 and mode.startswith("token"))
    assert trainer.use_vllm is False
    batch = {name: value[:2] if value.dim() else value for name, value in batches[-1].items()}
    batch["advantages"] = torch.ones(2)
    for factor in (1.0, 0.0):  # the loss reads it
        ratio = torch.full_like(batch["importance_sampling_ratio"], factor)
        losses.append(
            trainer._compute_loss(trainer.model, {**batch, "importance_sampling_ratio": ratio})
        )
    assert abs(losses[0]) > 1e-4 and losses[1] == 0


def test_updates_that_share_a_batch_are_clipped_as_ppo_does(tiny_policy, rows, tmp_path):
    """The second of two, against the weights of the first: what the ratio of the sampler says is
    another matter.
    """
    reward = {
        "reward_funcs": lambda rollout, **columns: [float(i % 2) for i, _ in enumerate(rollout)]
    }
    two = {
        "num_iterations": 2,
        "max_steps": 4,
        "max_staleness": 4,
        "epsilon": 1e-6,
        "options": reward,
    }
    trainer = build(tiny_policy, tmp_path, rows, **two)
    trainer.train()
    shares = [entry["clip_ratio/region_mean"] for entry in log_of(trainer)]
    assert shares[0] == shares[2] == 0 and min(shares[1], shares[3]) > 0


def test_uncorrected_is_uncorrected(tiny_policy, rows, tmp_path, monkeypatch):
    """What benchmarks/speed/async_training.py compares with: the same loss, as if each ratio were
    1.
    """
    trainer = build(tiny_policy, tmp_path, rows, max_steps=1)
    kept = []
    compute = trainer._compute_loss
    monkeypatch.setattr(
        trainer,
        "_compute_loss",
        lambda model, inputs: kept.append(inputs) or compute(model, inputs),
    )
    trainer.train()
    inputs = {**kept[0], "advantages": torch.ones(4)}
    as_if = compute(
        trainer.model,
        {**inputs, "importance_sampling_ratio": torch.ones(inputs["tool_mask"].shape)},
    )
    with_ratio = compute(trainer.model, inputs)
    monkeypatch.undo()
    async_training.uncorrect(trainer)
    assert trainer._compute_loss(trainer.model, inputs) == as_if and abs(with_ratio - as_if) > 1e-3


def test_each_token_knows_how_many_updates_were_before_it(tiny_policy, rows, tmp_path, steps):
    """A turn of the engine in this process that the update comes in between: some tokens of each."""
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        environment=Counts(),
        **{**LEAD, "max_steps": 3, "stop_at_tags": False},
    )
    trainer.train()
    turns = [
        turn
        for groups in steps
        for group in groups
        for log in group.episode_logs
        for turn in log.turns
    ]
    assert all(len(turn["updates"]) == len(turn["ids"]) == len(turn["logprobs"]) for turn in turns)
    assert all(turn["updates"] == sorted(turn["updates"]) for turn in turns)
    assert trainer.policy.updates == 2


def test_tokens_sampled_during_an_evaluation_are_of_the_weights_at_hand(
    tiny_policy, rows, tmp_path
):
    """Groups in flight share the engine with it."""
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        environment=Counts(),
        options={"eval_dataset": rows.select(range(4))},
        **{**LEAD, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1},
    )
    seen = set()
    step = trainer.policy.step

    def watched(arrived):
        seen.add((trainer.state.global_step, trainer.policy.updates))
        step(arrived)

    trainer.policy.step = watched
    trainer.train()
    assert seen == {(0, 0), (1, 1), (2, 2), (3, 3)}


def test_turns_under_which_the_weights_changed_are_logged(tiny_policy, rows, tmp_path):
    """One that is asked for in the first step and given when two updates have been."""
    trainer = build(tiny_policy, tmp_path, rows)
    policy = Policy(trainer.chat_format)
    free = threading.Event()
    slow = []

    async def sampled(request):
        if not slow:
            slow.append(request)
            await asyncio.to_thread(free.wait, 60)
        return await policy(request)

    trainer.policy = sampled
    trainer.add_callback(OnStep(lambda step: step == 2 and free.set()))
    trainer.train()
    ages = [entry["async/turn_age"] for entry in log_of(trainer)]
    assert ages[:2] == [0, 0] and ages[2] > 0 and ages[3] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vllm_importance_sampling_correction": False},
            "async_lead > 0 trains on samples of older weights",
        ),
        ({"max_staleness": 0}, "max_staleness=0 is too low"),
        ({"async_lead": -1}, "async_lead must be at least 0"),
        ({"full_determinism": True}, "async_lead > 0 is incompatible with full_determinism=True"),
        (
            {"use_transformers_continuous_batching": True},
            "incompatible with use_transformers_continuous_batching",
        ),
        (
            {"use_vllm": True, "vllm_mode": "colocate"},
            "async_lead > 0 is incompatible with vllm_mode='colocate'",
        ),
    ],
)
def test_settings_that_cannot_go_with_lead(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        arguments(tmp_path, **{"async_lead": 1, **changes})
    assert "\n" not in str(raised.value)


def test_each_process_needs_whole_groups(tiny_policy, rows, tmp_path):
    trainer = build(
        tiny_policy,
        tmp_path,
        rows,
        num_generations=4,
        per_device_train_batch_size=2,
        steps_per_generation=2,
    )
    trainer.args.per_device_train_batch_size = 1  # as with two processes
    with pytest.raises(ValueError, match="per_device_train_batch_size.*multiple of 4"):
        trainer.train()


def test_defaults_of_lead(tmp_path):
    args = arguments(tmp_path, async_lead=1.5)
    assert args.max_staleness == 3 and args.vllm_importance_sampling_mode == "token_truncate"
    assert arguments(tmp_path).vllm_importance_sampling_mode == "sequence_mask", (
        "TRL's, where nothing is carried over"
    )


def test_a_policy_without_log_probabilities_is_an_error(tiny_policy, rows, tmp_path):
    trainer = build(tiny_policy, tmp_path, rows)
    trainer.policy = BatchEngine(
        lambda requests: [Sample([5]) for _ in requests], on_callers_thread=True
    )
    with pytest.raises(ValueError, match="async_lead.*log-probability"):
        trainer.train()


# --- failures and other lives ---------------------------------------------------------------------


class Killed(BaseException):
    pass


class Draws(Counts):
    """Draws something for each group when an episode begins, as a pool of workers does."""

    repeatable_reset = True

    def reset(self, row):
        return {**row, "drawn": row["reset_seed"] % 1000}


@pytest.mark.parametrize("kind", [Counts, Draws])
@pytest.mark.parametrize("moment", [1, 5, 9, 14])
def test_a_killed_run_pays_for_nothing_twice_and_loses_nothing(
    tiny_policy, rows, tmp_path, steps, moment, kind
):
    """Killed while replies come in, before, at and after checkpoints: what was paid is on the
    tapes, and is used.
    """
    paid = Counter()

    def run(kill_at=None, resume=False):
        environment = kind()
        environment.paid = paid
        trainer = build(
            tiny_policy,
            tmp_path,
            rows,
            environment,
            max_steps=5,
            save_strategy="steps",
            save_steps=2,
        )
        policy = trainer.policy.sampler

        def killed(requests):
            if kill_at is not None and sum(paid.values()) >= kill_at:
                raise Killed
            return policy(requests)

        trainer.policy.sampler = killed
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with pytest.raises(Killed):
        run(kill_at=moment)
    del steps[:]
    trainer = run(resume=True)
    assert trainer.state.global_step == 5
    assert set(paid.values()) == {1}, "nothing is paid for twice"
    used = [rollout for groups in steps for group in groups for rollout in group.rollouts]
    assert all(rollout.done for rollout in used)
    assert {seed for seed, _ in paid} >= {rollout.seed for rollout in used}
    rollout = steps[-1][-1].rollouts[-1]
    assert rollout.replies[0].usage == Usage(3, 1, 0.5) and rollout.observations[0].seconds == 0.25
    if kind is Draws:
        drawn = [
            {one.row["drawn"] for one in group.rollouts} for groups in steps for group in groups
        ]
        assert all(len(values) == 1 for values in drawn), "a group shares its seed"
        assert len({max(values) for values in drawn}) > 1


def test_only_whole_checkpoints_release_entries(tiny_policy, rows, tmp_path, monkeypatch):
    """Entries that an unfinished checkpoint does not need may be needed by the one before it."""
    moments = []
    delete = InFlightFile.delete_groups_before

    def watched(self, number):
        moments.append((number, (tmp_path / "checkpoint-2").exists()))
        delete(self, number)

    monkeypatch.setattr(InFlightFile, "delete_groups_before", watched)
    trainer = build(tiny_policy, tmp_path, rows, save_strategy="steps", save_steps=2)
    states = []

    def act(step):
        path = tmp_path / "in_flight" / "00000.jsonl"
        before = path.read_bytes()
        states.append(trainer.batch_source.state_dict())
        assert path.read_bytes() == before, "a look at the state changes no file"

    trainer.add_callback(OnStep(act))
    trainer.train()
    assert [whole for _, whole in moments] == [True, True]
    assert moments[0][0] == 0 < moments[1][0], "the checkpoint before can still be resumed"
    oldest = min(group["group"] for group in states[1]["groups"])
    assert moments[1][0] == oldest


def test_a_fresh_run_takes_nothing_from_an_earlier_one(tiny_policy, rows, tmp_path):
    first = Counts()
    second = Counts()
    build(tiny_policy, tmp_path, rows, first, max_steps=2).train()
    shutil.rmtree(tmp_path / "rollouts")  # with which a second run would be refused
    build(tiny_policy, tmp_path, rows, second, max_steps=2).train()
    assert first.paid == second.paid


def test_a_failed_rollout_leaves_its_group_whole(tiny_policy, rows, tmp_path, steps):
    class Fails(Counts):
        async def step(self, rollout):
            if len(self.paid) % 3 == 0:
                self.paid[rollout.seed, len(rollout.turns)] += 1
                raise RuntimeError("down")
            return await super().step(rollout)

    trainer = build(tiny_policy, tmp_path, rows, Fails(), max_failed_share=1.0)
    trainer.train()
    assert all(len(group.rollouts) == 2 for groups in steps for group in groups)
    assert 0 < sum(entry["rollout/failed"] for entry in log_of(trainer)) < 4


def test_a_failed_reset_fails_its_own_rollout(tiny_policy, rows, tmp_path, steps):
    """And not the run, whose rewards get the columns of all rows: groups begin one by one and are
    scored together.
    """

    class Breaks(Counts):
        begun = 0

        async def reset(self, row):
            self.begun += 1
            if self.begun == 2:
                raise RuntimeError("no place is free")
            return {**row, "place": self.begun} if self.begun > 4 else row

    trainer = build(tiny_policy, tmp_path, rows, Breaks(), max_failed_share=1.0)
    trainer.train()
    assert trainer.state.global_step == 4
    assert [entry["rollout/failed"] for entry in log_of(trainer)] == [0.25, 0, 0, 0]


def test_the_episodes_of_a_step_begin_at_once(tiny_policy, rows, tmp_path, steps):
    """As without a lead; one group after another would multiply the seconds of a `reset` by the
    groups of a step.
    """
    at_once = Counter()
    most = []

    class Slow(Counts):
        async def reset(self, row):
            at_once["now"] += 1
            most.append(at_once["now"])
            await asyncio.sleep(0.05)
            at_once["now"] -= 1
            return row

    build(tiny_policy, tmp_path, rows, Slow(), max_steps=2).train()
    assert max(most) == 8, "two groups of two, and as many ahead"


def test_a_stopped_run_takes_the_replies_under_way_along(tiny_policy, rows, tmp_path):
    """Training stops while others still wait for their replies: those are written down before it
    ends.
    """
    environment = Counts()
    trainer = build(
        tiny_policy, tmp_path, rows, environment, max_failed_share=0.0, failure_window=1
    )
    step = environment.step

    async def some_late(rollout):
        observation = await step(rollout)
        if len(environment.paid) > 4:
            await asyncio.sleep(0.2)
            return observation
        raise RuntimeError("down")

    environment.step = some_late
    with pytest.raises(TrainingStopped):
        trainer.train()
    environment.step = step
    again = build(tiny_policy, tmp_path, rows, environment)
    again.train(resume_from_checkpoint=True)
    late = [count for place, count in list(environment.paid.items())[4:]]
    assert set(late) == {1}


# --- E-SPL ----------------------------------------------------------------------------------------


def test_a_group_is_rated_under_the_prompts_it_was_played_under(
    tiny_policy, rows, tmp_path, steps, monkeypatch
):
    """With the batch that uses it; groups of one batch that were played under other prompts are
    other matches.
    """
    args = {
        **vars_for(tmp_path),
        **LEAD,
        "prompts_per_step": 2,
        "per_device_train_batch_size": 8,
        "evolution_lag": 0,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "p_crossover": 0.0,
        "selection": "uniform",
    }

    def by_seed(rollout, **columns):
        return [float(episode.seed % 2) for episode in rollout]

    trainer = ESPLTrainer(
        model=str(tiny_policy),
        reward_funcs=by_seed,
        reference=Reference(),
        args=ESPLConfig(**args),
        train_dataset=rows,
        initial_prompt="Answer .\n[G0]. Ask first .",
        environment=Counts(),
        prompt_template="question : {question}",
    )
    trainer.policy = BatchEngine(Asks(trainer), on_callers_thread=True)
    rated = []
    record = trainer.population.record

    def watched(prompts, scores):
        rated.append(([prompt.id for prompt in prompts], [len(row) for row in scores]))
        return record(prompts, scores)

    monkeypatch.setattr(trainer.population, "record", watched)
    trainer.train()
    played = Counter()
    for group in (group for groups in steps for group in groups):
        names = [note["system_prompt"] for note in group.metadata]
        assert names == [names[0]] * 2 + [names[2]] * 2
        for name, rollout in zip(names, group.rollouts, strict=True):
            assert (
                rollout.row["prompt"][0]["content"] == trainer.population.members[name].prompt.text
            )
        played[names[0], names[2]] += 1
    matches = Counter()
    for names, problems in rated:
        assert problems[0] == problems[1]
        matches[tuple(names)] += problems[0]
    assert matches == played and len(played) > 1


# --- other runs and other settings in the same folder ---------------------------------------------


def files_of(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "training.lock"
    }


def killed_at(policy, folder, rows, moment, environment, **changes):
    """A run that is killed once so many replies were paid."""
    trainer = build(policy, folder, rows, environment, **changes)
    sample = trainer.policy.sampler

    def killed(requests):
        if sum(environment.paid.values()) >= moment:
            raise Killed
        return sample(requests)

    trainer.policy.sampler = killed
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.parametrize("resume", [False, True])
def test_a_refused_second_start_changes_no_file(tiny_policy, rows, tmp_path, resume):
    """Beside a run that has groups in flight and no checkpoint yet, whose lock stands for it here."""
    killed_at(tiny_policy, tmp_path, rows, 5, Counts())
    before = files_of(tmp_path)
    assert any("in_flight" in str(name) for name in before)
    with (
        FileLock(tmp_path / "training.lock"),
        pytest.raises(ValueError, match="another run is training"),
    ):
        build(tiny_policy, tmp_path, rows).train(resume_from_checkpoint=resume)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_generations": 4}, "num_generations"),
        ({"seed": 7}, "seed"),
        ({"max_turns": 2}, "limits"),
        ({"max_turn_tokens": 23}, "limits"),
        ({"temperature": 0.5}, "sampling"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"per_device_train_batch_size": 8}, "generation_batch_size"),
    ],
)
def test_groups_in_flight_of_other_settings_are_played_anew(
    tiny_policy, rows, tmp_path, steps, caplog, changes, named
):
    """Not learnt from in silence, and the resume is not blocked: one line, which counts them."""
    killed_at(tiny_policy, tmp_path, rows, 5, Counts())
    del steps[:]
    again = build(tiny_policy, tmp_path, rows, Counts(), **changes)
    again.train(resume_from_checkpoint=True)
    size = changes.get("num_generations", 2)
    assert all(len(group.rollouts) == size for groups in steps for group in groups)
    warnings = [line for line in caplog.messages if "groups in flight are not used" in line]
    assert len(warnings) == 1 and f"differs in {named}" in warnings[0]


def test_turns_of_other_weights_are_not_learnt_from(tiny_policy, rows, tmp_path, caplog):
    """Killed before its first checkpoint, resumed with another model in its place."""
    killed_at(tiny_policy, tmp_path, rows, 5, Counts())
    environment = Counts()
    again = build(tiny_policy, tmp_path, rows, environment)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.mul_(1.5)
    again.train(resume_from_checkpoint=True)
    assert len(environment.paid) == 16, "four steps of two groups of two, each paid anew"
    assert any("differs in the weights that the run began with" in line for line in caplog.messages)


def test_a_checkpoint_of_other_settings_drops_what_it_held(
    tiny_policy, rows, tmp_path, steps, caplog
):
    build(
        tiny_policy, tmp_path, rows, Counts(), max_steps=2, save_strategy="steps", save_steps=1
    ).train()
    del steps[:]
    again = build(tiny_policy, tmp_path, rows, Counts(), num_generations=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert all(len(group.rollouts) == 4 for groups in steps for group in groups)
    assert sum("groups in flight are not used" in line for line in caplog.messages) == 1
