"""Lossless drafting: the output of plain greedy decoding, whatever the draft, the model's shape and
the batch.
"""

import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentic_prompting.local import Sampling, TransformersEngine
from agentic_prompting.local.drafting import TokenDraft
from agentic_prompting.rollout import SampleRequest
from support.model_shapes import GROUPED_QUERY_SHAPE
from support.sampling import sample

ENDS = [3, 5]
VOCABULARY = GROUPED_QUERY_SHAPE["vocab_size"]
GREEDY = Sampling(temperature=0)
MODELS = {
    "qwen3": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**GROUPED_QUERY_SHAPE, tie_word_embeddings=True),
    ),
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**GROUPED_QUERY_SHAPE)),
    "mistral, sliding window": (
        MistralForCausalLM,
        lambda: MistralConfig(**GROUPED_QUERY_SHAPE, sliding_window=8),
    ),
    "gemma2, sliding window": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(**GROUPED_QUERY_SHAPE, sliding_window=8),
    ),
    "gemma3, mixed windows": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **GROUPED_QUERY_SHAPE,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    kind, config = MODELS[request.param]
    torch.manual_seed(0)
    return kind(config()).eval()


def reference(model, context, limit):
    """transformers' own greedy decoding, one sequence at a time."""
    output = model.generate(
        torch.tensor([context]),
        attention_mask=torch.ones(1, len(context), dtype=torch.long),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=ENDS,
        pad_token_id=0,
    )
    return output[0, len(context) :].tolist()


DRAFTS = ("right", "half", "one wrong", "one missing", "too long", "nonsense", "empty")


def spoil(kind, output, rng):
    """Return a draft of a kind of `DRAFTS` for an output."""
    place = rng.randrange(len(output))
    drafts = {
        "right": list(output),
        "half": output[: len(output) // 2],
        "one wrong": [*output[:place], rng.randrange(VOCABULARY), *output[place + 1 :]],
        "one missing": [*output[:place], *output[place + 1 :]],
        "too long": [*output, *(rng.randrange(VOCABULARY) for _ in range(10))],
        "nonsense": [rng.randrange(VOCABULARY) for _ in range(20)],
        "empty": [],
    }
    return drafts[kind]


def test_equal_to_plain_greedy_decoding(model):
    """Batches of ragged contexts, drafts and limits.

    25 rows a model; none may differ in a single token.
    """
    rng = random.Random(1)
    kinds = [rng.choice(DRAFTS) for _ in range(25)]
    requests = []
    expected = []
    for kind in kinds:
        context = [rng.randrange(6, VOCABULARY) for _ in range(rng.randint(1, 30))]
        limit = rng.randint(1, 40)
        output = reference(model, context, limit)
        expected.append(output)
        requests.append(SampleRequest(context, limit, 0, draft=spoil(kind, output, rng)))
    engine = TransformersEngine(model, None, GREEDY, end_of_turn_ids=ENDS)
    samples = []
    for begin in range(0, 25, 5):
        samples += sample(engine, requests[begin : begin + 5])
    for kind, drafted, output in zip(kinds, samples, expected, strict=True):
        assert drafted.ids == output, kind
        assert drafted.finished == (drafted.ids[-1] in ENDS), kind
        assert drafted.drafted <= len(drafted.ids), kind


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)], ids=str
)
def test_drafts_change_nothing_that_is_drawn_by_chance(model, sampling):
    """The random numbers belong to the places of a text, so a guess is right or wrong there, too."""
    rng = random.Random(2)
    engine = TransformersEngine(model, None, sampling, end_of_turn_ids=ENDS)
    plain = []
    for length in (3, 8, 15, 16):
        context = [rng.randrange(6, VOCABULARY) for _ in range(length)]
        plain.append(SampleRequest(context, 30, length))
    expected = [one.ids for one in sample(engine, plain)]
    steps = engine.stats["row_steps"]
    drafts = [replace(request, draft=ids) for request, ids in zip(plain, expected, strict=True)]
    assert [one.ids for one in sample(engine, drafts)] == expected
    if sampling == Sampling():
        assert engine.stats["row_steps"] - steps == 4, "right drafts cost one pass"
    for kind in DRAFTS:
        spoiled = [
            replace(request, draft=spoil(kind, ids, rng))
            for request, ids in zip(plain, expected, strict=True)
        ]
        assert [one.ids for one in sample(engine, spoiled)] == expected, kind


def test_a_right_draft_costs_one_pass(model):
    context = list(range(10, 30))
    expected = reference(model, context, 40)
    engine = TransformersEngine(model, None, GREEDY, end_of_turn_ids=ENDS)
    (one,) = sample(engine, [SampleRequest(context, 40, 0, draft=expected)])
    assert (one.ids, engine.stats["steps"]) == (expected, 1)


def test_a_slow_row_holds_nobody_up(model):
    """A row with a right draft is done in the first pass although its neighbour has none."""
    contexts = [list(range(10, 20)), list(range(30, 60))]
    expected = [reference(model, context, 30) for context in contexts]
    ended = []

    class Watched(TransformersEngine):
        def finish(self, results):
            results = list(results)
            ended.extend((self.stats["steps"], given.ids) for _, given in results)
            super().finish(results)

    engine = Watched(model, None, GREEDY, end_of_turn_ids=ENDS)
    sample(
        engine,
        [SampleRequest(contexts[0], 30, 0, draft=expected[0]), SampleRequest(contexts[1], 30, 0)],
    )
    assert ended[0] == (1, expected[0]) and ended[1] == (1 + len(expected[1]), expected[1])


@pytest.mark.parametrize("change", ["put in", "left out", "replaced"])
def test_tokens_after_a_change_are_guessed(change):
    """One token that the draft lacks, has too many or has wrong costs a pass, or two where it could
    be either.
    """
    expected = list(range(100, 140))
    draft = TokenDraft(
        {
            "put in": expected[:20] + expected[21:],
            "left out": [*expected[:20], 7, *expected[20:]],
            "replaced": [*expected[:20], 7, *expected[21:]],
        }[change]
    )
    written = []
    passes = 0
    while len(written) < len(expected):
        guess = draft.guess(written, min(10 if written else 100, len(expected) - len(written) - 1))
        agreed = 0
        while agreed < len(guess) and guess[agreed] == expected[len(written) + agreed]:
            agreed += 1
        written += expected[len(written) : len(written) + agreed + 1]
        draft.learn(len(guess), agreed, written)
        passes += 1
    assert passes == (4 if change == "replaced" else 3)  # the draft, then eleven tokens a pass


def test_wrong_guesses_fall_silent():
    """Twenty tokens of a draft of which nothing is ever right: guesses at doubling distances."""
    draft = TokenDraft([7] * 80)
    written = []
    guessed = []
    for token in range(100, 160):
        guess = draft.guess(written, 10)
        if guess:
            guessed.append(len(written))
        written.append(token)
        draft.learn(len(guess), 0, written)
    assert guessed == [0, 1, 3, 7, 15, 31], guessed


def test_a_full_batch_guesses_nothing(model):
    """More rows than a pass should have tokens: after the drafts one token each, whatever they say."""
    widths = []

    class Watched(TransformersEngine):
        def _forward(self, ids, columns, first, needs_logits=True):
            if needs_logits:
                widths.append(ids.shape)
            return super()._forward(ids, columns, first, needs_logits)

    engine = Watched(model, None, GREEDY, end_of_turn_ids=[VOCABULARY + 5], on_callers_thread=True)
    sample(
        engine, [SampleRequest([10 + i % 50, 11 + i], 12, 0, draft=[0, 9, 9, 9]) for i in range(64)]
    )
    assert all(width in (1, 5) or rows * width <= 64 for rows, width in widths), (
        "5: the drafts, 1: no guess"
    )
