"""The base class of environments: what one brings along, and everything that still passes for one."""

import asyncio
import copy
import pickle

import pytest

import agentic_prompting
from agentic_prompting import Environment
from agentic_prompting.environments import LLMEnvironment, SearchEnvironment
from agentic_prompting.environments.search import SearchGrammar
from agentic_prompting.llm import Budget, Reply, ScriptedChat, Usage, run
from agentic_prompting.rollout import (
    RESET_ERROR,
    RESET_SEED,
    ChatFormat,
    FreeText,
    Observation,
    Rollout,
    TagGrammar,
    as_environment,
    observe,
    play_all,
    prompt_r1_template,
    reset_rows,
    template_for,
)
from support.episodes import ASK, END, ScriptedSampler
from support.tokenizers_for_tests import tokenizer_for


class Least(Environment):
    """Answers the same each time.

    And more.
    """

    def step(self, rollout):
        return "It is Kenya."


class Duck:
    """An object with a step."""

    grammar = TagGrammar(act="ask")
    chat = ScriptedChat(["x"])
    closed = False

    async def step(self, rollout):
        return "quack"

    def reset(self, row):
        return {**row, "seen": True}

    def state_dict(self):
        return {"n": 1}

    def close(self):
        self.closed = True


async def function(rollout):
    """Says its name."""
    return "function"


def observed(environment):
    return run(observe(environment, Rollout([1])))


def test_the_front_exports_it():
    assert agentic_prompting.RefinedChat and agentic_prompting.Environment


def test_what_one_has_that_brings_nothing_but_a_step():
    least = Least()
    assert as_environment(least) is least and observed(least).text == "It is Kenya."
    assert least.grammar is None
    assert least.prompt_template is None
    assert dict(least.chat_template_kwargs) == {}
    assert least.check() is None
    assert least.close() is None
    assert least.state_dict() is None
    assert not least.has_reset
    assert template_for(least, TagGrammar()).startswith(
        "You answer a question with the help of Least: Answers the same each time."
    )
    assert run(reset_rows(least, [{"question": "q"}])) == [{"question": "q"}]


def test_the_agent_does_not_read_the_docstring_of_the_base_class():
    class Silent(Environment):
        def step(self, rollout):
            return "Kenya"

    template = template_for(Silent(), TagGrammar())
    assert template.startswith(
        "You answer a question with the help of Silent.\nIt sees your requests"
    )


def test_an_object_with_a_step_is_one_with_all_that_it_has():
    duck = Duck()
    adapted = as_environment(duck)
    assert isinstance(adapted, Environment) and as_environment(adapted) is adapted
    assert adapted.grammar is duck.grammar
    assert adapted.prompt_template is None
    assert adapted.chat is duck.chat
    assert adapted.state_dict() == {"n": 1} and adapted.check() is None and adapted.has_reset
    assert observed(adapted).text == observed(duck).text == "quack"
    assert "the help of Duck: An object with a step." in template_for(duck, TagGrammar())
    adapted.close()
    assert duck.closed
    assert (
        copy.deepcopy(adapted).grammar
        == pickle.loads(pickle.dumps(adapted)).grammar
        == duck.grammar
    )


def test_an_object_that_plays_whole_episodes_is_a_program():
    class Player(Duck):
        async def play_episode(self, rollout, policy, chat_format, limits):
            return rollout.finish("answered")

    assert as_environment(Player()).plays_whole_episodes
    assert not as_environment(Duck()).plays_whole_episodes
    assert not as_environment(function).plays_whole_episodes


def test_a_function_is_one():
    adapted = as_environment(function)
    assert observed(adapted).text == "function" and not adapted.has_reset
    assert "the help of function: Says its name." in template_for(adapted, TagGrammar())


class Briefed(Environment):
    """Has a template of its own."""

    prompt_template = "Ask the shop. Question: {question}"

    def step(self, rollout):
        return "Kenya"


@pytest.mark.parametrize("grammar", [TagGrammar(), FreeText(), SearchGrammar()])
def test_an_environments_template_is_used_with_any_grammar(grammar):
    assert template_for(Briefed(), grammar) == Briefed.prompt_template


def test_a_template_for_tags_needs_a_grammar_with_tags():
    class Tagged(Briefed):
        prompt_template = "Ask in <{act}>...</{act}>. Write \\boxed{answer}. {question}"

    assert "<ask>...</ask>" in template_for(Tagged(), TagGrammar(act="ask"))
    with pytest.raises(ValueError, match="prompt_template"):
        template_for(Tagged(), SearchGrammar())
    Tagged.prompt_template = "Write \\boxed{answer}. {question}"
    assert template_for(Tagged(), FreeText()) == Tagged.prompt_template


def test_without_tags_the_default_is_the_question():
    assert template_for(Least(), FreeText()) == prompt_r1_template(FreeText()) == "{question}"


def test_nothing_stays_nothing():
    assert as_environment(None) is None
    assert run(reset_rows(None, [{"a": 1}])) == [{"a": 1}]


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Least, "is the class Least: pass an object"),
        (3, "no step"),
        (Environment(), "no step"),
        (lambda: "x", "must take one argument"),
        (lambda row, base_url, api_key: "x", r"Program\("),
    ],
)
def test_what_is_none(thing, message):
    with pytest.raises(TypeError, match=message):
        as_environment(thing)


def test_the_shipped_ones_are_environments():
    for environment in (
        LLMEnvironment(ScriptedChat(["x"])),
        SearchEnvironment(lambda queries, k: []),
    ):
        assert as_environment(environment) is environment and isinstance(environment, Environment)


def test_the_models_of_one_are_charged_without_a_line_of_its_own():
    class Asks(Environment):
        def __init__(self, chat):
            self.chat = chat

        def step(self, rollout):
            return "x"

    class Counts(ScriptedChat):
        def charge_to(self, budget, account):
            budget.add(account, Usage(1, 2, 0.5))

    for environment in (
        Asks(Counts(["x"])),
        as_environment(type("Other", (), dict(Asks.__dict__))(Counts(["x"]))),
    ):
        environment.charge_to(budget := Budget(), "environment")
        assert list(budget.by_account()) == ["environment"] and budget.spent().cost_usd == 0.5


class Starts(Environment):
    """Some of its episodes do not start."""

    def reset(self, row):
        if row["question"] == "bad":
            raise SystemExit("no game")
        return {**row, "secret": 3} if row["question"] == "good" else None

    def step(self, rollout):
        return "It is Kenya."


class StartsLater(Starts):
    async def reset(self, row):
        await asyncio.sleep(0)
        return super().reset(row)


@pytest.mark.parametrize("environment", [Starts(), StartsLater()])
def test_a_reset_that_fails_fails_its_rollout_alone(environment):
    rows = [{"question": name} for name in ("good", "bad", "none")]
    good, bad, none = begun = run(reset_rows(environment, rows))
    assert {frozenset(row) for row in begun} == {
        frozenset({RESET_SEED, "question", "secret", RESET_ERROR})
    }, "rewards get columns"
    assert good["secret"] == 3 and good[RESET_ERROR] is None
    assert "reset raised SystemExit: no game" in str(bad[RESET_ERROR]) and bad["secret"] is None
    assert "a dict, not NoneType" in str(none[RESET_ERROR])
    chat_format = ChatFormat(tokenizer_for("chatml"))
    prompt = chat_format.prompt_ids([{"role": "user", "content": "q"}])
    rollouts = [Rollout(prompt, row=row) for row in begun]
    sampler = ScriptedSampler(chat_format, [ASK, END])
    play_all(rollouts, sampler, environment, chat_format)
    assert [rollout.status for rollout in rollouts] == ["answered", "failed", "failed"]
    assert sum(map(len, sampler.batches)) == 2, (
        "no turn is sampled for an episode that has not begun"
    )
    assert "no game" in str(rollouts[1].error)


def test_replies_of_an_environment_are_counted_as_before():
    environment = as_environment(lambda rollout: Observation("x", replies=(Reply("x"),)))
    assert len(observed(environment).replies) == 1
