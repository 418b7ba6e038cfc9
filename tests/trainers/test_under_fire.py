"""Training while the environment fails: what must not move, what must stop, what must come back the
same.
"""

import json
import logging

import pytest
import torch

from agentic_prompting import LLMEnvironment, OpenAIChat, ReplayCache
from agentic_prompting.llm import Budget, BudgetExceeded, ScriptedChat, start
from agentic_prompting.refine import ProRefiner, RefinedChat
from agentic_prompting.rewards import AccuracyJudge
from agentic_prompting.rollout import BatchEngine, read_rollouts
from agentic_prompting.trainers import TrainingStopped
from support import espl_training, killed_runs
from support.failing_runs import Flaky, same, watched_run
from support.misbehaving import FAULTS, Fault, MisbehavingServer, at_random
from support.training import Acts, trainer_for

# --- failed is not wrong --------------------------------------------------------------------------

HEAVY = {"weight_decay": 0.5, "beta": 0.05, "max_steps": 4, "lr_scheduler_type": "linear"}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "adafactor"])
def test_a_step_of_failures_alone_changes_nothing(tiny_policy, rows, tmp_path, optimizer, scaled):
    """Steps 1 and 4 learn, 2 and 3 fail whole: no decay, no momentum of step 1, no KL term; the
    schedule goes on.
    """
    options = {"optim": optimizer, **({"optim_args": "momentum=0.9"} if optimizer == "sgd" else {})}
    trainer, watch = watched_run(
        tiny_policy, tmp_path, rows, {1, 2}, scaled=scaled, **HEAVY, **options
    )
    assert trainer.state.global_step == 4
    first, second, third, fourth = watch.weights
    assert same(first, second) and same(second, third) and not same(third, fourth)
    assert watch.optimizer[0] == watch.optimizer[1] == watch.optimizer[2] != watch.optimizer[3]
    assert watch.rates == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.0])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rollout/failed"] for entry in logged] == [0, 1, 1, 0] and logged[1]["loss"] == 0
    assert all(entry["step_time"] > 0 for entry in logged)


def test_without_the_guard_decay_and_momentum_would_move_weights(
    tiny_policy, rows, tmp_path, monkeypatch
):
    """That the test above can fail: zero gradients are not enough."""
    monkeypatch.setattr(
        "agentic_prompting.trainers.checkpointing.resumable_trainer.ResumableGRPOTrainer._is_empty",
        lambda *_: False,
    )
    _, watch = watched_run(tiny_policy, tmp_path, rows, {1}, **{**HEAVY, "max_steps": 2})
    assert not same(*watch.weights)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_with_accumulation_an_empty_part_leaves_the_rest(
    tiny_policy, rows, tmp_path, failing, scaled
):
    """Two generations to an optimizer step: it moves the weights unless both failed."""
    _, watch = watched_run(
        tiny_policy,
        tmp_path,
        rows,
        failing,
        max_steps=2,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        weight_decay=0.5,
        scaled=scaled,
    )
    before = trainer_for(tiny_policy, tmp_path, rows).model.state_dict()
    assert same(before, watch.weights[0]) == (failing == {0, 1})


def test_a_failed_rollout_has_no_token_in_the_loss(tiny_policy, rows, tmp_path):
    """An advantage of zero would leave it the KL term."""
    chat = ScriptedChat(lambda messages: "the answer is Kenya .", fail_on=lambda n: n % 2 == 1)
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, beta=0.05)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.model.train()
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    )
    assert (batch["tool_mask"] * batch["completion_mask"]).sum(1).bool().tolist() == [
        True,
        False,
        True,
        False,
    ]


def test_it_stops_once_says_why_and_goes_on_where_it_was(tiny_policy, rows, tmp_path):
    chat = Flaky()

    def build():
        trainer = trainer_for(
            tiny_policy, tmp_path, rows, chat, failure_window=2, max_steps=3, save_strategy="steps"
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        return trainer

    chat.down = True
    trainer = build()
    with pytest.raises(
        TrainingStopped, match="step 1.*100%.*ServerFailed.*resume_from_checkpoint=True"
    ):
        trainer.train()
    chat.down = False
    resumed = build()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3 and resumed.state.log_history[-2]["rollout/failed"] == 0


def test_an_environment_that_has_recovered_does_not_end_the_run(tiny_policy, rows, tmp_path):
    """Down for two batches, and up again when the window of three is full."""
    trainer, _ = watched_run(tiny_policy, tmp_path, rows, {0, 1}, max_steps=4, max_failed_share=0.5)
    assert trainer.state.global_step == 4


def test_evaluation_alone_promises_no_checkpoint(tiny_policy, rows, tmp_path):
    chat = Flaky()
    chat.down = True
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, chat, failure_window=1, options={"eval_dataset": rows}
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with pytest.raises(TrainingStopped, match=r"Spent so far: nothing\.$"):
        trainer.evaluate()
    assert not list(tmp_path.glob("checkpoint-*"))


# --- money ----------------------------------------------------------------------------------------


def test_a_spent_budget_stops_training_with_a_checkpoint_and_the_bill(tiny_policy, rows, tmp_path):
    """15 tokens a call, 4 calls a step: 100 tokens are reached in the second step.

    More money, and it goes on.
    """
    with MisbehavingServer(say=lambda request: "the answer is Kenya .") as server:

        def run(budget, **resume):
            with OpenAIChat("m", server.base_url, price=(1e6, 1e6), max_concurrency=1) as chat:
                trainer = trainer_for(
                    tiny_policy, tmp_path, rows, chat, budget_tokens=budget, max_steps=3
                )
                trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
                trainer.train(**resume)
                return trainer

        with pytest.raises(TrainingStopped, match="step 1.*BudgetExceeded.*105.*100 tokens") as it:
            run(100)
        assert "Spent so far: environment $105.0000 (105 tokens)" in str(it.value)
        assert (tmp_path / "checkpoint-1").exists()
        request_count = len(server.requests)
        with pytest.raises(BudgetExceeded, match="105.*100 tokens"):
            run(100, resume_from_checkpoint=True)  # found out before the model is loaded
        assert len(server.requests) == request_count, "a restart does not get the budget again"
        assert run(10_000, resume_from_checkpoint=True).state.global_step == 3
    assert Budget(path=tmp_path / "spending.sqlite").spent().tokens == 15 * len(server.requests)


def test_the_budget_of_a_refining_environment_is_that_of_its_roles(tiny_policy, rows, tmp_path):
    """The verifier alone costs anything; when it may not ask any more, training stops instead of
    refining nothing.
    """
    free = ScriptedChat(lambda messages: "the answer is Kenya .")
    with (
        MisbehavingServer(say=lambda request: "<ACCURACY>1</ACCURACY>") as server,
        OpenAIChat("m", server.base_url, price=(1e6, 1e6), max_concurrency=1) as verifier,
    ):
        refined = RefinedChat(ProRefiner(free, free, free, verifier))
        trainer = trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            refined,
            budget_tokens=100,
            max_steps=9,
            check_environment=False,
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        with pytest.raises(TrainingStopped, match="BudgetExceeded.*105.*100 tokens") as it:
            trainer.train()
    assert "Spent so far: environment/verifier $105.0000 (105 tokens)" in str(it.value)
    assert len(server.requests) == 7 and list(tmp_path.glob("checkpoint-*"))


class Judged:
    """A reward that asks a language model, which has no say where it does not answer."""

    __name__ = "judged"

    def __init__(self, chat):
        self.judge = AccuracyJudge(chat)
        self.charge_to = self.judge.charge_to

    def __call__(self, rollout, answers, **kwargs):
        pairs = zip(rollout, answers, strict=True)
        futures = [
            start(self.judge(one.row["question"], one.answer or "", golds)) for one, golds in pairs
        ]
        return [future.result() for future in futures]


def test_what_a_judge_spends_is_the_jobs(tiny_policy, rows, tmp_path):
    free = ScriptedChat(lambda messages: "the answer is Kenya .")
    with (
        MisbehavingServer(say=lambda request: "<ACCURACY>1</ACCURACY>") as server,
        OpenAIChat("m", server.base_url, price=(1e6, 1e6), max_concurrency=1) as chat,
    ):
        options = {"reward_funcs": Judged(chat)}
        trainer = trainer_for(
            tiny_policy, tmp_path, rows, free, options=options, budget_tokens=100, max_steps=9
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        with pytest.raises(TrainingStopped, match="105.*100 tokens") as it:
            trainer.train()
    assert "Spent so far: judge $105.0000 (105 tokens)" in str(it.value)
    assert len(server.requests) == 7 and list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("role", ["environment", "environment/verifier", "judge", "reference"])
def test_no_role_exceeds_the_budget_by_more_than_a_call_per_connection(
    tiny_policy, rows, tmp_path, role
):
    """15 tokens a call, three connections: 100 tokens are reached with the seventh, two more may be
    on their way.
    """
    free = ScriptedChat(lambda messages: "the answer is Kenya .")
    reflects = lambda request: espl_training.Reference()._say(request["messages"])  # noqa: E731
    says = {"reference": reflects, "environment": lambda request: "the answer is Kenya ."}
    with (
        MisbehavingServer(
            say=says.get(role, lambda request: "<ACCURACY>1</ACCURACY>"), latency=0.02
        ) as server,
        OpenAIChat("m", server.base_url, price=(1e6, 1e6), max_concurrency=3) as chat,
    ):
        limits = {"budget_tokens": 100, "max_steps": 9}
        if role == "reference":
            trainer = espl_training.trainer_for(
                tiny_policy, tmp_path, rows, chat, evolution_lag=0, **limits
            )
        else:
            asked = {"environment": chat, "judge": free, "environment/verifier": None}[role]
            asked = asked or RefinedChat(ProRefiner(free, free, free, chat))
            options = {"reward_funcs": Judged(chat)} if role == "judge" else {}
            trainer = trainer_for(
                tiny_policy,
                tmp_path,
                rows,
                asked,
                options=options,
                check_environment=False,
                **limits,
            )
            trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        with pytest.raises(TrainingStopped, match=rf"Spent so far: {role} \$"):
            trainer.train()
        assert 7 <= len(server.requests) <= 7 + 2 and list(tmp_path.glob("checkpoint-*"))
        assert trainer.spending.spent().tokens == 15 * len(server.requests)


# --- record and replay ----------------------------------------------------------------------------


def untimed(folder):
    """What was recorded of all rollouts, without times, costs and where replies came from."""
    kept = []
    for record in read_rollouts(folder / "rollouts"):
        for name in ("run", "cost_usd"):
            del record[name]
        for observation in record["observations"]:
            del observation["seconds"], observation["cached"]
        kept.append(record)
    return kept


def test_a_recorded_run_replays_bit_for_bit_without_the_server(asking_policy, rows, tmp_path):
    """Recorded under random delays and faults, replayed with the server gone: same trajectories,
    losses and weights.
    """

    def run(folder, url, mode):
        cache = ReplayCache(tmp_path / "replies.sqlite", mode)
        with OpenAIChat("m", url, cache=cache) as chat:
            trainer = trainer_for(
                asking_policy,
                folder,
                rows,
                chat,
                max_steps=3,
                full_determinism=True,
                beta=0.01,
                check_environment=False,
            )
            trainer.train()
        losses = [
            (e["loss"], e["grad_norm"], e["reward"])
            for e in trainer.state.log_history
            if "loss" in e
        ]
        return losses, untimed(folder), trainer.model.state_dict()

    quick = [
        "429 retry-after in seconds",
        "502 as a web page",
        "reset in the body",
        "content null",
        "malformed JSON",
    ]
    try:
        with MisbehavingServer(
            at_random(0.3, 0, quick), latency=0.01, say=killed_runs.oracle()
        ) as server:
            losses, kept, weights = run(tmp_path / "recorded", server.base_url, "record")
            assert len(server.requests) > 12 and sum(server.met.values()) > server.met[None]
        again, kept_again, weights_again = run(tmp_path / "replayed", server.base_url, "replay")
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(record["observations"] for record in kept)
    assert again == losses and kept_again == kept and same(weights, weights_again)


# --- kill -9 --------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_no_reply_is_paid_twice(asking_policy, tmp_path):
    """One kill at a random moment; ten in `benchmarks/reliability/faults.py`."""
    outcome = killed_runs.killed_and_resumed(asking_policy, tmp_path, kills=1, steps=4)
    assert outcome["tried"] == outcome["resumed"] == 1, outcome
    assert (outcome["paid_twice"], outcome["paid_in_vain"]) == (0, 0), outcome
    assert outcome["same_losses"] and outcome["same_weights"]


# --- secrets --------------------------------------------------------------------------------------

KEY = "sk-planted-0123456789abcdef"


def test_a_planted_key_is_in_nothing_that_a_run_leaves_behind(
    tiny_policy, rows, tmp_path, caplog, capfd, monkeypatch
):
    """Checkpoints, cache, trajectories, the model card, logs at their most talkative, errors and
    what is printed.
    """
    says_it = Fault(
        lambda x: x.fail(500, f"your key {KEY}, Bearer {KEY}, is tired"), "ServerFailed"
    )
    monkeypatch.setitem(FAULTS, "quotes the key", says_it)
    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)
    monkeypatch.setattr("agentic_prompting.llm.circuit_breaker._MAX_PAUSE", 0.05)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    cache = ReplayCache(tmp_path / "replies.sqlite")
    with (
        MisbehavingServer(
            lambda number, request: "quotes the key" if number > 8 else None
        ) as server,
        OpenAIChat("m", server.base_url, cache=cache) as chat,
        caplog.at_level(logging.DEBUG),
    ):
        environment = LLMEnvironment(chat)
        trainer = trainer_for(
            tiny_policy,
            tmp_path / "run",
            rows,
            environment=environment,
            failure_window=1,
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        with pytest.raises(TrainingStopped) as stopped:
            trainer.train()
        trainer.save_model(str(tmp_path / "run"))
        trainer.create_model_card()
        shown = f"{stopped.value} {chat!r} {environment!r} {vars(environment)} {trainer.args!r}"
    printed = capfd.readouterr()
    cache.close()
    assert server.authorizations == {f"Bearer {KEY}"}, "it was sent"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = {path.name for path in left}
    assert {
        "README.md",
        "training_args.bin",
        "trainer_state.json",
        "replies.sqlite",
        "agentic_prompting.json",
    } <= kinds
    assert any("rollouts-" in name for name in kinds)
    for path in left:
        assert KEY.encode() not in path.read_bytes(), path
    kept = json.dumps(list(read_rollouts(tmp_path / "run" / "rollouts")))
    assert "is tired" in kept, "the error was recorded, without the key"
    for text in (kept, shown, caplog.text, printed.out, printed.err):
        assert KEY not in text
