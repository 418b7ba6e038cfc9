"""Keys and values kept between turns: nothing sampled changes, little is read twice, and memory is bounded."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import LLMEnvironment, PromptAgent, ScriptedChat
from agentic_prompting.local import Sampling, TransformersSampler
from agentic_prompting.local.prefix_cache import Prefix, PrefixCache, can_reuse
from agentic_prompting.rollout import SampleRequest, read_rollouts
from test_trainer import trainer_for

SETTINGS = [
    Sampling(temperature=0),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def policy(tiny_policy):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    model.model.norm.weight.data *= 3  # a model that prefers some tokens, as a trained one does
    return model


@pytest.fixture(scope="module")
def tokenizer(tiny_policy):
    return AutoTokenizer.from_pretrained(tiny_policy)


def conversations(sampler, tokenizer, n=7, turns=4, late=2, seed=0):
    """Play `n` conversations, of which `late` join in the third turn; in each turn some have nothing to say."""
    rng = random.Random(seed)

    def text(least, most):
        return [rng.randrange(4, len(tokenizer)) for _ in range(rng.randint(least, most))]

    contexts = [text(1, 40) for _ in range(n)]
    for turn in range(turns):
        talking = [i for i in range(n) if (turn >= 2 or i >= late) and rng.random() < 0.8]
        requests = [SampleRequest(contexts[i], rng.randint(1, 12), 100 * turn + i, conversation=i) for i in talking]
        if not requests:
            continue
        for i, sample in zip(talking, sampler(requests), strict=True):
            contexts[i] = contexts[i] + sample.ids + text(1, 15)
    return contexts


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("max_mb", [1000, 0.05])
def test_what_is_sampled_does_not_depend_on_what_is_kept(policy, tokenizer, sampling, max_mb):
    plain = TransformersSampler(policy, tokenizer, sampling, max_batch_size=3)
    keeping = TransformersSampler(policy, tokenizer, sampling, max_batch_size=3, prefix_cache_mb=max_mb)
    for seed in range(3):
        keeping.forget()
        assert conversations(keeping, tokenizer, seed=seed) == conversations(plain, tokenizer, seed=seed)
    assert keeping.prefixes.reused > 0


def test_the_logits_are_those_of_reading_everything(policy, tokenizer):
    """Not only the same tokens: keys and values are in the right place, with the right positions."""
    seen = []
    hook = policy.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits[:, -1].clone()))
    try:
        sampler = TransformersSampler(policy, tokenizer, Sampling(temperature=0), prefix_cache_mb=100)
        first = [SampleRequest(list(range(10, 10 + n)), 3, 0, conversation=n) for n in (3, 9, 5)]
        said = sampler(first)
        replies = ([7, 8], [9] * 11, [30])
        then = [
            replace(request, context=[*request.context, *sample.ids, *reply])
            for request, sample, reply in zip(first, said, replies, strict=True)
        ]
        fresh = SampleRequest([40, 41, 42, 43], 3, 0, conversation=99)
        seen.clear()
        sampler([*then, fresh])
        kept = seen[-3]  # of the first token of this call
        seen.clear()
        TransformersSampler(policy, tokenizer, Sampling(temperature=0))([*then, fresh])
        assert torch.allclose(kept, seen[-3], atol=1e-5)
    finally:
        hook.remove()


def test_only_what_is_new_is_read(policy, tokenizer):
    sampler = TransformersSampler(policy, tokenizer, Sampling(temperature=0), prefix_cache_mb=100)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    said = sampler([request])[0].ids
    sampler([replace(request, context=[*request.context, *said, 40, 41, 42])])
    assert sampler.prefixes.reused == 20 + len(said) - 1
    assert sampler.prefixes.read == 20 + 1 + 3  # the last sampled token has not been read before


def test_another_text_is_not_taken_for_the_conversation(policy, tokenizer):
    """An id may come again, as those of objects do."""
    plain = TransformersSampler(policy, tokenizer, Sampling(temperature=0))
    keeping = TransformersSampler(policy, tokenizer, Sampling(temperature=0), prefix_cache_mb=100)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    for context in (request.context, list(range(11, 50)), [12], [12], list(range(12, 20))):
        other = replace(request, context=context)
        assert keeping([other]) == plain([other])
    assert keeping.prefixes.reused == 0


def test_forgetting_and_new_weights(tiny_policy, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    plain = TransformersSampler(model, tokenizer, Sampling(temperature=0))
    keeping = TransformersSampler(model, tokenizer, Sampling(temperature=0), prefix_cache_mb=100)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    said = keeping([request])[0].ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    keeping.forget()
    assert keeping.prefixes.bytes == 0
    then = replace(request, context=[*request.context, *said, 40])
    assert keeping([then]) == plain([then])


def test_the_store_is_bounded_and_the_oldest_goes_first():
    def prefix(tokens):
        return Prefix(list(range(tokens)), [(torch.zeros(1, tokens, 25), torch.zeros(1, tokens, 25))])  # 200 B a token

    store = PrefixCache(max_mb=0.01)
    for i in range(4):
        store.keep(SampleRequest([0], 1, 0, conversation=i), prefix(15))  # 3,000 B each
    assert store.bytes == 9000 and list(store._kept) == [1, 2, 3]
    store.keep(SampleRequest([0], 1, 0, conversation=9), prefix(100))  # larger than all
    assert list(store._kept) == [1, 2, 3]
    store.keep(SampleRequest([0], 1, 0), prefix(1))  # of no conversation
    assert store.take(SampleRequest([*range(15), 7], 1, 0, conversation=2)) is not None
    assert store.bytes == 6000 and list(store._kept) == [1, 3]


def test_models_that_cannot_reuse(tokenizer):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, use_sliding_window=True, sliding_window=8,
        max_window_layers=1, eos_token_id=tokenizer.eos_token_id, **shape,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    assert not can_reuse(model)
    keeping = TransformersSampler(model, tokenizer, Sampling(temperature=0), prefix_cache_mb=100)
    plain = TransformersSampler(model, tokenizer, Sampling(temperature=0))
    assert conversations(keeping, tokenizer) == conversations(plain, tokenizer)
    assert keeping.prefixes.reused == 0


def test_a_trainer_that_keeps_plays_the_same_and_forgets_before_the_weights_change(asking_policy, rows, tmp_path):
    """The same rollouts, step after step, though the weights move in between; nothing is kept outside of them."""

    def records(max_mb):
        folder = tmp_path / f"{max_mb}"
        trainer = trainer_for(asking_policy, folder, rows, prefix_cache_mb=max_mb, max_steps=3)
        kept = []
        forget = trainer.sampler.forget

        def forgetting():
            kept.append(trainer.sampler.prefixes.reused)
            forget()
            assert trainer.sampler.prefixes.bytes == 0

        trainer.sampler.forget = forgetting
        trainer.train()
        assert len(kept) == 3
        return kept, [(r["step"], r["question"], r["turns"], r["rewards"]) for r in read_rollouts(folder / "rollouts")]

    (nothing, plain), (some, cached) = records(0), records(50)
    assert nothing == [0, 0, 0] and some[0] > 0 and some[-1] > some[0]
    assert cached == plain and len(plain) == 12


def test_an_agent_that_keeps_answers_the_same(asking_policy):
    environment = LLMEnvironment(ScriptedChat(["the answer is Swahili ."]))
    plain = PromptAgent.from_pretrained(asking_policy, environment)
    keeping = PromptAgent.from_pretrained(asking_policy, environment, prefix_cache_mb=50)
    questions = [f"unheard of {i}" for i in range(6)]
    got, wanted = (agent.answer_all(questions, progress=False) for agent in (keeping, plain))
    assert [rollout.ids for rollout in got] == [rollout.ids for rollout in wanted]
    assert keeping.sampler.prefixes.reused > 0
    assert [rollout.ids for rollout in keeping.answer_all(questions, progress=False)] == [one.ids for one in wanted]
