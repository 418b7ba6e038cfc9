"""A model of this process as a chat model: exact replies, sessions that draft, bounded caches."""

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentic_prompting.llm import BadRequest, Closed, ScriptedChat, ServerFailed, complete, start
from agentic_prompting.local import (
    TransformersChat,
    TransformersEngine,
    can_slab,
    transformers_chat,
)
from agentic_prompting.local.transformers_chat import _DraftSession
from agentic_prompting.refine import ProRefiner
from support.model_shapes import GROUPED_QUERY_SHAPE
from support.tokenizers_for_tests import tokenizer_for


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for("chatml")


@pytest.fixture(scope="module")
def local_model(tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        **{**GROUPED_QUERY_SHAPE, "vocab_size": len(tokenizer)}, eos_token_id=tokenizer.eos_token_id
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
    """ProRefine's pattern: i·k tokens from the start under a prompt that changes now and then, many
    queries at once. The same replies as without drafting, for far fewer passes.
    """
    texts = 3 * ["Sort the words."] + 2 * ["Sort these words."]
    prompts = []
    for query in range(4):
        prompts.append([f"{text} Query {query}" for text in texts])

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


def test_recurrent_models_do_not_draft():
    model = MambaForCausalLM(
        MambaConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, state_size=8)
    )
    assert not can_slab(model)
    with pytest.raises(ValueError, match="recurrent"):
        TransformersChat(model, tokenizer_for("chatml"), draft=True)


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
