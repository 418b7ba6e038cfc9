"""Sampling in this process, by the engine and in batches: what a continuation depends on, how often
each token is drawn, where a turn ends. The engine's own affairs are in test_transformers_engine.py.
"""

import copy
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting.local import (
    Sampling,
    TransformersEngine,
    TransformersSampler,
    end_of_turn_tokens,
)
from agentic_prompting.rollout import Sample, SampleRequest, TagGrammar
from support.sampling import requests_for, sample
from support.tokenizers_for_tests import tokenizer_for

TURN = "<think> a </think> <interaction_prompt> b </interaction_prompt>"


class Sampler:
    """The engine and the batch sampler, held to each other: requests in, samples out,
    log-probabilities left out.
    """

    def __init__(self, model, tokenizer, *args, max_batch_size=256, **options):
        self.engine = TransformersEngine(
            model,
            tokenizer,
            *args,
            max_batch_size=max_batch_size,
            on_callers_thread=True,
            **options,
        )
        self.batches = TransformersSampler(model, tokenizer, *args, **options)

    def __call__(self, requests):
        samples = without_logprobs(sample(self.engine, requests))
        assert samples == (without_logprobs(self.batches(requests)) if requests else [])
        return samples


def without_logprobs(samples):
    """Samples that can be compared: the last bits of log-probabilities depend on the batch."""
    return [Sample(sample.ids, finished=sample.finished) for sample in samples]


def small_model(tokenizer, extra_rows=0, kind=Qwen3ForCausalLM):
    """A model for a byte-level tokenizer; some models have more rows than their tokenizer has
    tokens.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer) + extra_rows,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config).eval()


class ScriptedModel(Qwen3ForCausalLM):
    """A real model, cache and all, whose likeliest next token follows a script: `script[row][n]`
    for the n-th token of a row; behind its end, token 0. For whole batches: there rows stay where
    they are.
    """

    script: list[list[int]]

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        self.step = (
            0 if input_ids.shape[1] > 1 else self.step + 1
        )  # the prompt comes in one piece, then single tokens
        for row, tokens in enumerate(self.script):
            output.logits[row, -1] = 0.0
            output.logits[row, -1, tokens[self.step] if self.step < len(tokens) else 0] = 100.0
        return output


class ScriptedEngine(TransformersEngine):
    """The same for the engine, whose rows move: a row's script is the one its seed says."""

    def _choose(self, rows, logits):
        scripts = [(self.script[row.job.request.seed], len(row.ids)) for row in rows]
        return [[script[n] if n < len(script) else 0] for script, n in scripts], [
            [0.0] for _ in rows
        ]


def follow(tokenizer, script, limits=None, stop_texts=(), context="ab", **options):
    """The samples of a model that writes `script`, one list of ids a row."""
    model = small_model(tokenizer, extra_rows=3, kind=ScriptedModel)
    model.script = script
    context = tokenizer(context)["input_ids"]
    limits = limits or [len(row) + 5 for row in script]
    requests = [SampleRequest(context, limit, seed) for seed, limit in enumerate(limits)]
    batches = TransformersSampler(
        model, tokenizer, Sampling(temperature=0), stop_texts=stop_texts, **options
    )(requests)
    engine = ScriptedEngine(
        small_model(tokenizer, extra_rows=3), tokenizer, stop_texts=stop_texts, **options
    )
    engine.script = script
    samples = sample(engine, requests)
    assert [(one.ids, one.finished) for one in samples] == [
        (batch.ids, batch.finished) for batch in batches
    ]
    return samples


def single_characters(tokenizer, text):
    """One token per byte, so that nothing in `text` is one token."""
    table = {}
    for token in range(len(tokenizer)):
        piece = tokenizer.backend_tokenizer.id_to_token(token)
        if len(piece) == 1:
            table[piece] = token
    spelled = "".join(
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    )  # bytes as byte-level BPE writes them
    return [table[character] for character in spelled]


# --- a continuation depends on its own context and seed -------------------------------------------


@pytest.fixture(scope="module", params=["sandbox", "chatml", "gemma"])
def any_model(request, policy, tokenizer):
    if request.param == "sandbox":
        return policy, tokenizer
    tokenizer = tokenizer_for(request.param)
    return small_model(tokenizer), tokenizer


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(repetition_penalty=1.5),
    ],
)
def test_nothing_else_in_the_batch_matters(any_model, sampling):
    """Alone, together, shuffled, in small batches: the same tokens.

    Lengths differ, so rows are padded differently.
    """
    model, tokenizer = any_model
    requests = requests_for(tokenizer, 24)
    stop = tokenizer.decode(requests[0].context[:1])
    sampler = Sampler(model, tokenizer, sampling, stop_texts=[stop])
    alone = [sampler([request])[0] for request in requests]
    assert sampler(requests) == alone
    order = random.Random(1).sample(range(len(requests)), len(requests))
    assert sampler([requests[i] for i in order]) == [alone[i] for i in order]
    sampler.engine.max_batch_size = 7
    assert sampler(requests) == alone
    assert sum(len(sample.ids) for sample in alone) > 100


def test_padding_is_not_penalised_as_repetition():
    """A longer neighbour means padding in front; with the end token as padding, no row may end
    later for it.
    """
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.pad_token = tokenizer.eos_token
    model = small_model(tokenizer)
    end = tokenizer.eos_token_id
    preferences = torch.zeros(len(tokenizer))
    preferences[[end, 40]] = torch.tensor([2.0, 1.5])
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: torch.zeros_like(logits) + preferences
    )
    sampler = Sampler(model, tokenizer, Sampling(temperature=0, repetition_penalty=2.0))
    short, long, repeats = (
        SampleRequest(context, 2, 0) for context in ([70], [70] * 9, [70, end] * 4)
    )
    assert sampler([short])[0].ids == [end]
    assert sampler([short, long])[0].ids == [end]
    # What does stand in the context is penalised, padded or not.
    assert [sampler(batch)[0].ids[0] for batch in ([repeats], [repeats, long])] == [40, 40]


def test_the_global_random_state_has_no_part(policy, tokenizer):
    sampler = Sampler(policy, tokenizer)
    requests = requests_for(tokenizer, 4)
    torch.manual_seed(1)
    first = sampler(requests)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert sampler(requests) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), (
        "sampling must not advance the global generator"
    )


def test_different_seeds_differ(policy, tokenizer):
    sampler = Sampler(policy, tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    samples = sampler([SampleRequest([5, 6, 7], 12, seed) for seed in range(50)])
    assert len({tuple(sample.ids) for sample in samples}) == 50


def test_a_longer_limit_only_adds_tokens(policy, tokenizer):
    sampler = Sampler(policy, tokenizer)
    short, long = (sampler([SampleRequest([5, 6, 7], limit, 3)])[0].ids for limit in (5, 15))
    assert long[:5] == short and len(long) == 15


def test_no_request_is_no_work(policy, tokenizer):
    assert Sampler(policy, tokenizer)([]) == []


# --- how often each token is drawn ----------------------------------------------------------------

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=7),
    Sampling(top_p=0.5),
    Sampling(min_p=0.2),
    Sampling(repetition_penalty=1.8, temperature=0.6),
    Sampling(temperature=0.7, top_k=30, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
]


def transformers_probabilities(model, context, sampling):
    """The distribution of the next token as transformers' own sampling shapes it, by its own
    switches.
    """
    output = model.generate(
        torch.tensor([context]),
        attention_mask=torch.ones(1, len(context), dtype=torch.long),
        max_new_tokens=1,
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return output.scores[0][0].double().softmax(-1).numpy()


def assert_drawn_from(tokens, probabilities):
    """Chi-square over the tokens expected at least five times, the others together; within five
    standard deviations.
    """
    n = len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = n * probabilities
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that cannot be"
    common = expected >= 5
    cells = [
        (counts[common], expected[common]),
        (counts[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)),
    ]
    chi_square = sum(
        ((seen - e) ** 2 / np.maximum(e, 1e-9)).sum() for seen, e in cells if e.sum() > 0
    )
    freedom = max(common.sum(), 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, (chi_square, freedom)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_truncation_leaves_the_logprobs_alone(policy, tokenizer, sampling):
    """They are the trainer's: of the model at this temperature, from whatever a token was drawn."""
    requests = requests_for(tokenizer, 8)
    engine = TransformersEngine(policy, tokenizer, sampling)
    batches = TransformersSampler(policy, tokenizer, sampling)
    for samples in (sample(engine, requests), batches(requests)):
        for request, one in zip(requests, samples, strict=True):
            with torch.no_grad():
                logits = policy(torch.tensor([request.context + one.ids])).logits[
                    0, len(request.context) - 1 : -1
                ]
            expected = (logits / sampling.temperature).log_softmax(-1)[range(len(one.ids)), one.ids]
            torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_drawn_as_the_model_says(policy, tokenizer, sampling):
    context = tokenizer("what is the capital of Kenya ?")["input_ids"]
    probabilities = transformers_probabilities(policy, context, sampling)
    sampler = Sampler(policy, tokenizer, sampling)
    samples = sampler([SampleRequest(context, 1, seed) for seed in range(2000)])
    assert_drawn_from([sample.ids[0] for sample in samples], probabilities)


def test_the_check_above_can_fail(policy, tokenizer):
    """Tokens drawn at another temperature do not pass for this one's."""
    context = tokenizer("what is the capital of Kenya ?")["input_ids"]
    sampler = Sampler(policy, tokenizer, Sampling(temperature=0.8))
    tokens = [
        sample.ids[0]
        for sample in sampler([SampleRequest(context, 1, seed) for seed in range(2000)])
    ]
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens, transformers_probabilities(policy, context, Sampling()))


def test_an_even_grid_of_numbers_gives_exact_frequencies():
    """The inversion itself, without chance: n evenly spaced numbers draw each token n·p times, off
    by less than one.
    """
    n = 10_000
    probabilities = torch.tensor([0.0, 0.3, 1e-4, 0.0, 0.1999, 0.5, 0.0])
    scores = probabilities.log().expand(n, -1)
    uniform = (torch.arange(n).double() + 0.5) / n
    tokens, logprobs = Sampling().choose(scores, uniform)
    counts = tokens.bincount(minlength=len(probabilities))
    assert ((counts - n * probabilities).abs() <= 1).all()
    assert (counts[probabilities == 0] == 0).all()
    assert torch.allclose(logprobs.exp(), probabilities[tokens])


def test_an_even_grid_over_a_large_vocabulary():
    """The same where the vocabulary has many blocks, most tokens are rare, and some blocks are
    empty.
    """
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 5_000, generator=generator) * 3
    scores[0, 256:1024] = -torch.inf
    probabilities = scores.double().softmax(-1)[0]
    uniform = (torch.arange(n).double() + 0.5) / n
    tokens, _ = Sampling().choose(scores.expand(n, -1), uniform)
    counts = tokens.bincount(minlength=len(probabilities))
    assert ((counts - n * probabilities).abs() <= 1.01).all()
    assert (counts[probabilities == 0] == 0).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_outermost_numbers_draw_possible_tokens(number):
    few = torch.tensor([[0.0, 0.0, 0.4, 0.6, 0.0, 0.0]])
    many = torch.zeros(1, 1000).index_fill(1, torch.tensor([300, 301, 600]), 1 / 3)
    for probabilities in (few, many):
        tokens, _ = Sampling().choose(
            probabilities.log(), torch.tensor([number], dtype=torch.double)
        )
        assert probabilities[0, tokens[0]] > 0


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3)], ids=str
)
def test_a_greedy_request_among_others(policy, tokenizer, sampling):
    """It gets the likeliest tokens, the others theirs."""
    requests = requests_for(tokenizer, 8)
    mixed = [replace(request, greedy=row % 2 == 0) for row, request in enumerate(requests)]
    cold = replace(sampling, temperature=0)
    samples = without_logprobs(TransformersSampler(policy, tokenizer, sampling)(mixed))
    drawn = without_logprobs(TransformersSampler(policy, tokenizer, sampling)(requests))
    greedy = without_logprobs(TransformersSampler(policy, tokenizer, cold)(requests))
    assert samples == [
        (greedy if request.greedy else drawn)[row] for row, request in enumerate(mixed)
    ]
    assert drawn != greedy


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_temperature_zero_is_greedy(any_model, penalty):
    model, tokenizer = any_model
    sampler = Sampler(
        model, tokenizer, Sampling(temperature=0, top_k=3, repetition_penalty=penalty)
    )
    for request in requests_for(tokenizer, 6):
        greedy = model.generate(
            torch.tensor([request.context]),
            attention_mask=torch.ones(1, len(request.context), dtype=torch.long),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            repetition_penalty=penalty,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert sampler([request])[0].ids == greedy[0, len(request.context) :].tolist()


# --- where a turn ends ----------------------------------------------------------------------------


def test_every_row_has_its_own_limit(policy, tokenizer):
    limits = [1, 2, 3, 9, 17, 5]
    sampler = Sampler(policy, tokenizer, end_of_turn_ids=[tokenizer.pad_token_id + 10_000])
    samples = sampler([SampleRequest([5, 6, 7], limit, limit) for limit in limits])
    assert [len(sample.ids) for sample in samples] == limits
    assert not any(sample.finished for sample in samples)


def test_end_of_turn_token_and_limit():
    tokenizer = tokenizer_for("chatml")
    end = tokenizer.eos_token_id
    x = tokenizer.convert_tokens_to_ids("x")
    script = [[x, x, end, x, x], [x] * 6, [x, x, x, end], [end], [x, x, x, x, end]]
    samples = follow(tokenizer, script, limits=[5, 4, 4, 1, 4])
    assert [sample.ids for sample in samples] == [
        [x, x, end],
        [x] * 4,
        [x, x, x, end],
        [end],
        [x] * 4,
    ]
    # The third meets its end exactly at its limit: it ended by itself.
    assert [sample.finished for sample in samples] == [True, False, True, True, False]


def test_padding_with_the_end_token():
    """Many tokenizers have no padding token of their own."""
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    x = tokenizer.convert_tokens_to_ids("x")
    samples = follow(tokenizer, [[x, end], [x] * 9, [x, x, x, x, end]], limits=[9, 3, 9])
    assert [sample.ids for sample in samples] == [[x, end], [x] * 3, [x, x, x, x, end]]
    assert [sample.finished for sample in samples] == [True, False, True]


def test_padding_token_as_a_real_one():
    """A model may sample the padding token; it counts like any other."""
    tokenizer = tokenizer_for("chatml")
    pad = tokenizer.pad_token_id
    end = tokenizer.eos_token_id
    x = tokenizer.convert_tokens_to_ids("x")
    samples = follow(tokenizer, [[x, pad, pad, end], [pad, pad]], limits=[9, 2])
    assert [sample.ids for sample in samples] == [[x, pad, pad, end], [pad, pad]]
    assert [sample.finished for sample in samples] == [True, False]


def test_any_of_several_end_tokens():
    tokenizer = tokenizer_for("chatml")
    first, second = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")
    )
    x = tokenizer.convert_tokens_to_ids("x")
    samples = follow(tokenizer, [[x, first, x], [x, x, second, x]], end_of_turn_ids=[first, second])
    assert [sample.ids for sample in samples] == [[x, first], [x, x, second]]
    samples = follow(tokenizer, [[x, first, x]], limits=[3], end_of_turn_ids=[second])
    assert samples[0].ids == [x, first, x] and not samples[0].finished


def test_end_tokens_are_the_models_and_the_tokenizers():
    tokenizer = tokenizer_for("chatml")
    model = small_model(tokenizer)
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for declared, expected in [
        (None, [tokenizer.eos_token_id]),
        (other, [other, tokenizer.eos_token_id]),
        ([other, tokenizer.eos_token_id], [other, tokenizer.eos_token_id]),
    ]:
        model.generation_config.eos_token_id = declared
        assert end_of_turn_tokens(model, tokenizer) == expected
        assert TransformersEngine(model, tokenizer).end.end_ids == tuple(expected)


def test_without_any_end_token():
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.eos_token = None
    model = small_model(tokenizer)
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="tokenizer.eos_token.*end_of_turn_ids"):
        Sampler(model, tokenizer)


@pytest.mark.parametrize("split", ["into characters", "as the tokenizer does"])
def test_a_stop_text_of_several_tokens(split):
    tokenizer = tokenizer_for("chatml")
    spell = (
        single_characters if split == "into characters" else lambda t, text: t(text)["input_ids"]
    )
    turn = spell(tokenizer, TURN)
    more = spell(tokenizer, "\n<interaction_response> I am the reply")
    stop = "</interaction_prompt>"
    assert len(turn) > 5
    script = [turn + more, spell(tokenizer, "</interaction_prompt") + more, turn + more]
    samples = follow(tokenizer, script, limits=[200, 20, len(turn)], stop_texts=[stop, "</answer>"])
    assert [sample.ids for sample in samples] == [turn, script[1][:20], turn]
    assert [sample.finished for sample in samples] == [True, False, True]
    assert tokenizer.decode(samples[0].ids) == TURN


def test_only_what_is_sampled_stops():
    """A stop text that began in the prompt, or stands there, ends nothing."""
    tokenizer = tokenizer_for("chatml")
    row = single_characters(tokenizer, "> and </answer> so")
    samples = follow(tokenizer, [row], stop_texts=["</answer>"], context="x </answer> y </answer")
    assert tokenizer.decode(samples[0].ids) == "> and </answer>"


def test_token_that_continues_after_the_stop_text():
    """In many vocabularies `>` and a line break are one token."""
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.add_tokens([AddedToken(">\n<", special=False, normalized=False)])
    row = [
        *single_characters(tokenizer, "</answer"),
        tokenizer.convert_tokens_to_ids(">\n<"),
        70,
        71,
    ]
    samples = follow(tokenizer, [row], stop_texts=["</answer>"])
    assert samples[0].ids == row[:-2] and samples[0].finished


def test_stop_texts_that_are_not_ascii():
    """A character of three bytes may be three tokens."""
    tokenizer = tokenizer_for("chatml")
    stops = TagGrammar(act="質問する", answer="答え").stops
    text = "<質問する> 国は？ </質問する>"
    samples = follow(tokenizer, [single_characters(tokenizer, text + " x")], stop_texts=stops)
    assert tokenizer.decode(samples[0].ids) == text and samples[0].finished
    text = "国は。"
    samples = follow(tokenizer, [single_characters(tokenizer, text + "x")], stop_texts=["。"])
    assert tokenizer.decode(samples[0].ids) == text and samples[0].finished


def test_rows_beyond_the_tokenizers_vocabulary():
    """Models are padded to a round number of rows; an id that is no token stops nothing and breaks
    nothing.
    """
    tokenizer = tokenizer_for("chatml")
    beyond = len(tokenizer) + 1
    end = tokenizer.eos_token_id
    samples = follow(tokenizer, [[beyond, beyond, end]], stop_texts=["</answer>"])
    assert samples[0].ids == [beyond, beyond, end]


def test_stop_texts_of_the_sandbox_tokenizer(policy, tokenizer):
    """One token per tag: the turn ends at the tag in any batch."""
    tag = tokenizer.convert_tokens_to_ids("</answer>")
    engine = TransformersEngine(policy, tokenizer, stop_texts=["</answer>"])
    samples = sample(engine, [SampleRequest([5, 6, 7], 60, seed) for seed in range(200)])
    ended = [sample for sample in samples if tag in sample.ids]
    assert len(ended) > 5
    assert all(sample.ids.index(tag) == len(sample.ids) - 1 and sample.finished for sample in ended)


# --- the model is left as it was ------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_settings_are_restored(policy, tokenizer, training):
    model = copy.deepcopy(policy).train(training)
    before = copy.deepcopy(model.generation_config)
    seen = []
    model.model.register_forward_hook(lambda module, *_: seen.append(module.training))
    Sampler(model, tokenizer, Sampling(temperature=0.5))(requests_for(tokenizer, 3))
    assert seen and not any(seen), "dropout must not act on what is sampled"
    assert model.training is training and model.model.training is training
    assert model.generation_config == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_is_restored_after_an_error(policy, tokenizer):
    model = copy.deepcopy(policy).train()
    # What the engine looks for in a signature before it runs a model.
    model.forward = lambda position_ids=None, past_key_values=None, attention_mask=None, **kwargs: (
        1 / 0
    )
    for sampler in (
        Sampler(model, tokenizer).batches,
        lambda requests: sample(Sampler(model, tokenizer).engine, requests),
    ):
        with pytest.raises(ZeroDivisionError):
            sampler(requests_for(tokenizer, 1))
        assert model.training


def test_a_model_may_come_from_a_context_manager(policy, tokenizer):
    """As a trainer gives its weights: gathered once per call, let go afterwards."""
    log = []

    @contextmanager
    def gathered():
        log.append("in")
        yield policy
        log.append("out")

    requests = requests_for(tokenizer, 5)
    with pytest.raises(ValueError, match="no end-of-turn token"):
        Sampler(gathered, tokenizer)  # nobody knows the model's end tokens yet
    sampler = Sampler(
        gathered, tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], max_batch_size=2
    )
    assert log == []
    assert sampler(requests) == Sampler(policy, tokenizer)(requests)
    assert log == ["in", "out"] * 2
