"""Several environments in one run: each row is played in its own, with its template, grammar,
limits and rewards.
"""

import copy

import pytest
from datasets import Dataset

from agentic_prompting import Environment, ESPLTrainer, LLMEnvironment, PromptAgent
from agentic_prompting.cli.loader import load_environment, load_rewards
from agentic_prompting.evolution import SystemPrompt
from agentic_prompting.llm import Budget
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.rollout import (
    AgentSpec,
    BatchEngine,
    Environments,
    FreeText,
    Limits,
    Sample,
    TagGrammar,
    read_rollouts,
)
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.serve.answering import AgentAnswers
from agentic_prompting.trainers.prepare_rows import draw_by_ratio
from support.espl_training import Reference, arguments as espl_arguments
from support.training import Acts, arguments, one_batch, trainer_for

NAMES = ("oracle", "shop")
TEMPLATES = {
    "oracle": SANDBOX_TEMPLATE,
    "shop": "shop {question}",
}  # in place of the one saved with the tiny policy


class Shop(Environment):
    """Answers `shop`, and keeps the names of what it was asked for."""

    def __init__(self):
        self.seen = []
        self.closed = False

    def reset(self, row):
        return {**row, "price": 3}

    def step(self, rollout):
        self.seen.append(rollout.row["environment"])
        return "shop"

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def close(self):
        self.closed = True


@pytest.fixture
def both(rows):
    return rows.map(lambda row, index: {**row, "environment": NAMES[index % 2]}, with_indices=True)


def several(chat=None):
    return {"oracle": LLMEnvironment(chat or Oracle()), "shop": Shop()}


def right(rollout, **columns):
    assert {episode.row["environment"] for episode in rollout} == {"oracle"}
    assert set(columns["environment"]) == {"oracle"}
    return [float(index % 2) for index, _ in enumerate(rollout)]


class Priced:
    """A reward with a column that only this environment's rows have, from its `reset`."""

    def __call__(self, rollout, price, **columns):
        return [float(one) for one in price]

    def charge_to(self, budget, account):
        self.account = account


def several_trainer(tiny_policy, folder, rows, **options):
    arguments = {
        "reward_funcs": {"oracle": right, "shop": [Priced()]},
        "prompt_template": TEMPLATES,
    }
    environment = options.pop("environment", None) or several()
    changes = options.pop("changes", {})
    return trainer_for(
        tiny_policy, folder, rows, environment=environment, options=arguments | options, **changes
    )


def test_each_row_is_played_in_its_environment(tiny_policy, both, tmp_path):
    trainer = several_trainer(tiny_policy, tmp_path, both)
    shop = trainer.environment.by_name["shop"]
    batch = one_batch(trainer)
    assert shop.seen == ["shop", "shop"]
    prompts = trainer.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    assert ["question :" in prompt for prompt in prompts] == [True, True, False, False]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["environments/oracle/reward"] == 0.5
    assert metrics["environments/shop/reward"] == 3.0
    assert metrics["environments/oracle/share"] == metrics["environments/shop/share"] == 0.5
    assert metrics["rewards/oracle/right/mean"] == 0.5
    assert metrics["rewards/shop/Priced/mean"] == 3.0
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert [record["environment"] for record in records] == ["oracle", "oracle", "shop", "shop"]


def test_the_warning_about_form_names_each_template(tiny_policy, both, tmp_path, caplog):
    trainer = several_trainer(tiny_policy, tmp_path, both)
    trainer.policy = BatchEngine(
        lambda requests: [Sample([5]) for _ in requests], on_callers_thread=True
    )
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 1, 1)])
    (warning,) = [message for message in caplog.messages if "no answer in the form" in message]
    assert f"oracle: {SANDBOX_TEMPLATE[:300]!r}" in warning and "shop: 'shop {question}'" in warning


def test_limits_of_an_environment(tiny_policy, both, tmp_path):
    trainer = several_trainer(
        tiny_policy, tmp_path, both, changes={"environment_limits": {"shop": {"max_turns": 1}}}
    )
    one_batch(trainer)
    turns = [len(record["turns"]) for record in read_rollouts(tmp_path / "rollouts")]
    assert turns == [2, 2, 1, 1]
    limits = arguments(
        tmp_path, environment_limits='{"shop": {"max_turns": 1}}'
    ).limits()  # as the command line has it
    assert limits.for_row({"environment": "shop"}).max_turns == 1
    assert limits.for_row({"environment": "oracle"}).max_turns == 3


@pytest.mark.parametrize("changes", [{}, {"async_lead": 1, "max_staleness": 2}], ids=str)
def test_training_saving_and_use(tiny_policy, both, tmp_path, changes):
    trainer = several_trainer(
        tiny_policy, tmp_path, both, reward_funcs=PromptR1Reward(), changes=changes
    )
    trainer.train()
    trainer.save_model()
    shop = Shop()
    agent = PromptAgent.from_pretrained(
        tmp_path, {"oracle": LLMEnvironment(Oracle()), "shop": shop}
    )
    assert agent.spec.for_row({"environment": "oracle"}).prompt_template == SANDBOX_TEMPLATE
    assert agent.spec.for_row({"environment": "shop"}).prompt_template == "shop {question}"
    assert agent.answer("x", environment="shop").row["price"] == 3
    with pytest.raises(ValueError, match="None.*oracle, shop"):
        agent.answer("x")
    with pytest.raises(ValueError, match="greedy_answer"):
        PromptAgent.from_pretrained(tmp_path, several(), greedy_answer=True)
    one = PromptAgent.from_pretrained(tmp_path, shop, name="shop")
    assert not one.spec.environments and AgentAnswers(one) and one.answer("x").row["price"] == 3
    with pytest.raises(ValueError, match="which of the agent's environments"):
        AgentAnswers(agent)
    card = (tmp_path / "README.md").read_text()
    assert "oracle (LLMEnvironment), shop (Shop)" in card


def test_evaluation_rows_may_name_some_environments(tiny_policy, both, tmp_path):
    """A reward of another environment has no rows among them, and needs no columns."""
    environment = {name: LLMEnvironment(Oracle()) for name in NAMES}
    oracle = both.select(range(0, 8, 2))
    options = {
        "reward_funcs": {
            "oracle": right,
            "shop": lambda completions, answers, **columns: [1.0] * len(answers),
        }
    }
    trainer = several_trainer(
        tiny_policy, tmp_path, both, environment=environment, eval_dataset=oracle, **options
    )
    assert trainer.evaluate()["eval_environments/oracle/share"] == 1.0


def test_a_checkpoint_keeps_the_states(tiny_policy, both, tmp_path):
    trainer = several_trainer(
        tiny_policy, tmp_path, both, changes={"save_strategy": "steps", "save_steps": 1}
    )
    trainer.train()
    seen = trainer.environment.by_name["shop"].seen
    again = several_trainer(tiny_policy, tmp_path, both, changes={"max_steps": 3})
    again.train(resume_from_checkpoint=True)
    assert again.environment.by_name["shop"].seen[: len(seen)] == seen


def test_the_parts_of_several():
    shop = Shop()
    spent = {}
    one = Environments({"oracle": LLMEnvironment(Oracle()), "shop": shop})
    one.by_name["oracle"].charge_to = lambda budget, account: spent.update({account: budget})
    one.charge_to(budget := Budget(), "environment")
    assert spent == {"environment/oracle": budget}
    assert one.state_dict() == {"shop": {"seen": []}} and one.has_reset
    assert not one.plays_whole_episodes
    one.load_state_dict({"shop": {"seen": ["a"]}})
    one.close()
    assert shop.closed and shop.seen == ["a"]


def test_a_form_for_each_is_saved_and_loaded(tmp_path):
    own = TagGrammar(act="search", observation="found")
    spec = AgentSpec(
        "ask {question}",
        limits=Limits(environments={"shop": {"max_turns": 2}}),
        environments={
            "oracle": {
                "prompt_template": "ask {question}",
                "grammar": TagGrammar(),
                "chat_template_kwargs": {},
            },
            "shop": {
                "prompt_template": "buy {question}",
                "grammar": own,
                "chat_template_kwargs": {"tools": []},
            },
        },
    )
    spec.save(tmp_path)
    assert AgentSpec.load(tmp_path) == spec
    shop = AgentSpec.load(tmp_path, name="shop")
    assert shop.prompt_template == "buy {question}"
    assert shop.grammar == own
    assert not shop.environments
    assert set(spec.stop_texts) == {*TagGrammar().stops, *own.stops}
    assert spec.messages({"question": "x", "environment": "shop"})[-1]["content"] == "buy x"
    with pytest.raises(ValueError, match="trained without the environment 'mine'"):
        AgentSpec.load(tmp_path, name="mine")
    with pytest.raises(ValueError, match="no {question}"):
        AgentSpec(environments={"shop": {"prompt_template": "nothing"}})
    with pytest.raises(ValueError, match="no limit 'turns'"):
        Limits(environments={"shop": {"turns": 2}})


def test_prompts_and_observations_are_of_the_rows_form(tiny_policy, tmp_path):
    from transformers import AutoTokenizer

    spec = AgentSpec(environments={"a": {"grammar": TagGrammar()}, "b": {"grammar": FreeText()}})
    form = spec.create_format(AutoTokenizer.from_pretrained(tiny_policy))
    assert [type(form.for_row({"environment": name}).grammar) for name in "ab"] == [
        TagGrammar,
        FreeText,
    ]
    assert form.for_row({"environment": "b"}).environments == {}


def test_rows_by_ratio():
    rows = Dataset.from_list(
        [{"environment": NAMES[index >= 30], "n": index} for index in range(40)]
    )
    drawn = draw_by_ratio(rows, {"oracle": 0.5, "shop": 0.5}, seed=0)
    names = drawn["environment"]
    assert len(drawn) == 60
    assert list(names).count("shop") == 30
    assert set(drawn["n"]) == set(range(40))
    assert list(drawn["n"]) == list(draw_by_ratio(rows, {"oracle": 1, "shop": 1}, seed=0)["n"])
    assert list(drawn["n"]) != list(draw_by_ratio(rows, {"oracle": 1, "shop": 1}, seed=1)["n"])
    for wrong, message in (
        ({"oracle": 1}, "environment_ratio names oracle, .*shop"),
        ({"oracle": 1, "shop": 0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_by_ratio(rows, wrong, seed=0)


def test_the_ratio_decides_what_is_trained_on(tiny_policy, both, tmp_path):
    trainer = several_trainer(
        tiny_policy, tmp_path, both, changes={"environment_ratio": {"oracle": 3, "shop": 1}}
    )
    names = list(trainer.train_dataset["environment"])
    assert names.count("oracle") == 3 * names.count("shop")


def test_an_evolved_prompt_stands_before_each_template(tiny_policy, both, tmp_path):
    spec = several_trainer(tiny_policy, tmp_path, both).spec
    prompt = SystemPrompt("Be brief.", ("Think.",))
    for name, start in (("oracle", SANDBOX_TEMPLATE[:10]), ("shop", "shop ")):
        messages = prompt.messages(spec.messages({"question": "x", "environment": name}))
        assert [message["role"] for message in messages] == ["system", "user"]
        assert messages[1]["content"].startswith(start)


def test_espl_trains_one_population_in_both(tiny_policy, both, tmp_path):
    trainer = ESPLTrainer(
        str(tiny_policy),
        environment=several(),
        prompt_template=TEMPLATES,
        reward_funcs={"oracle": right, "shop": Priced()},
        args=espl_arguments(tmp_path, max_steps=3),
        reference=Reference(),
        train_dataset=both,
        initial_prompt="Answer .\n[G0]. Ask first .",
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    records = list(read_rollouts(tmp_path / "rollouts"))
    played = {(record["environment"], record["system_prompt"]) for record in records}
    assert played == {
        (name, prompt) for name in NAMES for prompt in (0, 1)
    }  # the first prompt and its child
    assert {record["status"] for record in records} == {"answered"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "empty mapping"),
        ({"a": 3}, "environment 'a': environment has no step"),
        ({"a": Shop}, "environment 'a': environment is the class Shop"),
        ({"a": {"b": Shop()}}, "cannot be one of several"),
        ({"a": None}, "cannot be one of several"),
        ({1: Shop()}, "name of an environment"),
    ],
)
def test_what_is_no_environment_is_named(environment, message):
    with pytest.raises(TypeError, match=message):
        Environments(environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": {"oracle": right}}, "no reward function for the environment 'shop'"),
        (
            {"reward_funcs": {"oracle": right, "shop": right, "x": right}},
            "reward_funcs .*'x'",
        ),
        (
            {"changes": {"environment_limits": {"x": {}}}},
            "environment_limits .*'x'",
        ),
        ({"changes": {"environment_ratio": {"oracle": 1.0}}}, "environment_ratio names oracle"),
        (
            {"environment": {"oracle": LLMEnvironment(Oracle())}, "reward_funcs": right},
            "row 1 .*'shop'",
        ),
        (
            {
                "environment": Shop(),
                "reward_funcs": right,
                "changes": {"environment_ratio": {"a": 1}},
            },
            "would be ignored",
        ),
        ({"environment": Shop(), "reward_funcs": {"a": right}}, "are: none"),
        ({"prompt_template": {"shopp": "{question}"}}, "prompt_template .*'shopp'.*oracle, shop"),
        ({"grammar": {"shopp": TagGrammar()}}, "grammar .*'shopp'"),
    ],
)
def test_wrong_names_are_found_before_anything_is_loaded(both, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        several_trainer(tmp_path / "no model", tmp_path, both, **copy.copy(options))


def test_rows_without_names_are_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="no column 'environment'"):
        several_trainer(tmp_path / "no model", tmp_path, rows)


def test_the_command_line_takes_dicts_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "both = {'a': lambda rollout: 'x', 'b': lambda rollout: 'y'}\n"
        "scores = {'a': lambda completions, **rest: [1.0], 'b': lambda completions, **rest: [0.0]}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert list(load_environment("mine.py:both").by_name) == ["a", "b"]
    assert list(load_rewards(["mine.py:scores"])) == ["a", "b"]
    assert callable(load_rewards(["exact_match"])[0])
