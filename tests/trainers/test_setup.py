"""A model that was saved with a form is trained in that form, and rows have the columns that
rewards need.
"""

import json
import logging
import shutil

import pytest

from agentic_prompting import (
    ESPLConfig,
    ESPLTrainer,
    LLMEnvironment,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    Program,
    PromptR1Config,
    PromptR1Reward,
    PromptR1Trainer,
)
from agentic_prompting.rollout import SPEC_FILE, AgentSpec, FreeText, TagGrammar, prompt_r1_template
from agentic_prompting.sandbox import Oracle
from support.training import trainer_for, vars_for

TAGS = TagGrammar("why", "ask", "told", "say")
SAVED = AgentSpec(
    "My own words : {question}", "Be short.", TAGS, chat_template_kwargs={"mine": True}
)
KINDS = [
    (PromptR1Trainer, PromptR1Config),
    (MultiTurnGRPOTrainer, MultiTurnGRPOConfig),
    (ESPLTrainer, ESPLConfig),
]


@pytest.fixture
def model(tiny_policy, tmp_path):
    folder = shutil.copytree(tiny_policy, tmp_path / "model")
    SAVED.save(folder)
    return folder


def trainer_of(model, folder, rows, kind=PromptR1Trainer, config=PromptR1Config, **options):
    changes = (
        {}
        if kind is not ESPLTrainer
        else {"mode": "rl", "prompts_per_step": 2, "gradient_accumulation_steps": 1}
    )
    environment = options.pop("environment", LLMEnvironment(Oracle()))
    return kind(
        model=model,
        reward_funcs=PromptR1Reward(),
        environment=environment,
        train_dataset=rows,
        args=config(**{**vars_for(folder), **changes}),
        **options,
    )


@pytest.mark.parametrize(("kind", "config"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_a_saved_models_own_form_is_trained_in(model, rows, tmp_path, caplog, kind, config):
    """Under the default template 89 to 100 % of the rollouts of a trained agent were malformed,
    without a word.
    """
    trainer = trainer_of(str(model), tmp_path / "out", rows, kind, config)
    spec = trainer.spec
    assert (spec.prompt_template, spec.system_prompt, spec.grammar) == (
        SAVED.prompt_template,
        "Be short.",
        TAGS,
    )
    assert spec.chat_template_kwargs == {"mine": True} and trainer.chat_format.grammar == TAGS
    assert spec.limits.max_turns == 2, "the limits are those of the arguments"
    (warning,) = [record.message for record in caplog.records if SPEC_FILE in record.message]
    assert "using the prompt template and grammar that the model was saved with" in warning
    assert "\n" not in warning


def test_a_model_that_is_loaded_already_too(model, rows, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out", rows)
    assert trainer.spec.prompt_template == SAVED.prompt_template


def test_an_argument_wins_over_what_was_saved(model, rows, tmp_path, caplog):
    mine = "Quite another : {question}"
    spec = trainer_of(
        str(model), tmp_path / "out", rows, prompt_template=mine, system_prompt="Be long."
    ).spec
    assert (spec.prompt_template, spec.system_prompt, spec.grammar) == (mine, "Be long.", TAGS)
    assert "using prompt_template=" in caplog.text
    caplog.clear()
    spec = trainer_of(str(model), tmp_path / "out", rows, grammar=TagGrammar()).spec
    assert spec.grammar == TagGrammar() and spec.prompt_template == prompt_r1_template()
    assert "was saved with another grammar" in caplog.text


def test_a_template_that_a_program_never_shows_is_not_missed(model, rows, tmp_path, caplog):
    program = Program(lambda row, base_url, api_key: "done")
    trainer_of(
        str(model),
        tmp_path / "out",
        rows,
        MultiTurnGRPOTrainer,
        MultiTurnGRPOConfig,
        environment=program,
    )
    assert "prompt template" not in caplog.text


class Free:
    """An environment with a form of its own."""

    grammar = FreeText()

    def step(self, rollout):
        return "yes"


def test_an_environments_own_grammar_wins(model, rows, tmp_path):
    spec = trainer_of(str(model), tmp_path / "out", rows, environment=Free()).spec
    assert spec.grammar == FreeText() and spec.prompt_template == "{question}"


def test_a_damaged_form_is_named_and_not_used(model, rows, tmp_path, caplog):
    file = model / SPEC_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "grammar": {"kind": "Mine"}}))
    assert trainer_of(str(model), tmp_path / "out", rows).spec.grammar == TagGrammar()
    assert "trained with the grammar 'Mine'" in caplog.text
    file.write_text("{")
    assert trainer_of(str(model), tmp_path / "out", rows).spec.grammar == TagGrammar()
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("given", [{}, {"prompt_template": "Mine : {question}"}])
def test_the_warning_about_malformed_rollouts_shows_the_template(
    model, rows, tmp_path, caplog, given
):
    trainer = trainer_for(
        model,
        tmp_path / "out",
        rows,
        max_turn_tokens=4,
        max_steps=1,
        options={"prompt_template": None, **given},
    )
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (warning,) = [
        record.message for record in caplog.records if "no answer in the form" in record.message
    ]
    template = f"'My own words : {{question}}' ({model / SPEC_FILE})"
    if given:
        template = "'Mine : {question}' (prompt_template=)"
    assert warning.endswith(template)


# --- settings that TRL would refuse only when the model is loaded ---------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_weights": [1.0, 0.5]}, r"reward_weights=\[1.0, 0.5\] .*1 reward function "),
        ({"remove_unused_columns": True}, "remove_unused_columns=True .*`question`"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy='steps' .*eval_dataset="),
        ({"eval_on_start": True}, "eval_on_start=True .*eval_dataset="),
    ],
)
def test_settings_are_refused_before_the_model(tiny_policy, rows, tmp_path, changes, message):
    no_model = tmp_path / "no model"
    shutil.copytree(tiny_policy, no_model)
    (no_model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message) as error:
        trainer_for(no_model, tmp_path / "out", rows, **changes)
    assert "\n" not in str(error.value)


# --- the columns that reward functions need -------------------------------------------------------


class CountsCalls:
    """An environment that counts what is asked of it, which would be paid for."""

    calls = 0

    def step(self, rollout):
        type(self).calls += 1
        return "it is Kenya ."

    def check(self):
        type(self).calls += 1


def needs_answers(completions, answers, **columns):
    return [float(bool(answer)) for answer in answers]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            [{"question": "a ?"}] * 4,
            r"the reward function needs_answers \(.*:\d+\) needs the column 'answers'",
        ),
        ([{"question": "a ?", "answers": []}] * 4, "row 0 of the dataset"),
    ],
)
def test_rows_without_what_a_reward_reads_are_refused_before_anything_is_paid(
    tiny_policy, tmp_path, dataset, message
):
    """`MultiTurnGRPOTrainer` too: a `KeyError` came when the first batch had been paid for."""
    CountsCalls.calls = 0
    with pytest.raises(ValueError, match=message) as error:
        trainer_for(
            tiny_policy,
            tmp_path,
            dataset,
            kind=MultiTurnGRPOTrainer,
            environment=CountsCalls(),
            options={
                "reward_funcs": [lambda rollout, **_: [1.0] * len(rollout), needs_answers],
            },
        )
    assert CountsCalls.calls == 0 and "\n" not in str(error.value)


def test_a_reward_that_reads_no_answers_needs_none(tiny_policy, tmp_path):
    def reward_bonus(rollout, bonus=1.0, **columns):
        return [bonus] * len(rollout)

    rows = [{"question": "a ?"}] * 4
    for kind in (PromptR1Trainer, MultiTurnGRPOTrainer):
        trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            kind=kind,
            environment=CountsCalls(),
            options={"reward_funcs": reward_bonus},
        )


def test_columns_that_an_environments_reset_adds_are_not_missed(tiny_policy, tmp_path):
    class Deals(CountsCalls):
        def reset(self, row):
            return {**row, "answers": ["x"]}

    trainer_for(
        tiny_policy,
        tmp_path,
        [{"question": "a ?"}] * 4,
        kind=MultiTurnGRPOTrainer,
        environment=Deals(),
        options={"reward_funcs": needs_answers},
    )


def test_answers_no_reply_can_match_are_refused(tiny_policy, tmp_path):
    from agentic_prompting.rewards import math_reward

    pytest.importorskip("math_verify")
    rows = [{"question": "a ?", "answers": ["4"]}] * 3 + [{"question": "a ?", "answers": ["$"]}]
    CountsCalls.calls = 0
    with pytest.raises(ValueError, match="row 3 of the dataset: no reply can match"):
        options = {"reward_funcs": math_reward}
        trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            kind=MultiTurnGRPOTrainer,
            environment=CountsCalls(),
            options=options,
        )
    assert CountsCalls.calls == 0
