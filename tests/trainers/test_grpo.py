"""The trainer on a tiny model: what reaches the loss, what is logged and kept, and what stops it."""

import inspect
import json
import logging
import os
import shutil
import signal
import sqlite3
from functools import partial
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

from agentic_prompting import (
    ESPLConfig,
    LLMEnvironment,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    PromptAgent,
    PromptR1Config,
    PromptR1Reward,
    PromptR1Trainer,
)
from agentic_prompting.llm import Misconfigured, ScriptedChat, ServerFailed
from agentic_prompting.rollout import (
    SPEC_FILE,
    AgentSpec,
    BatchEngine,
    ChatFormat,
    Sample,
    TagGrammar,
    read_rollouts,
    rollout_from_trace,
)
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.trainers import TrainingStopped, one_line_progress, warm_start
from agentic_prompting.trainers.resolve_spec import drop_unused_template
from support.training import END, Acts, arguments, one_batch, trainer_for, vars_for


def test_weights_move_and_everything_is_kept(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items()
    )

    logged = trainer.state.log_history[0]
    assert logged["rollout/turns"] == 2 and logged["rollout/interactions"] == 1
    assert logged["rollout/answered"] == 1 and logged["rollout/failed"] == 0
    assert logged["environment/calls"] == 4 and logged["environment/latency_p95"] >= 0
    assert logged["exact_match"] == 0.5 and logged["format_reward"] == 1.0
    expected = {
        "rollout/out_of_turns",
        "rollout/truncated",
        "rollout/malformed",
        "rollout/observation_tokens",
        "f1",
        "answer_reward",
        "environment/retries",
        "environment/latency_mean",
        "environment/tokens",
        "environment/cost_usd",
        "environment/cached",
    }
    assert expected <= set(logged)

    records = list(read_rollouts(tmp_path / "rollouts"))
    assert len(records) == 8 and {record["step"] for record in records} == {0, 1}
    assert {record["rewards"]["prompt_r1_reward"] for record in records} == {0.0, 1.0}
    assert records[0]["observations"][0]["text"] and records[0]["question"]

    spec = AgentSpec.load(tmp_path)
    assert spec == trainer.spec
    assert spec.limits.max_turns == 3
    assert spec.prompt_template == SANDBOX_TEMPLATE
    agent = PromptAgent.from_pretrained(tmp_path, LLMEnvironment(Oracle()))
    rollout = agent.answer(rows[0]["question"])
    assert rollout.done and rollout.turns
    # Asked in exactly the form of training.
    assert rollout.prompt_ids == trainer.chat_format.prompt_ids(
        trainer.prompts.render_messages(rows[0], {})
    )


def test_the_time_of_a_step_has_its_rollouts_in_it(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows, Oracle(latency=0.3))
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert all(entry["step_time"] > 0.3 for entry in trainer.state.log_history if "loss" in entry)


def test_observation_tokens_get_no_gradient(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows, beta=0.01)
    batch = one_batch(trainer)
    observed = (batch["tool_mask"] == 0) & (batch["completion_mask"] == 1)
    is_scored = (batch["tool_mask"] == 1) & (batch["completion_mask"] == 1)
    assert observed.any() and is_scored.any() and (batch["advantages"] != 0).any()

    logps = torch.randn(batch["completion_ids"].shape) - 3
    batch["old_per_token_logps"] = logps + 0.1 * torch.randn(logps.shape)
    batch.pop(
        "sampled_at"
    )  # these weights did not sample the batch: nothing to compare with the sampler

    def loss_of(values):
        leaf = values.clone().requires_grad_(True)
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (
            leaf,
            torch.zeros_like(leaf),
            None,
        )
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        return loss.item(), leaf.grad

    loss, gradient = loss_of(logps)
    assert (gradient[observed] == 0).all()
    assert (gradient[is_scored] != 0).any()
    perturbed = torch.where(observed, logps + torch.randn(logps.shape) * 5, logps)
    perturbed_loss, perturbed_gradient = loss_of(perturbed)
    assert perturbed_loss == loss and torch.equal(perturbed_gradient, gradient)


def test_loss_is_the_papers(tiny_policy, rows, tmp_path):
    """eq 14-15 in NumPy on a real batch: clipped ratio, k3 KL, mean over a trajectory's own tokens,
    then over trajectories.
    """
    trainer = trainer_for(tiny_policy, tmp_path, rows, beta=0.01, epsilon=0.2)
    batch = one_batch(trainer)
    rng = np.random.default_rng(0)
    shape = batch["completion_ids"].shape
    new = rng.normal(-2, 0.5, shape)
    old = new + rng.normal(0, 0.3, shape)
    reference = new + rng.normal(0, 0.3, shape)
    batch["old_per_token_logps"] = torch.tensor(old)
    batch["ref_per_token_logps"] = torch.tensor(reference)
    batch.pop("sampled_at")  # as above
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (
        torch.tensor(new),
        torch.zeros(shape),
        None,
    )
    loss = trainer._compute_loss(trainer.model, batch).item()

    rewards = np.array([1.0, 0.0, 1.0, 0.0]).reshape(
        2, 2
    )  # what `Acts` earns: right, wrong, right, wrong
    # TRL divides by the sample standard deviation (n - 1) plus 1e-4; the paper's eq 14 has 1/M
    # inside. See fidelity.
    advantages = (
        (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    ).ravel()
    assert np.allclose(batch["advantages"].numpy(), advantages, atol=1e-6)
    mask = (batch["completion_mask"] * batch["tool_mask"]).numpy()
    ratio = np.exp(new - old)
    objective = np.minimum(
        ratio * advantages[:, None], np.clip(ratio, 0.8, 1.2) * advantages[:, None]
    )
    kl = np.exp(reference - new) - (reference - new) - 1
    per_trajectory = ((objective - 0.01 * kl) * mask).sum(1) / mask.sum(1)
    assert loss == pytest.approx(-per_trajectory.mean(), abs=1e-6)


def test_a_turn_stopped_at_its_tag_is_not_truncated(tiny_policy, rows, tmp_path):
    """TRL knows truncation by a missing end token.

    A turn stopped at its closing tag has none of its own: it gets one, outside of the loss, and
    `mask_truncated_completions` does not wipe out the batch.
    """

    class Stops(Acts):
        def _turn(self, request):
            return Sample(super()._turn(request).ids[:-1])

    trainer = trainer_for(tiny_policy, tmp_path, rows, mask_truncated_completions=True)
    one_batch(trainer)
    trainer.policy = BatchEngine(Stops(trainer), on_callers_thread=True)
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    )
    assert trainer._metrics["train"]["completions/clipped_ratio"][-1] == 0
    assert (batch["completion_ids"][:, -1] == trainer.eos_token_ids[0]).all()
    assert (batch["tool_mask"][:, -1] == 0).all()
    assert batch["tool_mask"].sum() == 4 * (19 - 2)


def test_failed_rollouts_have_no_reward(tiny_policy, rows, tmp_path):
    """Half of the calls fail: those rollouts are left out of the baseline and get no advantage."""
    chat = ScriptedChat(lambda messages: "the answer is Kenya .", fail_on=lambda n: n % 2 == 1)
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, max_failed_share=1.0)
    batch = one_batch(trainer)
    records = list(read_rollouts(tmp_path / "rollouts"))
    failed = [record["status"] == "failed" for record in records]
    assert failed == [False, True, False, True]
    assert [record["rewards"]["prompt_r1_reward"] for record in records][1::2] == [None, None]
    assert (batch["advantages"][torch.tensor(failed)] == 0).all()
    assert trainer._metrics["train"]["rollout/failed"] == [0.5]


def test_a_users_reward_cannot_score_a_failed_rollout(tiny_policy, rows, tmp_path):
    chat = ScriptedChat(lambda messages: "x", fail_on=lambda n: n == 0)

    def always_one(rollout, **kwargs):
        return [1.0] * len(rollout)

    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        chat,
        options={"reward_funcs": always_one},
        max_failed_share=1.0,
    )
    one_batch(trainer)
    rewards = [record["rewards"]["always_one"] for record in read_rollouts(tmp_path / "rollouts")]
    assert rewards == [None, 1.0, 1.0, 1.0]


def test_a_dead_environment_stops_training_with_a_checkpoint(tiny_policy, rows, tmp_path):
    chat = ScriptedChat([ServerFailed("the endpoint is down", "here", status=503)])
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, failure_window=2, max_steps=5)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with pytest.raises(TrainingStopped, match="step 1.*100%.*HTTP 503"):
        trainer.train()
    assert os.path.exists(tmp_path / "checkpoint-1" / "agentic_prompting.json")
    assert all(
        torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items()
    )


def test_a_hopeless_error_stops_at_once(tiny_policy, rows, tmp_path):
    chat = ScriptedChat([Misconfigured("the key was rejected: set OPENAI_API_KEY", status=401)])
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, failure_window=100)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with pytest.raises(TrainingStopped, match="Misconfigured: the key was rejected"):
        trainer.train()


def test_a_book_that_cannot_be_read_costs_no_checkpoint(tiny_policy, rows, tmp_path):
    """Saved first; what was spent is said if it can be."""
    chat = ScriptedChat([Misconfigured("the key was rejected", status=401)])
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, max_steps=5)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)

    def unreadable():
        raise sqlite3.DatabaseError("database disk image is malformed")

    trainer.spending.by_account = unreadable
    with pytest.raises(
        TrainingStopped,
        match="key was rejected.*spending.*unknown.*malformed.*checkpoint is in",
    ) as raised:
        trainer.train()
    assert "\n" not in str(raised.value) and (tmp_path / "checkpoint-0" / "optimizer.pt").exists()


def test_a_checkpoint_that_cannot_be_saved_is_said_with_the_reason_to_stop(
    tiny_policy, rows, tmp_path
):
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, ScriptedChat([Misconfigured("the key was rejected")])
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    trainer._save_optimizer_and_scheduler = full
    with pytest.raises(TrainingStopped, match="key was rejected.*no checkpoint.*No space left"):
        trainer.train()


def test_a_full_disk_costs_records_but_not_the_run(tiny_policy, rows, tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file in the place of the folder")
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.state.global_step == 2 and caplog.text.count("rollouts cannot be written") == 1


def test_records_say_the_reward_that_was_trained_on(tiny_policy, rows, tmp_path):
    """The weighted total, of what has a reward; that of each function as well."""

    def first(rollout, **kwargs):
        return [-1.0, None, 3.0, None]

    def second(rollout, **kwargs):
        return [2.0, 4.0, None, None]

    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={"reward_funcs": [first, second]},
        reward_weights=[1.0, 0.5],
    )
    one_batch(trainer)
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert [record["reward"] for record in records] == [0.0, 2.0, 3.0, None]
    assert records[1]["rewards"] == {"first": None, "second": 4.0}


def test_lora_and_evaluation(tiny_policy, rows, tmp_path):
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={
            "eval_dataset": rows,
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        },
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=1,
        log_completions=True,
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    evaluated = next(entry for entry in trainer.state.log_history if "eval_reward" in entry)
    assert evaluated["eval_rollout/turns"] == 2 and evaluated["eval_exact_match"] == 0.5
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    agent = PromptAgent.from_pretrained(tmp_path / "adapter", LLMEnvironment(Oracle()))
    assert agent.answer(rows[0]["question"]).done


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo"},
        {"importance_sampling_level": "sequence"},
        {"scale_rewards": "batch"},
        {"num_iterations": 2, "beta": 0.0},
        {
            "steps_per_generation": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_trls_own_options_still_work(tiny_policy, rows, tmp_path, options):
    """Everything that GRPOTrainer takes: one run of each with conversations, weights move."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, **options)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items()
    )


def test_evaluation_repeats_itself(tiny_policy, rows, tmp_path):
    """Evaluation has its own seeds: twice the same, and training afterwards is not disturbed by it."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"eval_dataset": rows})
    first = trainer.evaluate()
    second = trainer.evaluate()
    for name in ("eval_reward", "eval_rollout/agent_tokens", "eval_completions/mean_length"):
        assert first[name] == second[name]


def test_an_evaluation_is_a_mean_over_rollouts(tiny_policy, rows, tmp_path):
    """Its last batch is smaller, and one of its rollouts has no reward."""
    eval_rows = rows.select(range(3))
    grades = dict(zip(eval_rows["question"], ([1.0, 1.0], [1.0, 0.0], [0.0, None]), strict=True))

    def graded(rollout, question, **kwargs):
        return [grades[text][place % 2] for place, text in enumerate(question)]

    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={"eval_dataset": eval_rows, "reward_funcs": graded},
        num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(3 / 5)
    assert metrics["eval_rewards/graded/mean"] == pytest.approx(3 / 5)


def test_evaluation_logs_pass_at_k(tiny_policy, rows, tmp_path):
    """By the first reward function; a rollout without a reward is no attempt."""
    eval_rows = rows.select(range(2))
    grades = {
        eval_rows[0]["question"]: [1.0, 0.0, 0.0, 1.0],
        eval_rows[1]["question"]: [0.0, None, 0.0, 1.0],
    }

    def graded(rollout, question, **kwargs):
        return [grades[one][place % 4] for place, one in enumerate(question)]

    def other(rollout, **kwargs):
        return [1.0] * len(rollout)

    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={"eval_dataset": eval_rows, "reward_funcs": [graded, other]},
        num_generations_eval=4,
        per_device_eval_batch_size=4,
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    metrics = trainer.evaluate()
    assert metrics["eval_pass@1"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert metrics["eval_pass@2"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert metrics["eval_pass@4"] == 1.0  # of the first question alone, which has four attempts


def test_same_seed_same_run(tiny_policy, rows, tmp_path):
    def losses(folder):
        trainer = trainer_for(tiny_policy, folder, rows)
        trainer.train()
        return [
            (e["loss"], e["grad_norm"], e["reward"])
            for e in trainer.state.log_history
            if "loss" in e
        ]

    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_rows_may_bring_their_own_prompt(tiny_policy, rows, tmp_path):
    """For other tasks than question answering: `prompt` is used as it is, and no column is required
    beside it.
    """
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "question : Kenya ?"}]}] * 4
    )
    trainer = MultiTurnGRPOTrainer(
        model=str(tiny_policy),
        environment=LLMEnvironment(Oracle()),
        reward_funcs=lambda rollout, **kwargs: [float(len(episode.turns)) for episode in rollout],
        args=MultiTurnGRPOConfig(**vars_for(tmp_path)),
        train_dataset=dataset,
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_rows_with_a_prompt_train_an_agent_without_instructions(tiny_policy, tmp_path):
    """The default template, which such a run never shows, is not saved with the agent."""
    model = shutil.copytree(tiny_policy, tmp_path / "model")
    (model / SPEC_FILE).unlink()
    prompt = [{"role": "user", "content": "which city ?"}]
    trainer = MultiTurnGRPOTrainer(
        model=str(model),
        environment=LLMEnvironment(Oracle()),
        reward_funcs=lambda rollout, **kwargs: [0.0 for _ in rollout],
        args=MultiTurnGRPOConfig(**vars_for(tmp_path / "run")),
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 4),
    )
    trainer.save_model(str(tmp_path / "saved"))
    saved = AgentSpec.load(tmp_path / "saved")
    assert saved.messages({"question": "which city ?"}) == prompt


@pytest.mark.parametrize(
    "row, template",
    [
        ({"question": "which city ?"}, "Answer: {question} Be brief."),
        ({"prompt": "Answer: which city ? Be brief."}, "Answer: {question} Be brief."),
        ({"prompt": "which city ?"}, "{question}"),
        ({"prompt": [{"role": "user", "content": "which city ?"}]}, "{question}"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "{question}"),
    ],
)
def test_a_template_that_training_never_used_is_not_saved(row, template):
    spec = AgentSpec("Answer: {question} Be brief.")
    assert drop_unused_template(spec, Dataset.from_list([row])).prompt_template == template


def test_an_unused_template_of_several_environments_is_not_saved():
    spec = AgentSpec(environments={"shop": {"prompt_template": "Buy {question}"}})
    rows = Dataset.from_list([{"prompt": "which lamp ?", "environment": "shop"}])
    saved = drop_unused_template(spec, rows)
    assert saved.messages({"question": "which lamp ?", "environment": "shop"}) == [
        {"role": "user", "content": "which lamp ?"}
    ]


# --- bad input: one line that says what to do, before any training step ---------------------------


def build(tiny_policy, tmp_path, dataset, **changes):
    options = {
        "prompt_template": SANDBOX_TEMPLATE,
        "environment": LLMEnvironment(Oracle()),
        **changes,
    }
    return PromptR1Trainer(
        model=str(tiny_policy), args=arguments(tmp_path), train_dataset=dataset, **options
    )


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_list([{"question": "a ?"}]), "answers"),
        (Dataset.from_list([{"text": "a ?", "answers": ["b"]}]), "question"),
        (Dataset.from_dict({"question": [], "answers": []}), "empty"),
        (Dataset.from_list([{"question": "a ?", "answers": []}]), "row 0"),
        (None, "train_dataset"),
    ],
)
def test_bad_datasets(tiny_policy, tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message) as raised:
        build(tiny_policy, tmp_path, dataset)
    assert "\n" not in str(raised.value)


def test_too_few_rows_for_a_step(tiny_policy, tmp_path, rows):
    """Said, with the number that would do; nothing is saved that looks like a trained model."""
    trainer = trainer_for(tiny_policy, tmp_path, rows.select(range(1)))
    with pytest.raises(ValueError, match=r"has 1 rows.* takes 2 \(2 of each row\)") as raised:
        trainer.train()
    assert "\n" not in str(raised.value)
    enough = trainer_for(tiny_policy, tmp_path, rows.select(range(2)), max_steps=1)
    enough.train()
    assert enough.state.global_step == 1


def test_template_without_question(tiny_policy, tmp_path, rows):
    with pytest.raises(ValueError, match=r"no \{question\}"):
        build(tiny_policy, tmp_path, rows, prompt_template="Answer me.")


def test_grammar_with_equal_tags():
    with pytest.raises(ValueError, match="must differ"):
        TagGrammar(think="say", act="say")


@pytest.mark.parametrize("name", ["max_turns", "max_turn_tokens", "max_completion_length"])
def test_limits_of_zero(tmp_path, name):
    with pytest.raises(ValueError, match="must be at least 1"):
        arguments(tmp_path, **{name: 0})


def test_shares_outside_their_range(tmp_path):
    with pytest.raises(ValueError, match="max_failed_share"):
        arguments(tmp_path, max_failed_share=1.5)
    with pytest.raises(ValueError, match="gate"):
        PromptR1Trainer("x", args=arguments(tmp_path, gate="loose"), environment=None)


def test_trls_own_loop_is_refused(tiny_policy, tmp_path, rows):
    with pytest.raises(ValueError, match="rollout_func"):
        build(tiny_policy, tmp_path, rows, rollout_func=print)


def test_environment_is_asked_before_training(tiny_policy, tmp_path, rows):
    class Wrong(ScriptedChat):
        def check(self):
            raise Misconfigured("no such model: gpt-5o; see the endpoint's /models", status=404)

    with pytest.raises(Misconfigured, match="no such model"):
        build(tiny_policy, tmp_path, rows, environment=LLMEnvironment(Wrong(["x"])))


def test_tokenizer_without_a_chat_template(tiny_policy, tmp_path, rows):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        build(tiny_policy, tmp_path, rows, processing_class=tokenizer)


def test_a_folder_that_is_no_agent(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match="was not saved by a trainer of this library"):
        PromptAgent.from_pretrained(tmp_path)


@pytest.fixture
def quiet_libraries():
    one_line_progress.hide_library_bars()
    yield
    for library in (datasets, huggingface_hub.utils):
        library.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()


def test_where_nobody_looks_on_there_are_no_bars_and_few_lines(
    tiny_policy, rows, tmp_path, capfd, quiet_libraries
):
    """Of the steps' lines the first, then one a minute, and the last; of a warm start, nothing
    before a minute.
    """
    spec = AgentSpec.load(tiny_policy)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    trace = {"question": "which country ?", "turns": [END.format("yen")], "observations": []}
    rollout = rollout_from_trace(trace, spec, ChatFormat(tokenizer))
    settings = {"use_cpu": True, "bf16": False, "max_steps": 2, "gradient_checkpointing": False}
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    warm_start(model, tokenizer, [rollout] * 8, tmp_path / "sft", **settings)
    trainer = trainer_for(tiny_policy, tmp_path, rows, max_steps=4, disable_tqdm=False)
    trainer.train()
    output = capfd.readouterr()
    steps = [line.partition(":")[0] for line in output.out.splitlines() if line.startswith("step ")]
    assert steps == ["step 1", "step 4"]
    assert "%|" not in output.out + output.err and "\r" not in output.out + output.err


def test_the_line_of_a_step_comes_at_most_once_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        one_line_progress,
        "PrintInterval",
        partial(one_line_progress.PrintInterval, clock=lambda: now[0]),
    )
    callback = one_line_progress.OneLineProgress()
    state = TrainerState(max_steps=10)
    callback.on_train_begin(None, state, None)
    for step in range(1, 11):
        now[0] += 25
        state.global_step = step
        callback.on_log(None, state, None, {"reward": step})
        if step == 6:
            callback.on_log(None, state, None, {"eval_reward": 0.5})
    callback.on_train_end(None, state, None)
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 1", "step 4", "evaluation at step 6", "step 7", "step 10"]


# --- what the constructor takes -------------------------------------------------------------------


def test_arguments_come_in_trls_order(tiny_policy, rows, tmp_path):
    """Model, rewards, arguments, data, tokenizer by place, everything of ours by keyword alone."""
    ours = {
        "environment",
        "tools",
        "environment_factory",
        "prompt_template",
        "system_prompt",
        "grammar",
    }
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters)
    for kind in (MultiTurnGRPOTrainer, PromptR1Trainer):
        parameters = inspect.signature(kind.__init__).parameters.values()
        by_place = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        assert by_place == theirs[: len(by_place)] and by_place[-1] == "processing_class"
        assert {item.name for item in parameters if item.kind is item.KEYWORD_ONLY} <= ours
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    reward = PromptR1Reward()
    trainer = PromptR1Trainer(
        str(tiny_policy),
        reward,
        arguments(tmp_path),
        rows,
        rows,
        tokenizer,
        environment=LLMEnvironment(Oracle()),
    )
    assert [item.__wrapped__ for item in trainer.reward_funcs] == [
        reward
    ]  # behind the guard of user code
    assert trainer.processing_class is tokenizer
    assert len(trainer.eval_dataset) == len(rows)


def test_a_gate_that_would_be_ignored_is_an_error(tiny_policy, rows, tmp_path):
    def right(rollout, **kwargs):
        return [1.0 for _ in rollout]

    with pytest.raises(ValueError, match="gate='strict' in args would be ignored") as raised:
        trainer_for(tiny_policy, tmp_path, rows, gate="strict", options={"reward_funcs": right})
    assert "\n" not in str(raised.value)
    trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": right})


def test_a_template_that_nothing_is_filled_into_is_an_error(tiny_policy, rows, tmp_path):
    """Rows with a prompt of their own; without a template they are fine, under Prompt-R1's reward,
    too.
    """
    rows_with_prompt = rows.map(
        lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}
    )
    with pytest.raises(ValueError, match="prompt_template would be ignored") as raised:
        trainer_for(tiny_policy, tmp_path, rows_with_prompt)
    assert "\n" not in str(raised.value)
    trainer = trainer_for(
        tiny_policy, tmp_path, rows_with_prompt, options={"prompt_template": None}
    )
    assert trainer.prompts.render_messages(rows_with_prompt[0], {}) == rows_with_prompt[0]["prompt"]


@pytest.mark.parametrize("kind", [MultiTurnGRPOTrainer, PromptR1Trainer])
def test_arguments_of_another_kind_are_one_clear_line(kind, rows, tmp_path):
    """TRL's own before anything is loaded; and for the method's trainer those of the general one."""
    given = [GRPOConfig] if kind is MultiTurnGRPOTrainer else [GRPOConfig, MultiTurnGRPOConfig]
    for config in given:
        args = config(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        needed = "MultiTurnGRPOConfig" if kind is MultiTurnGRPOTrainer else "PromptR1Config"
        with pytest.raises(
            TypeError, match=f"args is a {config.__name__}, .* takes a {needed}"
        ) as raised:
            kind("no/such/model", reward_funcs=len, args=args, train_dataset=rows, environment=None)
        assert "\n" not in str(raised.value)


class Steps:
    def step(self, rollout):
        return "Nairobi"


class NoArgument:
    def step(self):
        return "Nairobi"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ScriptedChat(["x"]), r"no step\(rollout\) to call: ScriptedChat.*LLMEnvironment\(chat\)"),
        ("gpt-4o-mini", r"no step\(rollout\) to call: str"),
        (SimpleNamespace(step="Nairobi"), r"no step\(rollout\) to call"),
        (Steps, r"is the class Steps: pass an object of it, Steps\(\.\.\.\)"),
        (NoArgument(), "NoArgument must take one argument, the rollout"),
        (lambda: "Nairobi", "must take one argument, the rollout"),
    ],
)
def test_what_is_no_environment_is_said_before_anything_is_loaded(
    rows, tmp_path, environment, message
):
    with pytest.raises(TypeError, match=message) as raised:
        PromptR1Trainer(
            "no/such/model", args=arguments(tmp_path), train_dataset=rows, environment=environment
        )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_plain_function_is_an_environment(tiny_policy, rows, tmp_path, is_async):
    async def later(rollout):
        return f"you asked: {rollout.turns[-1].text[:5]}"

    def at_once(rollout):
        return f"you asked: {rollout.turns[-1].text[:5]}"

    trainer = trainer_for(
        tiny_policy, tmp_path, rows, environment=later if is_async else at_once, max_steps=1
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    (text,) = {record["observations"][0]["text"] for record in read_rollouts(tmp_path / "rollouts")}
    assert text.startswith("you asked: ")


def test_the_first_failure_of_an_environment_is_said_at_once_and_once(
    tiny_policy, rows, tmp_path, caplog
):
    """With its cause, and not only when training stops: a run of a step or two would end well."""

    def broken(rollout):
        raise KeyError("Kenya")

    trainer = trainer_for(tiny_policy, tmp_path, rows, environment=broken, failure_window=5)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TrainingStopped, match="every rollout of this run failed"),
    ):
        trainer.train()
    assert trainer.state.global_step == 2 and "reward functions" not in caplog.text, (
        "it is not their fault"
    )
    (warning,) = [record.message for record in caplog.records if "failed" in record.message]
    assert "4 of 4 rollouts" in warning and "the environment raised KeyError: 'Kenya'" in warning


# --- the first hour -------------------------------------------------------------------------------


class Calculator:
    """Answers sums of two numbers."""

    def step(self, rollout):
        return "the sum is 4 ."


def told_of(environment, policy, folder, rows, kind=PromptR1Trainer, **options):
    config = PromptR1Config if kind is PromptR1Trainer else MultiTurnGRPOConfig
    trainer = kind(
        model=str(policy),
        reward_funcs=PromptR1Reward(),
        environment=environment,
        train_dataset=rows,
        args=config(**vars_for(folder)),
        **options,
    )
    return trainer.spec.prompt_template


@pytest.mark.parametrize("kind", [PromptR1Trainer, MultiTurnGRPOTrainer])
def test_the_agent_is_told_about_its_environment(tiny_policy, rows, tmp_path, kind):
    """And not about a large language model that it does not have, or nothing at all."""
    bare = shutil.copytree(tiny_policy, tmp_path / "bare", ignore=shutil.ignore_patterns(SPEC_FILE))
    told = partial(told_of, policy=bare, folder=tmp_path, rows=rows, kind=kind)
    own = told(Calculator())
    assert "Calculator" in own
    assert "Answers sums of two numbers." in own
    assert "language model" not in own
    assert "<interaction_prompt>" in own and "<answer>" in own and own.endswith("{question}")
    assert "large language model" in told(LLMEnvironment(Oracle()))

    def dictionary(rollout):
        """Says what a word means."""

    assert "Says what a word means." in told(dictionary)
    chosen = Calculator()
    chosen.prompt_template = "Add with <{act}>. {question}"
    assert told(chosen) == "Add with <interaction_prompt>. {question}"
    assert told(Calculator(), prompt_template="Mine: {question}") == "Mine: {question}"


def test_a_form_that_the_agent_does_not_know_is_warned_of_at_the_first_step(
    tiny_policy, rows, tmp_path, caplog
):
    """100 % were truncated without a word.

    Said once, with what to do; not of an agent that knows it.
    """
    trainer = trainer_for(tiny_policy, tmp_path, rows, max_turn_tokens=4)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (warning,) = [
        record.message for record in caplog.records if "no answer in the form" in record.message
    ]
    assert "4 of 4 rollouts of the first step" in warning
    assert "max_turn_tokens=4" in warning
    assert "prompt_template" in warning
    caplog.clear()
    trainer = trainer_for(tiny_policy, tmp_path / "knows", rows, max_steps=1)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert "no answer in the form" not in caplog.text


def test_ctrl_c_in_ones_own_script_saves_a_checkpoint(tiny_policy, rows, tmp_path):
    class Interrupts(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                signal.raise_signal(signal.SIGINT)

    trainer = trainer_for(tiny_policy, tmp_path, rows, max_steps=5)
    trainer.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt, match="after step 2, a checkpoint was saved"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_bars_the_line_of_a_step_stays(tiny_policy, rows, tmp_path, capfd):
    trainer_for(tiny_policy, tmp_path, rows, disable_tqdm=True).train()
    output = capfd.readouterr().out
    assert [line.partition(":")[0] for line in output.splitlines()] == [
        "step 1",
        "step 2",
    ]
    assert "{'" not in output


def test_a_dataframe_and_a_list_are_rows_too(tiny_policy, rows, tmp_path):
    for dataset in (rows.to_pandas(), list(rows)):
        trainer = trainer_for(tiny_policy, tmp_path, dataset)
        assert trainer.train_dataset[0]["question"] == rows[0]["question"]
        assert list(trainer.train_dataset[0]["answers"]) == list(rows[0]["answers"])


@pytest.mark.parametrize(
    ("kind", "config"),
    [(PromptR1Trainer, PromptR1Config), (MultiTurnGRPOTrainer, MultiTurnGRPOConfig)],
)
def test_an_eval_dataset_works_by_default(tiny_policy, rows, tmp_path, kind, config):
    args = config(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], eval_strategy="no"
    )
    more = rows.select([0] * 40)
    held_out = rows.to_pandas()
    environment = LLMEnvironment(Oracle())
    trainer = kind(
        str(tiny_policy), PromptR1Reward(), args, more, held_out, environment=environment
    )
    assert len(trainer.eval_dataset) == len(rows)


@pytest.mark.parametrize(
    ("config", "changes", "size"),
    [
        (ESPLConfig, {}, 10),
        (PromptR1Config, {"num_generations": 4, "per_device_train_batch_size": 8}, 12),
        (MultiTurnGRPOConfig, {"num_generations_eval": 3}, 9),
        (PromptR1Config, {}, 10),
    ],
)
def test_evaluation_takes_whole_groups_by_default(tmp_path, config, changes, size):
    common = {"use_cpu": True, "bf16": False, "report_to": [], "eval_strategy": "steps"}
    assert config(output_dir=str(tmp_path), **common, **changes).per_device_eval_batch_size == size
