"""`headroom`: its calls, within the number allowed, on scripted models whose truth is known."""

import asyncio
import hashlib
import json
from collections import Counter
from contextlib import closing

import pytest

from agentic_prompting import OpenAIChat, Worker, Workers
from agentic_prompting.evaluation.headroom import (
    HEADROOM_FILE,
    Headroom,
    HeadroomSettings,
    aheadroom,
    headroom,
)
from agentic_prompting.evaluation.headroom.proposals import DEFAULT_REQUESTS, read_proposals
from agentic_prompting.evaluation.headroom_figures import HeadroomFigures
from agentic_prompting.llm import (
    BadRequest,
    Misconfigured,
    ReplayCache,
    Reply,
    ScriptedChat,
    ServerFailed,
    Usage,
)
from agentic_prompting.refine import ProRefiner
from agentic_prompting.refine.templates import DEFAULT_PROMPT
from agentic_prompting.rollout import AgentSpec, Limits, Observation, Rollout, Sample, Turn
from agentic_prompting.sandbox.puzzles import make_puzzles, puzzle_models, score_puzzle
from support.servers import LoopbackServer

ROWS = [{"question": f"question {number} ?", "answers": ["yes"]} for number in range(900)]


def luck(*parts):
    """A number between 0 and 1 that follows from its parts."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:12], 16) / 16**12


def chat_of(chances, name="chat", **options):
    """A model that is right as often as `chances` says for its system prompt or for words of its
    request.
    """

    times = Counter()

    def reply(messages):
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        request = messages[-1]["content"]
        times[system, request] += 1
        chance = chances.get(system, chances.get("", 0.5))
        for word, higher in chances.items():
            if word and word in request:
                chance = higher
        right = luck(name, system, request, times[system, request]) < chance
        return Reply(f"Hm.\nAnswer: {'yes' if right else 'no'}", usage=Usage(5, 1, 0.001))

    return ScriptedChat(reply, **options)


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_that_helps_is_worth_it():
    chat = chat_of({"": 0.4, "Mine.": 0.4, "Say the rule.": 0.8})
    measured = headroom(ROWS, policy=chat, prompts=["Mine.", "Be brief.", "Say the rule."])
    assert measured.prompts.verdict == "worth it"
    assert measured.texts[measured.prompts.chosen] == "Say the rule."
    assert measured.prompts.gain.low > 0.2
    assert measured.texts == [
        "Mine.",
        "Be brief.",
        "Say the rule.",
        "",
    ]
    assert measured.calls == {"prompts": len(chat.calls)} and len(chat.calls) <= 512
    assert measured.cost_usd == pytest.approx(0.001 * len(chat.calls)) and measured.delta == 0.1
    assert "Say the rule." in measured.report() and "worth it" in measured.report()


def test_prompts_that_change_nothing_are_not_worth_it():
    measured = headroom(ROWS, policy=chat_of({"": 0.95}), prompts=["Mine.", "Other."], calls=1600)
    assert measured.prompts.verdict == "not worth it" and measured.calls["prompts"] <= 1600
    assert "%" in measured.report(), "how many good ones the tried ones still allow"


def test_the_stages_share_no_row():
    chat = chat_of({})
    headroom(ROWS, policy=chat, prompts=["a", "b", "c"], top_up_calls=600)
    stages = {}
    for number, call in enumerate(chat.calls):
        stages.setdefault(call[-1]["content"], []).append(number)
    choosing = [numbers for numbers in stages.values() if len(numbers) == 4]
    others = [numbers for numbers in stages.values() if len(numbers) == 2]
    assert len(choosing) + len(others) == len(stages), "a row is in one stage alone"
    assert max(map(max, choosing)) < min(map(min, others))


def test_an_undecided_first_look_is_topped_up_once():
    def measure(**options):
        chat = chat_of({"": 0.5, "a": 0.5, "b": 0.6})
        measured = headroom(ROWS, policy=chat, prompts=["a", "b"], calls=140, **options)
        assert measured.calls["prompts"] == len(chat.calls)
        return measured

    first = measure()
    second = measure(top_up_calls=1000)
    assert first.prompts.verdict == "cannot tell"
    assert str(first.prompts.rows_needed) in first.report()
    assert first.calls["prompts"] <= 140 < second.calls["prompts"] <= 1140
    assert second.prompts.topped_up and second.prompts.gain.n == first.prompts.rows_needed
    too_small = measure(top_up_calls=20)
    assert not too_small.prompts.topped_up and too_small.prompts == first.prompts


def test_a_reference_writes_the_further_prompts():
    written = (
        "Well: <prompt>One.</prompt> <prompt> Two. </prompt><prompt></prompt><prompt>One.</prompt>"
    )
    reference = ScriptedChat([written])
    chat = chat_of({"Two.": 0.9, "": 0.3})
    found = headroom(ROWS, policy=chat, prompts=["Mine."], reference=reference, tried=5)
    assert found.texts == ["Mine.", "", "One.", "Two."]
    assert found.texts[found.prompts.chosen] == "Two."
    assert found.calls["prompts"] == len(chat.calls) + len(reference.calls) <= 512
    assert found.further is not None
    shown = reference.calls[0][0]["content"]
    examples = [row["question"] for row in ROWS if row["question"] in shown]
    last_messages = [call[-1]["content"] for call in chat.calls]
    measured = {question for question in last_messages if last_messages.count(question) == 2}
    assert len(examples) == 8 and len(measured) > 90 and not measured & set(examples), (
        "its examples measure no gain"
    )


def test_a_reference_that_writes_too_few_is_named(caplog):
    reference = ScriptedChat(["<prompt>One.</prompt>"])
    headroom(ROWS, policy=chat_of({}), prompts=["Mine."], reference=reference)
    assert "1 new ones of the 10 prompts" in caplog.text


def test_prompts_that_repeat_others_are_counted(caplog):
    texts = ["Mine.", "One.", "One.", *(f"Other {number}." for number in range(7))]
    reply = "".join(f"<prompt>{text}</prompt>" for text in texts)
    prompts = ["Mine.", "Mine."]
    measured = headroom(ROWS, policy=chat_of({}), prompts=prompts, reference=ScriptedChat([reply]))
    assert len(measured.texts) == 10
    assert "1 of the 2 prompts to compare repeat others" in caplog.text
    assert "2 of the 10 prompts that the reference LLM wrote repeat others: 10 prompts" in (
        caplog.text
    )


def test_a_reference_that_proposes_no_change():
    reference = ScriptedChat(["<prompt>Mine.</prompt>"])
    measured = headroom(ROWS, policy=chat_of({}), prompts=["Mine."], reference=reference)
    assert "proposed no change" in measured.stopped and "no prompt" not in measured.stopped


@pytest.mark.parametrize("start", ["", "Mine."])
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("no prompt", "no prompt"),
        ("<prompt>never closed", "no prompt"),
        (ServerFailed("down"), "did not answer: down"),
    ],
)
def test_a_reference_that_writes_nothing(reply, reason, start):
    measured = headroom(ROWS, policy=chat_of({}), prompts=[start], reference=ScriptedChat([reply]))
    assert measured.prompts is None
    assert reason in measured.stopped
    assert "Stopped early" in measured.report()


def test_a_recorded_reply_without_prompts_is_named():
    """The same command would read it again."""
    reference = ScriptedChat([Reply("no prompt", cached=True)])
    measured = headroom(ROWS, policy=chat_of({}), prompts=["Mine."], reference=reference)
    assert "recorded" in measured.stopped and "seed" in measured.stopped


def test_the_report_says_that_nothing_was_compared():
    alone = headroom(ROWS, policy=chat_of({}), prompts=["Mine."])
    assert "--reference-model" in alone.report()
    compared = headroom(ROWS, policy=chat_of({}), prompts=["Mine.", "Be brief."])
    assert "--reference-model" not in compared.report()


def test_reading_prompts_is_linear():
    assert read_proposals("<prompt>" * 200_000) == []
    assert len(read_proposals("<prompt>a</prompt>" * 200_000)) == 200_000


def test_few_rows_are_answered_twice_and_routed():
    """Each prompt is right on the rows of its own parity, each time."""

    def reply(messages):
        number = int(messages[-1]["content"].split()[1])
        wanted = ("even", "odd")[number % 2]
        return f"Answer: {'yes' if wanted in messages[0]['content'] else 'no'}"

    measured = headroom(ROWS[:60], policy=ScriptedChat(reply), prompts=["even", "odd"])
    assert measured.router.low > 0.2 and "router" in measured.report()
    many = headroom(ROWS, policy=ScriptedChat(reply), prompts=["even", "odd"], calls=200)
    assert many.router is None, "one answer to each row"


def test_an_outage_is_no_score():
    chat = chat_of({"": 0.5, "b": 0.9}, fail_on=lambda number: number % 10 == 0)
    measured = headroom(ROWS, policy=chat, prompts=["a", "b"])
    assert measured.prompts.verdict == "worth it" and measured.failed > 20
    assert measured.prompts.gain.n < 190 and "without a score" in measured.report()


def test_an_error_that_none_escapes_keeps_what_was_measured():
    chat = chat_of({"b": 0.9})
    broken = ScriptedChat([Misconfigured("wrong key", status=401)])
    measured = headroom(
        ROWS, policy=chat, prompts=["a", "b"], llm=broken, pool={"x": chat, "y": chat}
    )
    assert measured.prompts is not None and measured.requests is None and measured.pool is None
    assert "wrong key" in measured.stopped and set(measured.calls) == {"prompts", "requests"}


class Prompted:
    """An agent that is right if its system prompt says so."""

    limits = Limits(max_turns=5)
    environment = None

    def __init__(self):
        self.spec = AgentSpec(system_prompt="Mine.")
        self.asked = []

    def answer_all(self, rows, seed=0, progress=True):
        self.asked.append((self.spec.system_prompt, len(rows)))
        rollouts = []
        for number, row in enumerate(rows):
            chance = 0.9 if self.spec.system_prompt == "Good." else 0.3
            answer = (
                "yes"
                if luck(self.spec.system_prompt, row["question"], seed, number) < chance
                else "no"
            )
            rollout = Rollout([1], row=dict(row))
            rollout.add_turn(Sample([1]), Turn(answer, "answer", True, answer=answer))
            rollouts.append(rollout.finish("answered"))
        return rollouts


def test_an_agents_system_prompt_is_measured_too():
    agent = Prompted()
    measured = headroom(ROWS, policy=agent, prompts=["Mine.", "Good."])
    assert measured.prompts.verdict == "worth it"
    assert {prompt for prompt, _ in agent.asked} == {
        "Mine.",
        "Good.",
        None,
    }
    assert agent.spec.system_prompt == "Mine." and measured.calls["prompts"] == 0, "it asks nobody"


# --- signal ---------------------------------------------------------------------------------------


class Untrained:
    """An agent whose rollouts take `calls_each` calls; right as often as its question's number
    says.
    """

    spec = AgentSpec()

    def __init__(self, calls_each=2, max_turns=3, status=None):
        self.limits = Limits(max_turns=max_turns)
        self.environment = object() if calls_each else None
        self.calls_each = calls_each
        self.status = status
        self.rollouts = 0

    def answer_all(self, rows, seed=0, progress=True):
        rollouts = []
        for number, row in enumerate(rows):
            rollout = Rollout([1], row={**row, "prompt": row["question"]})
            replies = tuple(Reply("hm", usage=Usage(1, 1, 0.01)) for _ in range(self.calls_each))
            if replies:
                rollout.observations.append(Observation("hm", replies=replies))
            kind = int(row["question"].split()[1]) % 3
            answer = "yes" if luck(row["question"], seed, number) < (0.0, 0.5, 1.0)[kind] else "no"
            rollout.add_turn(Sample([1]), Turn(answer, "answer", True, answer=answer))
            rollouts.append(rollout.finish(self.status or "answered"))
        self.rollouts += len(rows)
        return rollouts


def test_the_signal_of_an_untrained_agent():
    agent = Untrained(calls_each=0)
    measured = headroom(ROWS, agent=agent, group_size=8)
    assert measured.signal.rows == 64 and agent.rollouts == 512 and measured.calls == {"signal": 0}
    assert measured.signal.differing.low < 1 / 3 < measured.signal.differing.high
    assert measured.signal.verdict == "worth it"
    assert measured.signal.pass_at[1].mean == pytest.approx(0.5, abs=0.15)
    assert measured.training == ("worth it", measured.signal.sentence())
    assert "pass@8" in measured.report()


@pytest.mark.parametrize(("calls", "max_turns"), [(100, 3), (512, 3), (512, 6), (64, 5)])
def test_a_signal_never_makes_more_calls_than_allowed(calls, max_turns):
    agent = Untrained(calls_each=2, max_turns=max_turns)
    measured = headroom(ROWS, agent=agent, group_size=4, calls=calls)
    assert measured.calls["signal"] == 2 * agent.rollouts <= calls
    assert measured.signal.rows == agent.rollouts / 4
    assert measured.cost_usd == pytest.approx(0.02 * agent.rollouts)


def test_rewards_of_the_training_are_the_signal():
    seen = []

    async def reward(prompts, completions, answers, rollout, **columns):
        seen.append((len(prompts), set(completions), answers[0]))
        return [0.25] * len(completions)

    measured = headroom(ROWS, agent=Untrained(calls_each=0), group_size=4, reward=reward)
    assert measured.signal.verdict == "not worth it" and measured.signal.pass_at[1].mean == 0
    assert seen[0] == (32, {"yes", "no"}, ["yes"])


def test_rollouts_lost_to_form_are_told():
    measured = headroom(ROWS, agent=Untrained(calls_each=0, status="truncated"), group_size=4)
    assert measured.signal.lost_to_form.mean == 1 and "form" in measured.report()


# --- refinement -----------------------------------------------------------------------------------


def puzzle_refiner(seed=0, **options):
    models = puzzle_models(seed)
    return ProRefiner(
        models["task"], models["feedback"], models["optimizer"], models["verifier"], **options
    )


def test_what_a_refinement_repairs_and_breaks():
    rows = make_puzzles(60, seed=3)
    settings = {"metric": score_puzzles, "prompts": [DEFAULT_PROMPT]}
    measured = headroom(rows, refiner=puzzle_refiner(max_steps=4), calls=1200, **settings)
    refinement = measured.refinement
    assert refinement.wrong + refinement.right == refinement.gain.n > 30
    assert refinement.repaired <= refinement.wrong
    moved = (refinement.repaired - refinement.broken) / refinement.gain.n
    assert (
        refinement.gain.mean
        == pytest.approx(moved)
        == pytest.approx(refinement.refined - refinement.plain)
    )
    assert 0 < measured.calls["refinement"] <= 1200 and "repaired" in measured.report()


@pytest.mark.parametrize("calls", [40, 100, 333])
def test_a_refinement_never_makes_more_calls_than_allowed(calls):
    measured = headroom(
        make_puzzles(60), refiner=puzzle_refiner(max_steps=4), calls=calls, metric=score_puzzles
    )
    assert 0 < measured.calls["refinement"] <= calls and measured.refinement.gain.n >= 2


def score_puzzles(predictions, answers):
    return [
        score_puzzle(prediction, accepted)
        for prediction, accepted in zip(predictions, answers, strict=True)
    ]


# --- requests and pools ---------------------------------------------------------------------------


def test_the_ceiling_of_requests():
    chat = chat_of({"": 0.3, "Split": 0.9})
    measured = headroom(ROWS, llm=chat)
    assert measured.requests.gain.low > 0.3
    assert measured.requests.low < 0.95 < measured.requests.high
    assert measured.calls == {"requests": 512} and measured.requests.repeats == 4
    last_messages = {call[-1]["content"] for call in chat.calls}
    assert len(last_messages) == 4 * 32 and all("question" in text for text in last_messages)


def test_training_is_not_worth_it_below_its_ceiling():
    """The agent has a signal, and the model it asks once knows no more than it does."""
    agent = Untrained(calls_each=0, max_turns=2)
    measured = headroom(ROWS, agent=agent, llm=chat_of({"": 0.05}), calls=1024)
    assert measured.signal.verdict == "worth it" and measured.training[0] == "not worth it"
    assert "perfectly" in measured.report()


def test_one_request_is_no_ceiling_of_several():
    """An agent that asks several times may learn what no single request brings out."""
    agent = Untrained(calls_each=0, max_turns=3)
    measured = headroom(ROWS, agent=agent, llm=chat_of({"": 0.05}), calls=1024)
    assert measured.training == ("worth it", measured.signal.sentence())


def test_a_pool_of_models():
    pool = {"small": chat_of({"": 0.2}, "s"), "large": chat_of({"": 0.9}, "l")}
    measured = headroom(ROWS, pool=pool, repeats=2, calls=200)
    assert measured.pool.each["large"].mean > measured.pool.each["small"].mean + 0.4
    assert measured.calls == {"pool": 200}
    assert "large" in measured.report()
    assert measured.pool.naive.n == 50


class Conductor(Untrained):
    """An agent that leads workers."""

    def __init__(self, environment, **options):
        super().__init__(**options)
        self.environment = environment


class ShortAgent:
    """A worker that is an agent: one call an episode, two at most."""

    limits = Limits(max_turns=3)
    environment = object()

    def answer_all(self, rows, seed=0, progress=True):
        raise NotImplementedError

    async def aanswer(self, text, seed=0):
        rollout = Rollout([1], row={"question": text})
        reply = Reply("thinking", usage=Usage(1, 1, 0.5))
        rollout.observations.append(Observation("hm", replies=(reply,)))
        rollout.add_turn(Sample([1]), Turn("yes", "answer", True, answer="yes"))
        return rollout.finish("answered")


def workers():
    """A model, a tool and an agent; the tool is right for even numbers, the agent always."""

    def parity(text):
        return "yes" if int(text.split()[1]) % 2 == 0 else "no"

    chat = chat_of({"": 0.3}, "w")
    return Workers(
        {
            "model": Worker(chat, "knows little", usd=0.25),
            "tool": Worker(parity, "knows even numbers", takes="text"),
            "agent": Worker(ShortAgent(), "knows all"),
        }
    )


def test_workers_are_measured_alone_with_an_oracle():
    measured = headroom(ROWS, pool=workers(), repeats=2, calls=160)
    each = measured.pool.each
    assert each["agent"].mean == 1.0 and each["tool"].mean == pytest.approx(0.5, abs=0.25)
    assert each["model"].mean < 0.6 and measured.pool.naive.mean == 1.0
    assert measured.pool.naive.n == 160 // (2 * 4), "the agent may take two calls"
    assert measured.calls == {"pool": 2 * 20 * 3} and measured.costs["pool"] > 2 * 20 * 0.5
    assert "agent" in measured.report() and measured.figures.find("router").high == 1.0


def test_a_conductors_workers_are_measured_by_themselves():
    agent = Conductor(workers(), calls_each=2)
    measured = headroom(ROWS, agent=agent, group_size=4, repeats=1, calls=300)
    assert set(measured.pool.each) == {"model", "tool", "agent"} and measured.calls["pool"] <= 300
    alone = headroom(ROWS, agent=Conductor(Workers({"one": chat_of({})})), calls=300, group_size=4)
    assert alone.pool is None, "an oracle needs two workers to choose from"


@pytest.mark.parametrize("calls", [70, 200, 512])
def test_a_conductors_calls_are_within_the_number(calls):
    """Each of its two asking turns may make four calls, each of which may take two."""
    agent = Conductor(workers(), calls_each=16)
    measured = headroom(ROWS, agent=agent, group_size=4, repeats=1, calls=calls)
    assert measured.calls["signal"] == 16 * agent.rollouts <= calls
    with pytest.raises(ValueError, match="64"):
        headroom(ROWS, agent=agent, group_size=4, repeats=1, calls=63)


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": ScriptedChat(["yes"]), "prompts": "Mine."},
        {"policy": ScriptedChat(["yes"]), "prompts": [""]},
        {"policy": ScriptedChat(["yes"]), "prompts": ["a", "b"], "calls": 20},
        {"agent": Untrained(), "group_size": 1},
        {"agent": Untrained(), "group_size": 64, "calls": 100},
        {"refiner": puzzle_refiner(max_steps=25), "calls": 100},
        {"llm": ScriptedChat(["yes"]), "requests": DEFAULT_REQUESTS[:1]},
        {"llm": ScriptedChat(["yes"]), "requests": ["no place", "{question}"]},
        {"llm": ScriptedChat(["yes"]), "calls": 20},
        {"llm": ScriptedChat(["yes"]), "metric": "no_such_metric"},
    ],
)
def test_what_cannot_be_measured_is_told_before_a_call(options):
    with pytest.raises(ValueError):
        headroom(ROWS, **options)
    model = options.get("policy") or options.get("llm")
    assert model is None or not model.calls


def test_bad_rows_are_told_before_a_call():
    with pytest.raises(ValueError, match="answers"):
        headroom([{"question": "?"}], policy=chat_of({}))


def test_the_same_seed_measures_the_same_rows():
    def asked(seed):
        chat = ScriptedChat(lambda messages: "Answer: yes")
        headroom(ROWS, policy=chat, prompts=["a", "b"], seed=seed, calls=100)
        return sorted(call[-1]["content"] for call in chat.calls)

    assert asked(1) == asked(1) != asked(2)


def test_settings_may_be_passed_as_an_object():
    settings = HeadroomSettings(policy=chat_of({}), prompts=["a", "b"], calls=100)
    measured = headroom(ROWS, settings, top_up_calls=100, delta=0.2)
    assert measured.texts == ["a", "b", ""] and measured.delta == 0.2
    assert measured.calls["prompts"] <= 200 and settings.delta is None
    with pytest.raises(TypeError, match="prompt"):
        headroom(ROWS, settings, prompt="a")


def test_a_result_is_saved_and_awaited(tmp_path):
    chat = chat_of({"b": 0.9})
    measured = asyncio.run(
        aheadroom(ROWS, policy=chat, prompts=["a", "b"], llm=chat, agent=Untrained(calls_each=0))
    )
    path = measured.save(tmp_path / "run")
    saved = json.loads(path.read_text())
    assert path.name == HEADROOM_FILE and saved["prompts"]["verdict"] == measured.prompts.verdict
    assert saved["prompts"]["sentence"] in measured.report()
    assert saved["signal"]["pass_at"]["1"]["n"] == 64
    assert saved["requests"]["low"] <= saved["requests"]["high"] and saved["training"]
    assert Headroom().report().startswith("Calls: none")
    json.dumps(saved, allow_nan=False)


def test_a_model_that_refuses_every_request():
    chat = ScriptedChat([BadRequest("no")])
    measured = headroom(ROWS, policy=chat, prompts=["a", "b"], calls=100)
    assert "BadRequest: no" in measured.stopped and len(chat.calls) < 20, "it ends after one prompt"
    assert measured.prompts is None and measured.failed > 0 and "score" in measured.stopped
    other = headroom(
        ROWS,
        policy=ScriptedChat([BadRequest("no")]),
        prompts=["a", "b"],
        llm=chat_of({}),
        calls=100,
    )
    assert other.prompts is None and other.requests is not None, (
        "another part may ask another model"
    )


def test_a_second_measurement_pays_for_nothing(tmp_path):
    """All parts at an endpoint, through a replay cache: no request is sent twice."""

    def reply(body, number):
        text = body["messages"][-1]["content"]
        if "<prompt>" in text:
            return "<prompt>Take care.</prompt>"
        return f"Answer: {'yes' if luck(text, number) < 0.5 else 'no'}"

    def measure(seed):
        with closing(ReplayCache(tmp_path / "replies.sqlite")) as cache:
            options = {"base_url": server.base_url, "api_key": "k", "cache": cache}
            small, large = (OpenAIChat(name, **options) for name in ("gpt-4o-mini", "gpt-4o"))
            with small, large:
                return headroom(
                    ROWS,
                    policy=small,
                    reference=large,
                    tried=4,
                    llm=large,
                    pool={"small": small, "large": large},
                    calls=100,
                    seed=seed,
                )

    with LoopbackServer(reply) as server:
        first = measure(seed=0)
        requests = len(server.requests)
        second = measure(seed=0)
        # The large model's plain requests are those of the pool, too: they were sent once.
        assert requests == sum(first.calls.values()) - sum(first.replayed.values())
        assert len(server.requests) == requests
        measure(seed=1)
        assert len(server.requests) > requests, "other rows, other requests"
    assert second.calls == second.replayed == first.calls and first.cost_usd > 0
    assert second.cost_usd == 0.0 and set(second.costs.values()) == {0.0}
    assert "replayed" in second.report() and second.prompts == first.prompts
    # Replayed calls have cost nothing, whatever their price.
    figures = HeadroomFigures.from_json(second.to_json())
    assert "no price known" not in second.report() + figures.spending


def test_figures_are_read_from_the_file(tmp_path):
    chat = chat_of({"b": 0.9})
    measured = headroom(
        ROWS, policy=chat, prompts=["a", "b"], llm=chat, agent=Untrained(calls_each=0)
    )
    measured.save(tmp_path)
    figures = HeadroomFigures.read(tmp_path)
    assert figures == HeadroomFigures.read(tmp_path / HEADROOM_FILE) == measured.figures
    floor = figures.find("floor")
    ceiling = figures.find("ceiling")
    assert floor.mean == measured.signal.pass_at[1].mean and ceiling.high == measured.requests.high
    assert figures.find("prompt_gain").low == measured.prompts.gain.low
    assert figures.find("differing").mean == measured.signal.differing.mean
    assert figures.calls == sum(measured.calls.values()) and figures.sentences["training"]
    assert len(figures.lines()) == len(figures.measured) + 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"signal": 1, "delta": 0.1}', '{"pool": {}}'])
def test_a_damaged_file_is_none(tmp_path, text):
    (tmp_path / HEADROOM_FILE).write_text(text)
    assert HeadroomFigures.read(tmp_path) is None
    assert HeadroomFigures.read(tmp_path / "nowhere") is None
