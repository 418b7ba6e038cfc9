"""Lossless drafting: the output of plain greedy decoding, whatever the draft, the model's shape and the batch."""

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
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentic_prompting.llm import BadRequest, Closed, ScriptedChat, ServerFailed, complete, start
from agentic_prompting.local import (
    Sampling,
    TransformersChat,
    TransformersEngine,
    can_slab,
    transformers_chat,
)
from agentic_prompting.local.drafting import TokenDraft
from agentic_prompting.local.transformers_chat import _DraftSession
from agentic_prompting.refine import ProRefiner
from agentic_prompting.rollout import SampleRequest
from support.sampling import sample
from support.tokenizers_for_tests import tokenizer_for

ENDS = [3, 5]
VOCABULARY = 120
GREEDY = Sampling(temperature=0)
# Grouped-query attention everywhere; an initialisation wide enough that outputs differ from one context to the next.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE)),
    "mistral, sliding window": (
        MistralForCausalLM,
        lambda: MistralConfig(**SHAPE, sliding_window=8),
    ),
    "gemma2, sliding window": (Gemma2ForCausalLM, lambda: Gemma2Config(**SHAPE, sliding_window=8)),
    "gemma3, mixed windows": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **SHAPE,
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


def spoilt(output, rng):
    """A draft that is right, half right, slightly wrong, shifted, too long, nonsense or missing."""
    draft = list(output)
    kind = rng.randrange(7)
    if kind == 1:
        draft = draft[: len(draft) // 2]
    elif kind == 2:
        draft[rng.randrange(len(draft))] = rng.randrange(VOCABULARY)
    elif kind == 3:
        del draft[rng.randrange(len(draft))]
    elif kind == 4:
        draft += [rng.randrange(VOCABULARY) for _ in range(10)]
    elif kind == 5:
        draft = [rng.randrange(VOCABULARY) for _ in range(20)]
    elif kind == 6:
        draft = []
    return draft


def test_equal_to_plain_greedy_decoding(model):
    """Batches of ragged contexts, drafts and limits. 25 rows a model; none may differ in a single token."""
    rng = random.Random(1)
    requests = []
    expected = []
    for _ in range(25):
        context = [rng.randrange(6, VOCABULARY) for _ in range(rng.randint(1, 30))]
        limit = rng.randint(1, 40)
        expected.append(reference(model, context, limit))
        requests.append(SampleRequest(context, limit, 0, draft=spoilt(expected[-1], rng)))
    engine = TransformersEngine(model, None, GREEDY, end_of_turn_ids=ENDS)
    for begin in range(0, 25, 5):
        samples = sample(engine, requests[begin : begin + 5])
        assert [one.ids for one in samples] == expected[begin : begin + 5]
        assert all(
            one.finished == (one.ids[-1] in ENDS) and one.drafted <= len(one.ids) for one in samples
        )


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)], ids=str
)
def test_drafts_change_nothing_that_is_drawn_by_chance(model, sampling):
    """The random numbers belong to the places of a text, so a guess is right or wrong there, too."""
    rng = random.Random(2)
    engine = TransformersEngine(model, None, sampling, end_of_turn_ids=ENDS)
    plain = [
        SampleRequest([rng.randrange(6, VOCABULARY) for _ in range(n)], 30, n)
        for n in (3, 8, 15, 16)
    ]
    expected = [one.ids for one in sample(engine, plain)]
    steps = engine.stats["row_steps"]
    drafts = [replace(request, draft=ids) for request, ids in zip(plain, expected, strict=True)]
    assert [one.ids for one in sample(engine, drafts)] == expected
    if sampling == Sampling():
        assert engine.stats["row_steps"] - steps == 4, "right drafts cost one pass"
    spoiled = [
        replace(request, draft=spoilt(ids, rng))
        for request, ids in zip(plain, expected, strict=True)
    ]
    assert [one.ids for one in sample(engine, spoiled)] == expected


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
    """One token that the draft lacks, has too many or has wrong costs a pass, or two where it could be either."""
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


def test_recurrent_models_do_not_draft():
    model = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    )
    assert not can_slab(model)
    with pytest.raises(ValueError, match="recurrent"):
        TransformersChat(model, tokenizer_for("chatml"), draft=True)


# --- as a ChatModel ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for("chatml")


@pytest.fixture(scope="module")
def local_model(tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        **{**SHAPE, "vocab_size": len(tokenizer)}, eos_token_id=tokenizer.eos_token_id
    )
    return Qwen3ForCausalLM(config).eval()


def by_hand(model, tokenizer, prompt, limit):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    output = model.generate(
        torch.tensor([ids]),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return output[0, len(ids) :].tolist()


def test_replies_are_exact(local_model, tokenizer):
    with TransformersChat(local_model, tokenizer) as chat:
        for limit in (1, 7, 40):
            reply = complete(chat, "Which country?", max_tokens=limit, temperature=0)
            ids = by_hand(local_model, tokenizer, "Which country?", limit)
            assert reply.text == tokenizer.decode(ids, skip_special_tokens=True)
            assert reply.usage.completion_tokens == len(ids)
            assert reply.finish_reason == (
                "stop" if ids[-1] == tokenizer.eos_token_id else "length"
            )


def test_a_session_grows_like_regeneration(local_model, tokenizer):
    """ProRefine's pattern: i·k tokens from the start under a prompt that changes now and then, many queries at once.
    The same replies as without drafting, for far fewer passes."""
    prompts = [
        [
            "Sort the words.",
            "Sort the words.",
            "Sort the words.",
            "Sort these words.",
            "Sort these words.",
        ]
    ] * 4
    prompts = [[f"{text} Query {q}" for text in texts] for q, texts in enumerate(prompts)]

    def play(chat):
        texts = []
        for step in range(5):
            futures = [
                start(
                    chat(
                        [{"role": "user", "content": prompts[q][step]}],
                        session=str(q),
                        max_tokens=8 * (step + 1),
                    )
                )
                for q in range(4)
            ]
            texts.append(
                [(future.result().text, future.result().finish_reason) for future in futures]
            )
        return texts, chat.passes

    with (
        TransformersChat(local_model, tokenizer) as drafting,
        TransformersChat(local_model, tokenizer, draft=False) as plain,
    ):
        drafted, passes = play(drafting)
        assert drafting.draft
        expected, plain_passes = play(plain)
    assert drafted == expected
    assert passes < plain_passes / 1.5
    for q in range(4):
        ids = by_hand(local_model, tokenizer, prompts[q][4], 40)
        assert drafted[4][q][0] == tokenizer.decode(ids, skip_special_tokens=True)


def test_unchanged_prompt_goes_on_from_the_cache(local_model, tokenizer):
    with TransformersChat(local_model, tokenizer) as chat:
        complete(chat, "Go on.", session="a", max_tokens=10)
        passes = chat.passes
        reply = complete(chat, "Go on.", session="a", max_tokens=20)
        again = complete(chat, "Go on.", session="a", max_tokens=15)
    if reply.usage.completion_tokens == 20:
        assert chat.passes - passes == 10, (
            "one pass for each new token, none to read what was there"
        )
    assert reply.text.startswith(again.text)


def test_crowded_cpu_reads_no_drafts(local_model, tokenizer, monkeypatch):
    monkeypatch.setattr(
        transformers_chat, "_MAX_DRAFTING_CALLS_ON_CPU", 0
    )  # so that one conversation is a crowd
    with TransformersChat(local_model, tokenizer) as chat:
        complete(chat, "Go on.", session="a", max_tokens=10)
        passes = chat.passes
        longer = complete(chat, "Go on.", session="a", max_tokens=20)
        assert chat.passes - passes == longer.usage.completion_tokens - 10
        passes = chat.passes
        other = complete(chat, "Go on now.", session="a", max_tokens=20)
        assert chat.passes - passes == other.usage.completion_tokens


def test_useless_drafts_are_tried_more_rarely():
    session = _DraftSession(0)
    tried = []
    ids = list(range(40))
    for step in range(1, 26):
        tried += [step] if session.replies_to_skip == 0 else []
        session = session.after_reply(
            [1], ids, False, drafted=3 if session.replies_to_skip == 0 else None
        )
    assert tried == [1, 2, 4, 8, 16], tried
    assert session.after_reply([1], ids, False, drafted=30).replies_to_skip == 0


@pytest.mark.parametrize("max_mb", [0, 0.03])
def test_kept_caches_are_bounded(local_model, tokenizer, max_mb):
    with TransformersChat(local_model, tokenizer, prefix_cache_mb=max_mb) as chat:
        for limit in (12, 12, 20):
            for q in range(3):
                reply = complete(chat, f"Query {q}", session=str(q), max_tokens=limit)
                ids = by_hand(local_model, tokenizer, f"Query {q}", limit)
                assert reply.text == tokenizer.decode(ids, skip_special_tokens=True)
                assert chat.policy.cached_bytes <= max_mb * 1e6


def test_recurrent_models_answer_without_drafts(tokenizer):
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            pad_token_id=0,
        )
    )
    with TransformersChat(model, tokenizer) as chat:
        replies = [complete(chat, "Which country?", session="a", max_tokens=n) for n in (4, 8)]
        assert not chat.draft and all(reply.error is None for reply in replies)


def test_lower_precision_drafts_only_on_request(local_model, tokenizer):
    half = Qwen3ForCausalLM(local_model.config).to(torch.bfloat16)
    with TransformersChat(half, tokenizer) as chat:
        assert not chat.draft
    with TransformersChat(half, tokenizer, draft=True) as chat:
        assert complete(chat, "Hi", max_tokens=4).error is None


def test_calls_that_cannot_work(local_model, tokenizer):
    with TransformersChat(local_model, tokenizer) as chat:
        assert isinstance(complete(chat, "a", temperature=0.7).error, BadRequest)
        assert isinstance(complete(chat, "a", max_tokens=-1).error, BadRequest)
        assert "stop" in str(complete(chat, "a", stop=["b"]).error)
        too_long = complete(chat, "word " * 600)
        assert isinstance(too_long.error, BadRequest) and "512" in str(too_long.error)
        assert complete(chat, "a", max_tokens=2).error is None, "the next call is fine"
    assert isinstance(complete(chat, "a").error, Closed)
    bare = tokenizer_for("llama3").__class__(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    with pytest.raises(ValueError, match="no chat template"):
        TransformersChat(local_model, bare)


def test_query_of_a_megabyte_is_refused(local_model, tokenizer):
    rules = ScriptedChat(["Go on."]), ScriptedChat(["<IMPROVED_PROMPT>word1</IMPROVED_PROMPT>"])
    with TransformersChat(local_model, tokenizer) as chat:
        result = ProRefiner(chat, *rules).refine("word1", "word2 " * (2**20 // 6))
        assert chat.passes == 0
    assert result.stop_reason == "failed" and "tokens, the model reads 512" in str(result.error)


def test_a_model_that_raises_fails_its_calls_only(local_model, tokenizer, monkeypatch):
    with TransformersChat(local_model, tokenizer) as chat:
        with monkeypatch.context() as patch:
            patch.setattr(TransformersEngine, "step", lambda self, arrived: 1 / 0)
            reply = complete(chat, "a", max_tokens=2)
            assert isinstance(reply.error, ServerFailed) and "ZeroDivisionError" in str(reply.error)
        assert complete(chat, "a", max_tokens=2).error is None
