"""`evolve` end to end with scripted models: it improves a policy, resumes exactly, and stops with
what it has.
"""

import asyncio
import json
import random
import re

import pytest

from agentic_prompting.evolution import (
    EvolveConfig,
    Population,
    SystemPrompt,
    evolve,
    mutation_rating,
)
from agentic_prompting.evolution.journal import journal_beside, read_journal
from agentic_prompting.llm import (
    Budget,
    BudgetExceeded,
    Misconfigured,
    OpenAIChat,
    Reply,
    ScriptedChat,
    ServerFailed,
    start,
)
from agentic_prompting.rewards import AccuracyJudge, exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, WORDS, Policy, reflect, run
from support.misbehaving import MisbehavingServer


def test_it_improves_a_policy():
    logged_steps = []
    result = run(on_step=logged_steps.append)
    assert result.stopped is None
    assert logged_steps == result.steps
    assert [log.step for log in result.steps] == list(range(12))
    assert result.steps[0].prompts == [0], "one prompt is played once, not three times"
    assert result.steps[0].reward < 0.5
    assert all(word in result.best.text for word in WORDS.values())
    last = next(log for log in reversed(result.steps) if result.best.id in log.prompts)
    assert last.values[last.prompts.index(result.best.id)] == 1.0
    assert result.best.id != 0
    children = [
        entry["child"]
        for log in result.steps
        for entry in log.operators
        if entry["child"] is not None
    ]
    assert children == list(range(1, len(result.population.members)))
    born = [member.prompt.born_at for member in result.population.members]
    assert (
        born
        == sorted(born)
        == [0, *(log.step + 1 for log in result.steps for e in log.operators if e["child"])]
    )
    assert result.usage["policy"].cost_usd > 0
    assert result.usage["reference"].tokens > 0
    json.dumps([vars(log) for log in result.steps])


def test_crossover_unites_what_two_prompts_know():
    population = Population(ROOT)
    for words in (["amber"], ["birch", "cedar"]):
        rules = tuple(f"Always mention {word}." for word in words)
        population.add(SystemPrompt(ROOT.preamble, rules, parents=(0,), operator="mutation"))
    config = EvolveConfig(
        **{**vars(SETTINGS), "steps": 1, "problems_per_step": 12, "p_crossover": 1.0}
    )

    def crosses(messages):
        return reflect(messages) if "Task: let one" in messages[0]["content"] else "[]"

    result = evolve(Policy(), ScriptedChat(crosses), ROWS, exact_match_reward, population, config)
    mutation, crossover = result.steps[0].operators
    assert (mutation["child"], crossover["child"]) == (None, 3)
    child = result.population.members[crossover["child"]].prompt
    assert all(word in child.text for word in WORDS.values())
    assert (child.operator, set(child.parents), child.parents[0]) == ("crossover", {0, 1, 2}, 2)
    assert (
        result.population.rating(child).sigma < mutation_rating(result.population.rating(2)).sigma
    ), "three say more"


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, caplog):
    whole = run()
    path = tmp_path / "runs" / "evolution.json"
    run(config=EvolveConfig(**{**vars(SETTINGS), "steps": 5}), checkpoint=path)
    resumed = run(checkpoint=path)
    assert resumed.steps == whole.steps
    assert resumed.population.state_dict() == whole.population.state_dict()
    assert (resumed.best, resumed.usage) == (whole.best, whole.usage)
    assert not list(path.parent.glob("*.tmp"))
    untouched = Policy()
    assert f"{path}: 5 of 12 steps" in caplog.text
    assert run(untouched, checkpoint=path).best == whole.best
    assert untouched.calls == 0, "a finished run asks nothing"
    assert f"{path} holds a finished run of 12 steps: raise steps" in caplog.text
    with pytest.raises(ValueError, match="began with another system prompt"):
        evolve(
            Policy(),
            Policy(),
            ROWS,
            exact_match_reward,
            SystemPrompt("Other."),
            SETTINGS,
            checkpoint=path,
        )


@pytest.mark.parametrize("role", ["policy", "reference", "judge"])
def test_the_budget_of_any_role_stops_the_run_with_the_bill(tmp_path, role, caplog):
    """15 tokens a call, one at a time: 100 are reached with the seventh."""
    judge = AccuracyJudge(ScriptedChat(lambda messages: "<ACCURACY>0</ACCURACY>"))

    def graded(rollout, answers, **kwargs):
        pairs = zip(rollout, answers, strict=True)
        futures = [start(judge("?", episode.answer or "", golds)) for episode, golds in pairs]
        return [future.result() for future in futures]

    def say(request):
        policy = request["messages"][-1]["content"].startswith("Which")
        return "say amber <answer>no</answer>" if policy else reflect(request["messages"])

    says = say if role != "judge" else lambda request: "<ACCURACY>0</ACCURACY>"
    with (
        MisbehavingServer(say=says) as server,
        OpenAIChat("m", server.base_url, max_concurrency=1) as chat,
    ):
        if role == "judge":
            judge.chat = chat
            graded.charge_to = judge.charge_to
        result = evolve(
            chat if role == "policy" else Policy(),
            chat if role == "reference" else ScriptedChat(reflect),
            ROWS,
            graded if role == "judge" else exact_match_reward,
            ROOT,
            SETTINGS,
            checkpoint=tmp_path / "state.json",
            budget=Budget(tokens=100, path=tmp_path / "spending.sqlite"),
        )
        assert len(server.requests) == 7
    assert "105 of the budget of 100 tokens are spent in all" in result.stopped
    assert result.stopped.endswith(f"Spent so far: {role} $0 or no price known (105 tokens)")
    assert "\n" not in result.stopped
    assert f"resume from {tmp_path / 'state.json'}" in caplog.text


def test_a_budget_holds_for_calls_at_once():
    """A step sends 24 calls and more at once; 15 tokens a call."""

    def say(request):
        policy = request["messages"][-1]["content"].startswith("Which")
        return "say amber <answer>no</answer>" if policy else reflect(request["messages"])

    with (
        MisbehavingServer(say=say, latency=0.01) as server,
        OpenAIChat("m", server.base_url) as chat,
    ):
        budget = Budget(tokens=1000)
        result = evolve(chat, chat, ROWS, exact_match_reward, ROOT, SETTINGS, budget=budget)
        assert "of the budget of 1,000 tokens are spent" in result.stopped
        assert 1000 <= budget.spent().tokens == 15 * len(server.requests) < 1000 + 15


@pytest.mark.parametrize(
    "damage", [lambda text: text[:200], lambda text: text.replace('"members"', '"Members"')]
)
def test_a_damaged_checkpoint_is_named_in_a_line(tmp_path, damage):
    path = tmp_path / "evolution.json"
    run(config=EvolveConfig(**{**vars(SETTINGS), "steps": 1}), checkpoint=path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=r"\S*evolution\.json cannot be resumed") as caught:
        run(checkpoint=path)
    assert "\n" not in str(caught.value)


def test_reflection_is_a_population_of_one():
    result = run(config=EvolveConfig(**{**vars(SETTINGS), "mode": "reflection"}))
    assert all(len(log.prompts) == 1 for log in result.steps)
    assert {entry["operator"] for log in result.steps for entry in log.operators} == {"mutation"}
    newest = 0
    for log in result.steps:
        assert log.prompts == [newest]
        newest = max([newest, *(entry["child"] for entry in log.operators if entry["child"])])
    assert newest > 0 and result.best.id == newest  # none was rated: alone it met nobody


def test_failed_calls_are_left_out():
    policy = Policy(fail=lambda number: ServerFailed("down", "there") if number % 4 == 0 else None)
    result = run(policy)
    assert result.stopped is None
    assert all(log.failed == 0.25 for log in result.steps)
    assert all(word in result.best.text for word in WORDS.values())


def test_it_stops_with_what_it_has_when_the_money_is_spent(tmp_path):
    path = tmp_path / "evolution.json"
    spent = run(
        Policy(fail=lambda number: BudgetExceeded("$1 spent", "m") if number > 150 else None),
        checkpoint=path,
    )
    assert spent.stopped.startswith("$1 spent (m)"), "a limit that is reached is no failure"
    assert 0 < len(spent.steps) < 12
    whole = run(checkpoint=path)
    assert whole.steps == run().steps, "the step that failed is done anew, from the same state"


def test_a_reference_that_never_answers_leaves_the_population_as_it_was():
    broken = ScriptedChat(reflect, fail_on=lambda number: True)
    result = evolve(Policy(), broken, ROWS, exact_match_reward, ROOT, SETTINGS)
    assert (result.stopped, len(result.population.members)) == (None, 1)
    assert {entry["reason"] for log in result.steps for entry in log.operators} == {
        "call_failed",
        "too_few_winners",
    }
    spent = evolve(
        Policy(), ScriptedChat([BudgetExceeded("spent")]), ROWS, exact_match_reward, ROOT, SETTINGS
    )
    assert spent.stopped.startswith("spent")
    failed = evolve(
        Policy(), ScriptedChat([Misconfigured("no")]), ROWS, exact_match_reward, ROOT, SETTINGS
    )
    assert failed.stopped.startswith("the reference LLM failed: no")


def test_own_population_and_other_places():
    population = Population(ROOT, window=2, rule="softmax")
    config = EvolveConfig(
        **{
            **vars(SETTINGS),
            "steps": 2,
            "prompt_place": "user",
            "policy_sampling": {"temperature": 0.6},
        }
    )
    chat = ScriptedChat(["<answer>x</answer>"])
    result = evolve(chat, ScriptedChat(reflect), ROWS, exact_match_reward, population, config)
    assert result.population is population
    assert [message["role"] for message in chat.calls[0]] == ["user"]
    assert chat.calls[0][0]["content"].startswith("Answer in <answer></answer>.\n\nWhich ")
    assert chat.sampling[0] == {"temperature": 0.6}


@pytest.mark.parametrize("none", [None, float("nan")])
def test_a_reward_that_gives_none_is_left_out(none):
    """NaN is what `None` becomes in TRL, and what a metric of others gives that cannot tell."""

    def reward(prompts, completions, answers, rollout, **_):
        assert completions[0][0]["role"] == "assistant"
        assert prompts[0].startswith("Which")
        return [none if episode.answer == "no" else 1.0 for episode in rollout]

    result = evolve(
        Policy(),
        ScriptedChat(reflect),
        ROWS,
        reward,
        ROOT,
        EvolveConfig(steps=1, max_failed_share=1.0),
    )
    assert result.steps[0].reward == 1.0
    assert 0 < result.steps[0].failed < 1


def test_a_step_that_fails_behind_the_reflection_leaves_the_population_as_it_was():
    played = []

    def policy(messages):
        return Reply(error=Misconfigured("wrong key")) if played else "<answer>no</answer>"

    def reward(rollout, **_):
        played.append(rollout)
        return [float(place % 2) for place in range(len(rollout))]

    config = EvolveConfig(**{**vars(SETTINGS), "steps": 1, "p_crossover": 0.0, "eval_every": 1})
    population = Population(ROOT)
    before = population.state_dict()
    reflects = ScriptedChat(
        lambda messages: "[]" if "Task: draw" in messages[0]["content"] else "said"
    )
    stopped = evolve(policy, reflects, ROWS, reward, population, config, eval_rows=HELD_OUT)
    assert "wrong key" in stopped.stopped and reflects.calls and population.state_dict() == before


def test_a_column_that_only_some_rows_have_reaches_the_reward():
    """In a list of dicts; of what the first row lacks the reward was told nothing for any row."""
    units = set()

    def reward(rollout, unit=None, **_):
        units.update(unit or [])
        return [0.0] * len(rollout)

    rows = [
        {"question": "Which river is number 1?"},
        {"question": "Which river is number 2?", "unit": "km"},
    ]
    for order in (rows, rows[::-1]):
        units.clear()
        evolve(
            Policy(),
            ScriptedChat(reflect),
            order,
            reward,
            ROOT,
            EvolveConfig(steps=1, problems_per_step=2),
        )
        assert units == {None, "km"}


def test_what_a_failed_step_has_cost_is_known_after_a_resume(tmp_path):
    """The reference LLM's key is wrong, when the policy's calls of the step are paid."""
    path = tmp_path / "evolution.json"
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 1})
    locked = ScriptedChat(lambda messages: Reply(error=Misconfigured("wrong key")))
    policies = Policy(), Policy()
    stopped = evolve(policies[0], locked, ROWS, exact_match_reward, ROOT, config, checkpoint=path)
    assert "wrong key" in stopped.stopped and not stopped.steps
    resumed = run(policies[1], config, checkpoint=path)
    assert len(resumed.steps) == 1 and policies[0].calls == policies[1].calls == 24
    assert resumed.usage["policy"].cost_usd == pytest.approx(0.01 * 48)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_crossover": 1.5}, "p_crossover must be between 0 and 1, got 1.5"),
        ({"mode": "joint"}, "mode must be one of evolution, reflection, got 'joint'"),
        ({"num_generations": 0}, "num_generations must be at least 1, got 0"),
        ({"problems_per_step": 13}, "problems_per_step is 13.* 12 rows"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        run(config=EvolveConfig(**options))


def test_it_works_in_a_running_event_loop_and_awaits_rewards():
    """A notebook's cell runs in one; a reward may be a coroutine."""

    async def reward(rollout, answers, **_):
        await asyncio.sleep(0)
        return [float(one.answer in golds) for one, golds in zip(rollout, answers, strict=True)]

    async def cell():
        return evolve(Policy(), ScriptedChat(reflect), ROWS, reward, ROOT, EvolveConfig(steps=1))

    assert asyncio.run(cell()).steps[0].reward is not None


def test_settings_that_would_be_ignored_are_an_error():
    with pytest.raises(ValueError, match="best_rule='mean'.*Population"):
        evolve(
            Policy(),
            Policy(),
            ROWS,
            exact_match_reward,
            Population(ROOT),
            EvolveConfig(best_rule="mean"),
        )
    result = run(
        config=EvolveConfig(
            steps=1, best_rule="newest", selection="softmax", independent_draws=True
        )
    )
    assert result.best is result.population.members[-1].prompt


def test_the_trainer_and_evolve_have_the_same_settings():
    from agentic_prompting import ESPLConfig
    from agentic_prompting.evolution import ESPLSettings

    assert issubclass(ESPLConfig, ESPLSettings) and issubclass(EvolveConfig, ESPLSettings)
    defaults = {**vars(ESPLSettings())}
    assert {name: getattr(ESPLConfig, name) for name in defaults} == defaults, (
        "one default for both"
    )
    assert ESPLConfig("x", use_cpu=True, bf16=False).lr_scheduler_type == "constant", (
        "Algorithm 1 has one step size"
    )


# First contact
# -------------------------------------------------------------------------------------------------------


def says_mention(messages):
    """A reference as a plain function."""
    return (
        json.dumps([{"op": "add", "text": "Always mention amber."}])
        if "JSON" in messages[-1]["content"]
        else "ok"
    )


def test_plain_functions_texts_and_pairs_will_do():
    def policy(messages):
        return "blue" if "amber" in messages[0]["content"] else random.choice(["blue", "green"])

    def reward(completions, answers, **_):
        return [
            float(one[0]["content"] in golds)
            for one, golds in zip(completions, answers, strict=True)
        ]

    random.seed(0)
    rows = [
        ("Which colour has the river?", "blue"),
        {"question": "And the sky?", "answers": ["blue"]},
    ] * 2
    config = EvolveConfig(steps=2, problems_per_step=4)
    result = evolve(policy, says_mention, rows, reward, prompt="Say a colour.", config=config)
    assert result.stopped is None
    assert result.population.members[1].prompt.text.endswith("[G0]. Always mention amber.")
    seen = []

    def reward_of_text(prompts, completions, **_):
        seen.extend(prompts)
        return [0.5 for _ in prompts]

    evolve(
        policy,
        says_mention,
        ["Only a text?"],
        reward_of_text,
        "Say.",
        EvolveConfig(steps=1, problems_per_step=1),
    )
    assert set(seen) == {"Only a text?"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"policy": "gpt-4o-mini"},
            "policy .* chat model or a function of the messages, not 'gpt-4o-mini'.*OpenAIChat",
        ),
        ({"reference": None}, "reference .* not None"),
        ({"rows": "one text"}, "rows .* not a str"),
        ({"rows": [3] * 12}, r"rows\[0\] .* not 3"),
        (
            {"rows": [{"answers": ["x"]}] * 12},
            r"rows\[0\] has neither `question` nor `prompt`: answers",
        ),
        ({"reward": 1.0}, "reward .* not 1.0"),
        ({"prompt": 3}, "a system prompt is a SystemPrompt or a text, not a int"),
        ({"config": {"steps": 3}}, "config .* EvolveConfig.* not a dict"),
        (
            {"reward": lambda **columns: 1.0},
            "the reward .* one number or None for each of the .* completions, not 1.0",
        ),
        (
            {"reward": lambda **columns: [1.0]},
            r"the reward .* each of the \d+ completions, not .*\[1.0\]",
        ),
        (
            {"reward": lambda completions, **columns: ["x"] * len(completions)},
            "the reward .* not .*'x'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_type_is_one_clear_error(wrong, message):
    arguments = {
        "policy": Policy(),
        "reference": Policy(),
        "rows": ROWS,
        "reward": exact_match_reward,
        "prompt": ROOT,
    }
    with pytest.raises(TypeError, match=message) as caught:
        evolve(**{**arguments, **wrong})
    assert "\n" not in str(caught.value)


def test_a_run_that_cost_nothing_binds_no_policy(tmp_path, caplog):
    """A misspelt name of the policy, corrected in the same command."""

    class Misspelt:
        model = "smal"

        async def __call__(self, messages, **options):
            return Reply(error=Misconfigured("unknown model 'smal'"))

    checkpoint = tmp_path / "state.json"
    arguments = (ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, EvolveConfig(steps=1))
    stopped = evolve(Misspelt(), *arguments, checkpoint=checkpoint)
    assert stopped.stopped
    assert "resume" not in caplog.text
    assert evolve(Policy(), *arguments, checkpoint=checkpoint).stopped is None
    assert checkpoint.exists()


def test_replies_without_answers_end_the_run():
    policy = ScriptedChat(lambda messages: random.choice(["a", "b"]))
    result = evolve(
        policy, ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, EvolveConfig(steps=5)
    )
    assert len(result.steps) == 2
    assert result.stopped is not None and "grammar" in result.stopped


# Held-out problems
# ---------------------------------------------------------------------------------------------------

HELD_OUT = [
    {"question": f"Which {kind} is number {n}?", "answers": [f"{kind} {n}"]}
    for n in (7, 8)
    for kind in WORDS
]


def test_held_out_curves_and_the_score_of_each_prompt(tmp_path):
    """Figures 12 and 8: the best prompt as training goes on, and in the end every prompt that
    played.
    """
    slow = {**vars(SETTINGS), "problems_per_step": 1, "steps": 10}
    config = EvolveConfig(**{**slow, "eval_every": 2, "eval_all": True})
    policy = Policy()
    path = tmp_path / "state.json"
    result = run(policy, config, eval_rows=HELD_OUT, checkpoint=path)
    curve = [(log.step, log.held_out) for log in result.steps if log.held_out is not None]
    assert [step for step, _ in curve] == [1, 3, 5, 7, 9]
    played = [member for member in result.population.members if member.matches]
    assert len(played) > 3
    # The four attempts at a problem are alike: the problems say how sure the mean is.
    assert all(member.held_out["n"] == len(HELD_OUT) for member in played)
    assert (
        curve[-1][1]
        == result.population.members[result.best.id].held_out["mean"]
        > played[0].held_out["mean"]
    )
    for member in played:
        known = sum(word in member.prompt.text for word in WORDS.values())
        assert member.held_out["mean"] >= known / 3
    asked = {
        (prompt, question)
        for prompt, question, _ in policy.seen
        if re.search("number [78]", question)
    }
    assert len(asked) == len(HELD_OUT) * len(
        {m.prompt.text for m in result.population.members if m.held_out}
    )
    plain = run(config=EvolveConfig(**slow))
    ratings = lambda one: [(member.prompt, member.rating) for member in one.population.members]  # noqa: E731
    assert ratings(plain) == ratings(result), "nothing is learned from them"
    idle = Policy()
    again = run(idle, config, eval_rows=HELD_OUT, checkpoint=path)
    assert idle.calls == 0 and again.population.state_dict() == result.population.state_dict()
    with pytest.raises(ValueError, match="eval_every=2.* eval_rows"):
        run(config=config)


def test_rows_that_taught_are_not_held_out_later(tmp_path):
    path = tmp_path / "state.json"
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 2})
    run(config=config, checkpoint=path)
    taught = read_journal(journal_beside(path))[0]["evidence"][0]["question"]
    held_out = [row for row in ROWS if row["question"] == taught]
    others = [row for row in ROWS if row["question"] != taught]
    policy = Policy()
    with pytest.raises(ValueError, match="1 of the rows.*held out"):
        evolve(
            policy,
            ScriptedChat(reflect),
            others,
            exact_match_reward,
            ROOT,
            config,
            checkpoint=path,
            eval_rows=held_out,
        )
    assert policy.calls == 0
    # Training rows may be evaluated on purpose.
    run(config=config, checkpoint=path, eval_rows=held_out)


def test_scores_on_fewer_held_out_rows_are_new(tmp_path):
    path = tmp_path / "state.json"
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 2})
    run(config=config, checkpoint=path, eval_rows=HELD_OUT)
    again = run(config=config, checkpoint=path, eval_rows=HELD_OUT[:2])
    scores = [member.held_out for member in again.population.members if member.held_out]
    assert scores
    assert {score["n"] for score in scores} == {2}


def test_held_out_scores_have_one_order():
    """A resumed run may get the rows in another order, and compares scores by their place."""
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 2})
    scores = []
    for rows in (HELD_OUT, HELD_OUT[::-1]):
        members = run(config=config, eval_rows=rows).population.members
        scores.append([member.held_out_scores for member in members if member.held_out])
    assert scores[0] == scores[1] and len(scores[0]) == 2
    assert scores[0][0] != scores[0][0][::-1], "the order can be told"


def test_other_held_out_rows_are_measured_anew(tmp_path, caplog):
    """As many rows as before, of which one has another answer: only their digest tells."""
    path = tmp_path / "state.json"
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 2})
    first = run(config=config, checkpoint=path, eval_rows=HELD_OUT)
    others = [{**row, "answers": ["nobody knows"]} for row in HELD_OUT]
    again = run(config=config, checkpoint=path, eval_rows=others)
    assert "held-out rows" in caplog.text
    assert "training rows" not in caplog.text
    assert first.population.members[first.best.id].held_out["mean"] > 0
    scores = [member.held_out for member in again.population.members if member.held_out]
    assert {score["mean"] for score in scores} == {0}
    # They are now those of the saved run, in whatever order.
    caplog.clear()
    idle = Policy()
    run(idle, config, checkpoint=path, eval_rows=others[::-1])
    assert idle.calls == 0
    assert "held-out rows" not in caplog.text


def test_feedback_of_the_reward_is_read_by_the_reference():
    """A pair of a number and a text: the number is the reward, the text stands with the attempt."""
    requests = []

    def reads(messages):
        requests.append(messages[0]["content"])
        return reflect(messages)

    def graded(completions, answers, **columns):
        pairs = []
        for completion, accepted in zip(completions, answers, strict=True):
            right = accepted[0] in completion[0]["content"]
            pairs.append((1.0, "") if right else (0.0, "The right answer names its number."))
        return pairs

    config = EvolveConfig(**{**vars(SETTINGS), "steps": 1})
    result = evolve(Policy(), ScriptedChat(reads), ROWS, graded, ROOT, config)
    retold = [text for text in requests if text.startswith("Task: retell")]
    assert any("The right answer names its number." in text for text in retold)
    assert any("The right answer names" not in text for text in retold)
    assert 0 < result.steps[0].reward < 1
    number_alone = evolve(Policy(), ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, config)
    assert result.steps[0].reward == number_alone.steps[0].reward


def test_feedback_that_is_no_text_is_refused():
    def graded(completions, **columns):
        return [(1.0, 2.0) for _ in completions]

    with pytest.raises(TypeError, match="graded"):
        evolve(Policy(), ScriptedChat(reflect), ROWS, graded, ROOT, SETTINGS)
