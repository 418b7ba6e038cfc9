"""Lossless drafting: the output of plain greedy decoding, whatever the draft, the model's shape and the batch."""

import random

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
from agentic_prompting.local import GreedyBatch, GreedyRow, TransformersChat, can_draft, greedy, transformers_chat
from agentic_prompting.local.transformers_chat import _Session
from agentic_prompting.refine import ProRefiner
from tokenizers_for_tests import tokenizer_for

ENDS = [3, 5]
VOCABULARY = 120
# Grouped-query attention everywhere; an initialisation wide enough that outputs differ from one context to the next.
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.3,
}  # fmt: skip
MODELS = {
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE)),
    "mistral, sliding window": (MistralForCausalLM, lambda: MistralConfig(**SHAPE, sliding_window=8)),
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


@pytest.mark.parametrize("look_up", [True, False])
def test_equal_to_plain_greedy_decoding(model, look_up):
    """Batches of ragged contexts, drafts and limits. 25 rows a model; none may differ in a single token."""
    rng = random.Random(1)
    rows, expected = [], []
    for _ in range(25):
        context = [rng.randrange(6, VOCABULARY) for _ in range(rng.randint(1, 30))]
        limit = rng.randint(1, 40)
        expected.append(reference(model, context, limit))
        rows.append(GreedyRow(context, limit, spoilt(expected[-1], rng)))
    for begin in range(0, 25, 5):
        greedy(model, rows[begin : begin + 5], ENDS, look_up)
    assert [row.ids for row in rows] == expected
    for row in rows:
        assert row.finished == (row.ids[-1] in ENDS) and row.drafted <= len(row.ids)


def test_rows_join_and_go_on(model):
    """A row may join while others are half-way, and one that was cut off may go on from its cache without a pass."""
    rng = random.Random(2)
    contexts = [[rng.randrange(6, VOCABULARY) for _ in range(n)] for n in (5, 17, 9)]
    expected = [reference(model, context, 30) for context in contexts]
    batch = GreedyBatch(model, ENDS)
    first = GreedyRow(contexts[0], limit=6, keep_cache=True)
    done = batch.add([first, GreedyRow(contexts[1], limit=30)])
    while first not in done:
        done += batch.step()
    assert first.ids == expected[0][:6]
    last = GreedyRow(contexts[2], limit=30, draft=expected[2][:10])
    done += batch.add([last])
    if not first.finished:
        passes = batch.passes
        first.limit = 30
        batch.resume(first)
        assert batch.passes == passes
    while batch.rows:
        done += batch.step()
    assert {tuple(row.ids) for row in done} == {tuple(ids) for ids in expected}


def test_a_right_draft_costs_one_pass(model):
    context = list(range(10, 30))
    expected = reference(model, context, 40)
    row = GreedyRow(context, 40, draft=expected)
    greedy(model, [row], ENDS)
    assert (row.ids, row.passes) == (expected, 1)


def test_a_slow_row_holds_nobody_up(model):
    """A row with a right draft is done in the first pass although its neighbour has none."""
    contexts = [list(range(10, 20)), list(range(30, 60))]
    expected = [reference(model, context, 30) for context in contexts]
    batch = GreedyBatch(model, ENDS)
    done = batch.add([GreedyRow(contexts[0], 30, draft=expected[0]), GreedyRow(contexts[1], 30)])
    assert [row.ids for row in done] == [expected[0]] and len(batch.rows) == 1


@pytest.mark.parametrize("change", ["put in", "left out", "replaced"])
def test_what_follows_a_change_is_guessed_right_at_once(change):
    """One token that the draft lacks, has too many or has wrong costs a pass, or two where it could be either."""
    expected = list(range(100, 140))
    draft = {
        "put in": expected[:20] + expected[21:],
        "left out": [*expected[:20], 7, *expected[20:]],
        "replaced": [*expected[:20], 7, *expected[21:]],
    }[change]
    row = GreedyRow([1], len(expected), draft)
    guess = draft[: row.limit]
    while not row.done:
        row.take(guess, expected[len(row.ids) : len(row.ids) + len(guess) + 1], frozenset())
        guess = row.guess(10)
    assert row.ids == expected
    assert row.passes == (4 if change == "replaced" else 3)  # the draft, then eleven tokens a pass


def test_wrong_guesses_fall_silent():
    """Twenty tokens of a draft of which nothing is ever right: guesses at doubling distances."""
    row = GreedyRow([1], 65, draft=[7] * 80)
    guessed = []
    for token in range(100, 160):
        guess = row.guess(10)
        if guess:
            guessed.append(len(row.ids))
        row.take(guess, [token] * (len(guess) + 1), frozenset())
    assert guessed == [0, 1, 3, 7, 15, 31], guessed


def test_a_full_batch_guesses_nothing(model):
    """More rows than a pass should have tokens: one token each, whatever the drafts say."""
    batch = GreedyBatch(model, ENDS)
    batch.add([GreedyRow([10 + i % 50, 11 + i], 12, draft=[0, 9, 9, 9]) for i in range(64)])
    widths = []
    forward = batch._forward
    batch._forward = lambda ids, *others, **options: widths.append(ids.shape[1]) or forward(ids, *others, **options)
    if batch.rows:
        batch.step()
    assert all(width <= 2 for width in widths)


def test_resume_needs_a_cache(model):
    with pytest.raises(ValueError, match="cache"):
        GreedyBatch(model, ENDS).resume(GreedyRow([7], 5))


def test_recurrent_models_do_not_draft():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8))
    assert not can_draft(model)
    with pytest.raises(ValueError, match="recurrent"):
        TransformersChat(model, tokenizer_for("chatml"), draft=True)


# --- as a ChatModel ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for("chatml")


@pytest.fixture(scope="module")
def local_model(tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(**{**SHAPE, "vocab_size": len(tokenizer)}, eos_token_id=tokenizer.eos_token_id)
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
            assert reply.finish_reason == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")


def test_a_session_grows_like_regeneration(local_model, tokenizer):
    """ProRefine's pattern: i·k tokens from the start under a prompt that changes now and then, many queries at once.
    The same replies as without drafting, for far fewer passes."""
    prompts = [["Sort the words.", "Sort the words.", "Sort the words.", "Sort these words.", "Sort these words."]] * 4
    prompts = [[f"{text} Query {q}" for text in texts] for q, texts in enumerate(prompts)]

    def play(chat):
        texts = []
        for step in range(5):
            futures = [
                start(chat([{"role": "user", "content": prompts[q][step]}], session=str(q), max_tokens=8 * (step + 1)))
                for q in range(4)
            ]
            texts.append([(future.result().text, future.result().finish_reason) for future in futures])
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
        assert chat.passes - passes == 10, "one pass for each new token, none to read what was there"
    assert reply.text.startswith(again.text)


def test_a_crowd_on_a_cpu_reads_no_drafts_but_keeps_its_caches(local_model, tokenizer, monkeypatch):
    monkeypatch.setattr(transformers_chat, "_DRAFTING_ON_CPU", 0)  # so that one conversation is a crowd
    with TransformersChat(local_model, tokenizer) as chat:
        complete(chat, "Go on.", session="a", max_tokens=10)
        passes = chat.passes
        longer = complete(chat, "Go on.", session="a", max_tokens=20)
        assert chat.passes - passes == longer.usage.completion_tokens - 10
        passes = chat.passes
        other = complete(chat, "Go on now.", session="a", max_tokens=20)
        assert chat.passes - passes == other.usage.completion_tokens


def test_drafts_that_save_nothing_are_tried_ever_more_rarely():
    session = _Session(GreedyRow([1], 40))
    tried = []
    for step in range(1, 26):
        row = GreedyRow([1], 40, draft=list(range(40)) if session.wait == 0 else [])
        row.ids, row.drafted = list(range(40)), 3
        tried += [step] if row.draft else []
        session = session.followed_by(row)
    assert tried == [1, 2, 4, 8, 16], tried
    row.draft, row.drafted = [1], 30
    assert session.followed_by(row).wait == 0


@pytest.mark.parametrize("keep", [0, 1])
def test_kept_caches_are_bounded(local_model, tokenizer, keep):
    with TransformersChat(local_model, tokenizer, keep_caches=keep) as chat:
        for _ in range(2):
            for q in range(3):
                reply = complete(chat, f"Query {q}", session=str(q), max_tokens=12)
                ids = by_hand(local_model, tokenizer, f"Query {q}", 12)
                assert reply.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert sum(last.row.cache is not None for last in chat._engine.sessions.values()) <= keep


def test_recurrent_models_answer_without_drafts(tokenizer):
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0)
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
    bare = tokenizer_for("llama3").__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ValueError, match="no chat template"):
        TransformersChat(local_model, bare)


def test_a_query_of_a_megabyte_is_refused_before_the_model_reads_it(local_model, tokenizer):
    rules = ScriptedChat(["Go on."]), ScriptedChat(["<IMPROVED_PROMPT>word1</IMPROVED_PROMPT>"])
    with TransformersChat(local_model, tokenizer) as chat:
        result = ProRefiner(chat, *rules).refine("word1", "word2 " * (2**20 // 6))
        assert chat.passes == 0
    assert result.stop_reason == "failed" and "tokens, the model reads 512" in str(result.error)


def test_a_model_that_raises_fails_its_calls_only(local_model, tokenizer, monkeypatch):
    with TransformersChat(local_model, tokenizer) as chat:
        with monkeypatch.context() as patch:
            patch.setattr(GreedyBatch, "add", lambda self, rows: 1 / 0)
            reply = complete(chat, "a", max_tokens=2)
            assert isinstance(reply.error, ServerFailed) and "ZeroDivisionError" in str(reply.error)
        assert complete(chat, "a", max_tokens=2).error is None
