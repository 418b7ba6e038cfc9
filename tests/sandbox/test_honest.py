"""The reflector that does not flatter: how much it reads, how often it errs, and that it errs in
the same way again.
"""

import asyncio

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    ProblemResult,
    PromptResult,
    SystemPrompt,
    crossover,
    mutate,
    revise,
)
from agentic_prompting.llm import complete
from agentic_prompting.sandbox import HonestReflector
from agentic_prompting.sandbox.guarded import HASTY, PREAMBLE, STEPWISE, WHOLE, WORDS, say

EVERYTHING = ESPLSettings(reflect_on="imperfect")
WAYS = ("paper", "one_call", "gepa")


def refused(relation, word, before=""):
    refusal = f"[reply] no . the {relation} needs the word {word} ."
    return f"<think> ask </think> {before}\n{refusal}\n<answer> nothing </answer>"


def shown(*problems, principles=()):
    """The results of a prompt: question and attempts of each problem."""
    cells = [
        ProblemResult(question, "x", tuple(Attempt(text, 0.0) for text in texts))
        for question, *texts in problems
    ]
    return PromptResult(SystemPrompt(PREAMBLE, principles, id=0), tuple(cells))


def advice(way, reflector, result):
    """The principles of the child that a way of reflecting gives."""
    if way == "gepa":
        proposal = pytest.importorskip(
            "gepa.strategies.instruction_proposal", reason="needs the extra optimizers"
        )
        signature = proposal.InstructionProposalSignature
        examples = [
            {
                "Inputs": problem.question,
                "Generated Outputs": attempt.text,
                "Feedback": "score 0; accepted answers: ['x']",
            }
            for problem in result.problems
            for attempt in problem.attempts
        ]
        values = {"current_instruction_doc": result.prompt.text, "dataset_with_feedback": examples}
        reply = complete(reflector, signature.prompt_renderer(values)).text
        return SystemPrompt.of(signature.output_extractor(reply)["new_instruction"]).principles
    child = asyncio.run((mutate if way == "paper" else revise)(reflector, result, EVERYTHING)).child
    return () if child is None else child.principles


@pytest.mark.parametrize("way", WAYS)
def test_right_advice_comes_from_what_it_reads(way):
    assert advice(way, HonestReflector(1.0), shown(("q", refused("currency", "birch")))) == (
        say("currency", "birch"),
    )
    known = shown(("q", refused("cheese", "xyzzy")), principles=(say("cheese", "plugh"),))
    assert advice(way, HonestReflector(1.0), known) == (say("cheese", "xyzzy"),)


@pytest.mark.parametrize("way", ["one_call", "gepa"])
def test_it_reads_two_attempts_of_a_request(way):
    problems = [
        (f"q{n}", refused(relation, WORDS[n]))
        for n, relation in enumerate(("city", "code", "symbol"))
    ]
    assert advice(way, HonestReflector(1.0), shown(*problems)) == (
        say("city", WORDS[0]),
        say("code", WORDS[1]),
    )
    texts = [
        "q",
        *(refused(relation, WORDS[n]) for n, relation in enumerate(("city", "code", "symbol"))),
    ]
    assert len(advice("paper", HonestReflector(1.0), shown(texts))) == 2, (
        "a critique has several attempts at a problem"
    )


@pytest.mark.parametrize("way", WAYS)
def test_of_a_long_attempt_it_does_not_see_the_end(way):
    late = shown(("q", refused("currency", "birch", before="x" * 400)))
    assert advice(way, HonestReflector(1.0), late) == (STEPWISE,), (
        "no reply is in sight: it seems to have answered at once"
    )


@pytest.mark.parametrize("accuracy", [0.5, 0.7, 0.9])
def test_it_is_right_as_often_as_asked(accuracy):
    reflector = HonestReflector(accuracy, seed=1)
    pairs = [(f"what is {n} ?", word) for n in range(20) for word in WORDS]
    right = [
        advice("one_call", reflector, shown((q, refused("city", w)))) == (say("city", w),)
        for q, w in pairs
    ]
    assert sum(right) / len(right) == pytest.approx(accuracy, abs=0.07)
    with pytest.raises(ValueError, match="accuracy"):
        HonestReflector(1.5)


def test_it_errs_in_the_same_way_whoever_asks():
    """The same evidence gives the same advice, in a critique, in one call and in GEPA's request;
    another seed other.
    """
    cases = [shown((f"what is {word} ?", refused("city", word))) for word in WORDS]
    given = {way: [advice(way, HonestReflector(0.5, 3), case) for case in cases] for way in WAYS}
    assert given["one_call"] == given["paper"] == given["gepa"]
    wrong = [
        principles
        for word, principles in zip(WORDS, given["paper"], strict=True)
        if say("city", word) not in principles
    ]
    assert 5 < len(wrong) < 19 and all({*one} <= {WHOLE, HASTY} for one in wrong)
    assert given["paper"] != [advice("paper", HonestReflector(0.5, 4), one) for one in cases]


def test_to_cross_it_errs_too():
    def result(number, principles, rewards):
        cells = tuple(
            ProblemResult(f"q{n}", "x", (Attempt("", reward),)) for n, reward in enumerate(rewards)
        )
        return PromptResult(SystemPrompt(PREAMBLE, principles, id=number), cells)

    batch = [
        result(0, (say("city", "amber"),), (1.0, 1.0, 0.0)),
        result(1, (say("code", "birch"),), (0.0, 0.0, 1.0)),
    ]
    children = [
        asyncio.run(crossover(HonestReflector(0.5, seed), batch, EVERYTHING)).child
        for seed in range(40)
    ]
    right = [
        child is not None and child.principles == (say("city", "amber"), say("code", "birch"))
        for child in children
    ]
    assert 10 <= sum(right) <= 30
