"""A model that was saved with a form of its own is trained in that form, unless an argument says otherwise."""

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
        model=model, reward_funcs=PromptR1Reward(), environment=environment, train_dataset=rows,
        args=config(**{**vars_for(folder), **changes}), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_a_saved_models_own_form_is_trained_in(model, rows, tmp_path, caplog, kind, config):
    """Under the default template 89 to 100 % of the rollouts of a trained agent were malformed, without a word."""
    trainer = trainer_of(str(model), tmp_path / "out", rows, kind, config)
    spec = trainer.spec
    assert (spec.prompt_template, spec.system_prompt, spec.grammar) == (
        SAVED.prompt_template,
        "Be short.",
        TAGS,
    )
    assert spec.chat_template_kwargs == {"mine": True} and trainer.chat_format.grammar == TAGS
    assert spec.limits.max_turns == 2, "the limits are those of the arguments"
    (said,) = [record.message for record in caplog.records if SPEC_FILE in record.message]
    assert (
        "using the prompt template and grammar that the model was saved with" in said
        and "\n" not in said
    )


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
    trainer = trainer_for(model, tmp_path / "out", rows, max_turn_tokens=4, max_steps=1,
                          options={"prompt_template": None, **given})  # fmt: skip
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (said,) = [
        record.message for record in caplog.records if "no answer in the form" in record.message
    ]
    asked = (
        "'Mine : {question}' (prompt_template=)"
        if given
        else f"'My own words : {{question}}' ({model / SPEC_FILE})"
    )
    assert said.endswith(asked)
