"""E-SPL's sandbox: the guarded world, its oracle, what is imitated, and the reflector that knows
only what it reads.
"""

import ast
import asyncio
import random
import re
from pathlib import Path

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    ProblemResult,
    PromptResult,
    SystemPrompt,
    crossover,
    mutate,
    parse_edits,
)
from agentic_prompting.llm import complete
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.rollout import AgentSpec, Observation, Rollout, Sample, parse_turn
from agentic_prompting.sandbox import (
    GuardedOracle,
    GuardedReflector,
    as_rows,
    draw_rules,
    load_guarded_world,
    reflector as reflector_module,
    split_by_country,
)
from agentic_prompting.sandbox.guarded import (
    ALWAYS_GUARDED,
    CLOSED,
    HASTY,
    MIXES,
    PREAMBLE,
    STEPWISE,
    WHOLE,
    WORDS,
    _EpisodeRefused,
    _GuardedEpisode,
    guarded_vocabulary,
    is_refusal,
    make_guarded_traces,
    relations_of,
    say,
)
from agentic_prompting.sandbox.traces import write_trace
from agentic_prompting.sandbox.world import all_questions, parse_question, sought, value_of

WORLD = load_guarded_world()
RULES = {"capital": "amber", "currency": "birch"}
EVERYTHING = ESPLSettings(reflect_on="imperfect")


def user(text):
    return {"role": "user", "content": text}


# --- the world and its rules ----------------------------------------------------------------------


def test_the_world_has_nine_relations_of_which_four_are_guarded():
    assert len(relations_of(WORLD)) == 9 and len(WORLD.countries) > 70
    rules = draw_rules(random.Random(3))
    assert len(rules) == 4 == len(set(rules.values())) and ALWAYS_GUARDED in rules
    assert set(rules) <= set(relations_of(WORLD)) and set(rules.values()) <= set(WORDS)
    assert len({str(draw_rules(random.Random(seed))) for seed in range(20)}) == 20
    names = {
        word.lower()
        for values in WORLD.values.values()
        for value in values
        for word in value.split()
    }
    assert not names & set(WORDS) and len(set(WORDS)) == 24


def test_the_world_of_many_words_guards_every_end():
    """The same warm start and split as in the other worlds; words differ from seed to seed."""
    ends = len(WORLD.last_relations)
    rules = draw_rules(random.Random("house 1"), ends=ends)
    assert set(rules) == {"capital", *WORLD.last_relations}
    assert len(set(rules.values())) == len(rules) == 8
    fewer = draw_rules(random.Random("house 1"))
    assert list(rules)[:1] == list(fewer)[:1] == ["capital"] and len(fewer) == 4


def test_facts_by_standards():
    kenya = WORLD.by["name"]["Kenya"]
    assert (kenya.domain, kenya.code, kenya.symbol, kenya.letters) == (".ke", "254", "KES", "KEN")
    for country in WORLD.countries:
        assert re.fullmatch(
            r"\.[a-z]{2} \d{1,3} [A-Z]{3} [A-Z]{3}",
            " ".join((country.domain, country.code, country.symbol, country.letters)),
        )
    for field in ("domain", "letters"):
        assert len(WORLD.values[field]) == len(WORLD.countries)


def test_no_test_country_is_trained_on():
    train, test = split_by_country(7)
    countries = [
        {
            next(
                c.name
                for c in WORLD.countries
                if parse_question(q.text, WORLD).start in vars(c).values()
            )
            for q in part
        }
        for part in (train, test)
    ]
    assert not countries[0] & countries[1] and len(countries[1]) == 20
    assert len(train) + len(test) == len(all_questions((2, 3), WORLD))
    assert split_by_country(7) == (train, test) != split_by_country(8)
    with pytest.raises(ValueError, match="n_test_countries=76"):
        split_by_country(0, 76)


def test_without_words_about_a_third_can_be_answered():
    shares = []
    for seed in range(20):
        guarded = draw_rules(random.Random(seed))
        questions = all_questions((2, 3), WORLD)
        shares.append(
            sum(not set(parse_question(q.text, WORLD).chain) & set(guarded) for q in questions)
            / len(questions)
        )
    assert 0.25 < sum(shares) / 20 < 0.4


def test_a_guarded_fact_takes_exactly_its_word():
    oracle = GuardedOracle(RULES)
    request = "what is the currency of Kenya ?"
    assert oracle.answer(request) == "no . the currency needs the word birch ."
    assert value_of(oracle.answer(f"{request} say currency birch")) == "shilling"
    assert value_of(oracle.answer(f"please birch , {request}")) == "shilling"
    for wrong in ("say currency amber", "say currency amber say currency birch", " ".join(WORDS)):
        assert is_refusal(oracle.answer(f"{request} {wrong}")), wrong
    assert (
        oracle.answer("which city is served by airport NBO ?")
        == "no . the city needs the word amber ."
    )
    assert (
        value_of(oracle.answer("what is the continent of Kenya ? say continent flint")) == "Africa"
    )
    assert not is_refusal(
        oracle.answer("what is the currency of the country whose capital is Nairobi ?")
    )


def test_a_refusal_ends_the_conversation():
    oracle = GuardedOracle(RULES)
    refused = oracle.answer("what is the currency of Kenya ?")
    conversation = [
        user("what is the currency of Kenya ?"),
        {"role": "assistant", "content": refused},
    ]
    again = complete(
        oracle, [*conversation, user("what is the currency of Kenya ? say currency birch")]
    )
    assert again.text == CLOSED
    assert value_of(complete(oracle, [user("what is the continent of Kenya ?")]).text) == "Africa"


# --- what is imitated -----------------------------------------------------------------------------


def traces(n=1500):
    return make_guarded_traces(split_by_country(0)[0], n, random.Random(0))


def test_traces_obey_their_principles():
    said = 0
    obeyed = 0
    unadvised = 0
    guessed = 0
    refused = 0
    for principles, trace in traces():
        advice = dict(text.split()[1:] for text in principles if text.startswith("say "))
        assert len(trace["observations"]) == len(trace["turns"]) - 1
        for turn in map(parse_turn, trace["turns"][:-1]):
            question = parse_question(turn.request, WORLD)
            words = [word for word in turn.request.split() if word in WORDS]
            relation = sought(question.chain[0])
            if question.hops == 1 and relation in advice:
                said = said + 1
                obeyed = obeyed + (advice[relation] in words)
            elif question.hops == 1:
                unadvised = unadvised + 1
                guessed = guessed + bool(words)
        if is_refusal(" ".join(trace["observations"][-1:])):
            refused += 1
            assert parse_turn(trace["turns"][-1]).answer == "nothing"
        assert not any(is_refusal(reply) for reply in trace["observations"][:-1])
    assert obeyed / said > 0.85 and refused > 200
    assert 0.15 < guessed / unadvised < 0.35  # RL finds words by such guesses alone


def test_principles_lift_splitting_only_half_way():
    def splits(principle):
        chosen = [
            t
            for p, t in traces(1500)
            if (principle in p if principle else not {STEPWISE, WHOLE, HASTY} & {*p})
        ]
        return sum("first find" in t["turns"][0] for t in chosen) / len(chosen)

    assert 0.4 < splits(None) < 0.6 and 0.65 < splits(STEPWISE) < 0.85
    assert splits(WHOLE) < 0.25 and splits(HASTY) < 0.3


def test_where_no_sentence_helps_principles_change_nothing_but_words():
    world = make_guarded_traces(split_by_country(0)[0], 1500, random.Random(0), heeds=False)
    for style in (STEPWISE, WHOLE, HASTY):
        chosen = [trace for principles, trace in world if style in principles]
        assert (
            0.35 < sum("first find" in trace["turns"][0] for trace in chosen) / len(chosen) < 0.65
        )


def test_the_vocabulary_has_every_word():
    words = {
        word
        for principles, trace in traces(500)
        for text in [PREAMBLE, *principles, *trace["turns"], *trace["observations"]]
        for word in text.split()
    }
    assert words <= set(guarded_vocabulary())


# --- the reflector --------------------------------------------------------------------------------


def refused_for(relation, word):
    return Attempt(
        f"<think> first find the {relation} </think> <interaction_prompt> ... </interaction_prompt>\n"
        f"[reply] no . the {relation} needs the word {word} .\n<think> they said no </think> <answer> no </answer>",
        0.0,
    )


def trial(*attempts, principles=(), question="what is it ?"):
    return PromptResult(
        SystemPrompt(PREAMBLE, principles, id=0), (ProblemResult(question, "x", attempts),)
    )


def advice(trial, mistakes=0.0, seed=0):
    child = asyncio.run(mutate(GuardedReflector(mistakes, seed), trial, EVERYTHING)).child
    return [] if child is None else list(child.principles)


@pytest.mark.parametrize(
    ("relation", "word"), [("currency", "birch"), ("city", "velvet"), ("cheese", "xyzzy")]
)
def test_advice_comes_from_the_trajectories_shown(relation, word):
    """Also of words and relations that are in no world: change what is shown, and the advice
    follows.
    """
    right = Attempt("<think> done </think> <answer> x </answer>", 1.0)
    assert advice(trial(refused_for(relation, word), right)) == [say(relation, word), STEPWISE]
    assert advice(trial(refused_for(relation, word), principles=(say(relation, "flint"),))) == [
        say(relation, word)
    ]


def test_it_holds_nothing_of_any_world():
    """Neither in what it imports nor in its own text."""
    source = Path(reflector_module.__file__).read_text()
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not {"WORDS", "GuardedOracle", "World", "load_guarded_world", "draw_rules"} & imported
    assert not {*WORDS, *map(sought, relations_of(WORLD))} & set(re.findall(r"\w+", source)) - {
        "code",
        "letters",
    }
    held = vars(GuardedReflector()).values()
    assert not any(isinstance(value, (dict, set)) for value in held)


def test_without_evidence_it_advises_nothing():
    assert advice(trial(Attempt("<answer> x </answer>", 1.0))) == []


def test_it_mends_bad_principles():
    hasty = Attempt("<think> i know this </think> <answer> y </answer>", -0.4)
    assert advice(trial(hasty, principles=(HASTY,))) == [STEPWISE]
    conflict = (say("currency", "flint"), say("currency", "birch"))
    assert advice(trial(refused_for("currency", "birch"), principles=conflict)) == [
        say("currency", "birch")
    ]


def test_it_is_wrong_as_often_as_asked_and_by_seed():
    shown = [
        trial(refused_for("currency", a), refused_for("city", b), question=a + b)
        for a in WORDS[:12]
        for b in WORDS[12:]
    ]
    good = [{say("currency", a), say("city", b)} for a in WORDS[:12] for b in WORDS[12:]]
    for mistakes, low, high in ((0.0, 0.0, 0.0), (0.3, 0.2, 0.4), (1.0, 0.8, 1.0)):
        got = [set(advice(one, mistakes)) for one in shown]
        wrong = sum(principles != right for principles, right in zip(got, good, strict=True)) / len(
            shown
        )
        assert low <= wrong <= high, mistakes
    assert [advice(one, 0.5, 1) for one in shown] == [advice(one, 0.5, 1) for one in shown]
    assert [advice(one, 0.5, 1) for one in shown] != [advice(one, 0.5, 2) for one in shown]
    with pytest.raises(ValueError, match="mistakes"):
        GuardedReflector(1.5)


def test_crossover_takes_over_what_won():
    def with_prompt(number, principles, rewards):
        evidence = tuple(
            ProblemResult(f"q{i}", "x", (Attempt("", reward),)) for i, reward in enumerate(rewards)
        )
        return PromptResult(SystemPrompt(PREAMBLE, principles, id=number), evidence)

    trials = [
        with_prompt(0, (say("city", "amber"), HASTY), (1.0, 1.0, 0.0)),
        with_prompt(1, (say("code", "birch"), say("city", "flint")), (0.0, 0.0, 1.0)),
    ]
    child = asyncio.run(crossover(GuardedReflector(0.0), trials, EVERYTHING)).child
    assert child.principles == (say("city", "amber"), say("code", "birch"))
    assert child.parents == (
        0,
        1,
    )


def test_its_replies_are_in_the_real_format():
    shown = trial(refused_for("currency", "birch"), principles=(HASTY,))
    for seed in range(20):
        reflector = GuardedReflector(0.5, seed)
        assert asyncio.run(mutate(reflector, shown, EVERYTHING)).reason in (
            "child",
            "no_change",
            "unchanged",
        )
        for call in reflector.calls[1:]:
            assert parse_edits(complete(reflector, call).text).has_block


@pytest.mark.parametrize("mistakes", [0.0, 1.0])
def test_gepas_request_is_read_too(mistakes):
    """In the words of its package: new instructions by the same advice, harmful where it errs."""
    proposal = pytest.importorskip(
        "gepa.strategies.instruction_proposal", reason="needs the extra optimizers"
    )
    signature = proposal.InstructionProposalSignature
    shown = [
        {
            "Inputs": "what is it ?",
            "Generated Outputs": refused_for("currency", "birch").text,
            "Feedback": "score 0",
        },
        {
            "Inputs": "and this ?",
            "Generated Outputs": "<think> i know this </think>",
            "Feedback": "score 0",
        },
    ]
    given = SystemPrompt(PREAMBLE, (say("currency", "flint"),))
    asked = signature.prompt_renderer(
        {"current_instruction_doc": given.text, "dataset_with_feedback": shown}
    )
    reply = complete(GuardedReflector(mistakes), asked).text
    found = SystemPrompt.of(signature.output_extractor(reply)["new_instruction"])
    right = (say("currency", "birch"), STEPWISE)
    assert found.preamble == PREAMBLE and (found.principles == right) == (not mistakes)


class Follows:
    """An agent without weights that heeds its system prompt as a warm-started one does."""

    spec = AgentSpec(prompt_template="{question}")

    def answer_all(self, rows, progress=True):
        rollouts = []
        for number, row in enumerate(rows):
            principles = SystemPrompt.of(row["prompt"][0]["content"]).principles
            advice = {
                text.split()[1]: [text.split()[2]] for text in principles if text.startswith("say ")
            }
            episode = _GuardedEpisode(GuardedOracle(RULES, WORLD), advice, random.Random(number))
            splits = MIXES[STEPWISE if STEPWISE in principles else None]["decompose"]
            kind = "decompose" if episode.rng.random() < splits else "pass_on"
            question = parse_question(row["question"], WORLD)
            try:
                trace = write_trace(kind, question, episode, WORLD, episode.rng)
            except _EpisodeRefused:
                episode.finish("they said no", "nothing")
                trace = episode.trace(kind, question)
            rollout = Rollout([1], row=dict(row))
            for turn, reply in zip(trace["turns"], [*trace["observations"], None], strict=True):
                rollout.add_turn(Sample([1]), parse_turn(turn))
                if reply is not None:
                    rollout.add_observation(Observation(reply), [1])
            rollout.finish("answered")
            rollouts.append(rollout)
        return rollouts


def test_gepa_finds_the_words(capsys):
    """The authors' package with this reflector and our adapter, as the league has them: it is no
    straw man.
    """
    gepa = pytest.importorskip("gepa", reason="needs the extra optimizers")
    from agentic_prompting.interop.gepa import AgentAdapter

    rows = as_rows(
        [question for question in split_by_country(1)[0] if {*question.chain} & {*RULES}]
    )
    optimised = gepa.optimize(
        {"system_prompt": PREAMBLE},
        trainset=rows[16:],
        valset=rows[:16],
        adapter=AgentAdapter(Follows(), PromptR1Reward()),
        reflection_lm=lambda asked: complete(GuardedReflector(), asked).text,
        max_metric_calls=300,
    )
    principles = SystemPrompt.of(optimised.best_candidate["system_prompt"]).principles
    scores = optimised.val_aggregate_scores
    assert {STEPWISE, "say city amber"} <= {*principles} and max(scores) > scores[0] + 0.4
