"""The engine: who joins and leaves when, what is kept between turns, memory, failures.

What it samples: test_sampling.py.
"""

import asyncio
import random
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentic_prompting import LLMEnvironment, PromptAgent
from agentic_prompting.llm import ScriptedChat, gather
from agentic_prompting.local import Sampling, TransformersEngine, TransformersSampler, local_policy
from agentic_prompting.rollout import (
    BatchEngine,
    Sample,
    SampleRequest,
    read_rollouts,
    run_with_engine,
)
from support.sampling import requests_for, sample
from support.training import trainer_for

SETTINGS = [
    Sampling(temperature=0),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3),
]
GREEDY = Sampling(temperature=0)


def conversations(sampler, tokenizer, n=7, turns=4, late=2, seed=0):
    """Play `n` conversations, of which `late` join in the third turn; in each turn some have
    nothing to say.
    """
    rng = random.Random(seed)

    def text(least, most):
        return [rng.randrange(4, len(tokenizer)) for _ in range(rng.randint(least, most))]

    contexts = [text(1, 40) for _ in range(n)]
    for turn in range(turns):
        talking = [i for i in range(n) if (turn >= 2 or i >= late) and rng.random() < 0.8]
        requests = [
            SampleRequest(contexts[i], rng.randint(1, 12), 100 * turn + i, conversation=i)
            for i in talking
        ]
        if not requests:
            continue
        for i, one in zip(talking, sampler(requests), strict=True):
            contexts[i] = contexts[i] + one.ids + text(1, 15)
    return contexts


def ids(samples):
    return [sample.ids for sample in samples]


# --- between turns --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("max_mb", [1000, 0.05, 0])
def test_samples_do_not_depend_on_the_cache(policy, tokenizer, sampling, max_mb):
    plain = TransformersSampler(policy, tokenizer, sampling)
    engine = TransformersEngine(
        policy, tokenizer, sampling, max_batch_size=3, prefix_cache_mb=max_mb
    )
    for seed in range(3):
        engine.forget()
        played = conversations(lambda requests: sample(engine, requests), tokenizer, seed=seed)
        assert played == conversations(plain, tokenizer, seed=seed)
        assert engine.cached_bytes <= max_mb * 1e6
    assert (engine.stats["reused"] > 0) == (max_mb > 0)


def test_the_logits_are_those_of_reading_everything(policy, tokenizer):
    """Not only the same tokens: keys and values are in the right place, with the right positions."""
    engine = TransformersEngine(policy, tokenizer)
    first = [SampleRequest(list(range(10, 10 + n)), 3, n, conversation=n) for n in (3, 9, 5)]
    samples = sample(engine, first)
    replies = ([7, 8], [9] * 11, [30])
    then = [
        replace(request, context=[*request.context, *one.ids, *reply], max_new_tokens=9)
        for request, one, reply in zip(first, samples, replies, strict=True)
    ]
    fresh = SampleRequest([40, 41, 42, 43], 6, 0, conversation=99)
    for request, one in zip(
        [*first, *then, fresh], samples + sample(engine, [*then, fresh]), strict=True
    ):
        whole = torch.tensor([request.context + one.ids])
        with torch.no_grad():
            logprobs = policy(whole).logits.log_softmax(-1)[0, len(request.context) - 1 : -1]
        plain = logprobs.gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
        assert torch.allclose(torch.tensor(one.logprobs), plain, atol=2e-5)
    assert engine.stats["reused"] > 0


def test_only_what_is_new_is_read(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer, GREEDY)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    said = sample(engine, [request])[0].ids
    sample(engine, [replace(request, context=[*request.context, *said, 40, 41, 42])])
    assert engine.stats["reused"] == 20 + len(said) - 1
    assert engine.stats["read"] == 20 + 1 + 3  # the last sampled token has not been read before


def test_another_text_is_not_taken_for_the_conversation(policy, tokenizer):
    plain = TransformersSampler(policy, tokenizer, GREEDY)
    engine = TransformersEngine(policy, tokenizer, GREEDY)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    for context in (request.context, list(range(11, 50)), [12], [12], list(range(12, 20))):
        other = replace(request, context=context)
        assert ids(sample(engine, [other])) == ids(plain([other]))
    assert engine.stats["reused"] == 0


def test_the_oldest_conversation_is_dropped_first(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer, GREEDY)
    for number in range(4):
        sample(engine, [SampleRequest(list(range(10, 25)), 1, 0, conversation=number)])
    one = engine.cached_bytes // 4
    engine = TransformersEngine(policy, tokenizer, GREEDY, prefix_cache_mb=3.5 * one / 1e6)
    for number in range(4):
        sample(engine, [SampleRequest(list(range(10, 25)), 1, 0, conversation=number)])
    assert list(engine.prefix_cache) == [1, 2, 3] and engine.cached_bytes == 3 * one
    sample(
        engine, [SampleRequest(list(range(10, 25)) * 5, 1, 0, conversation=9)]
    )  # larger than all
    sample(engine, [SampleRequest([10], 1, 0)])  # of no conversation
    assert list(engine.prefix_cache) == [1, 2, 3]


def test_concurrent_turns_are_cached_once(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer, GREEDY)
    request = SampleRequest(list(range(10, 30)), 5, 0, conversation=1)
    sample(engine, [request, replace(request, max_new_tokens=3)])
    (kept,) = engine.prefix_cache.values()
    assert engine.cached_bytes == sum(block.nbytes for layer in kept[1] for block in layer)


# --- in the middle of turns -----------------------------------------------------------------------


class Stepped(TransformersEngine):
    """Calls `between` before each piece of work, on the thread that works."""

    between = staticmethod(lambda engine: None)

    def step(self, arrived):
        self.between(self)
        super().step(arrived)


def test_nobody_waits_for_the_longest_turn(policy, tokenizer):
    """While one turn of 60 tokens is written, another conversation has several turns."""
    engine = TransformersEngine(policy, tokenizer, end_of_turn_ids=[len(tokenizer) + 5])
    order = []

    async def talk(name, lengths):
        context = [5, 6, 7]
        for number, length in enumerate(lengths):
            one = await engine(SampleRequest(context, length, number, conversation=hash(name)))
            context = [*context, *one.ids, 9]
            order.append((name, number))

    run_with_engine(engine, gather([talk("long", [60]), talk("short", [4, 4, 4, 4])]))
    assert order == [*(("short", number) for number in range(4)), ("long", 0)]


def test_rows_that_do_not_fit_wait(policy, tokenizer):
    """A bound on memory: rows are put back in mid-turn, read again, and sample what they would have
    sampled.
    """
    requests = requests_for(tokenizer, 40, max_tokens=90)
    roomy = TransformersEngine(policy, tokenizer, on_callers_thread=True)
    expected = ids(sample(roomy, requests))
    per_token = roomy.slab.bytes(1, 1)
    tight = Stepped(
        policy, tokenizer, max_batch_mb=per_token * 32 * 64 / 1e6, on_callers_thread=True
    )
    most = []
    preempted = []

    def look(engine):
        most.append(engine.slab.bytes(len(engine.rows), 1))
        preempted.extend(engine._preempted)

    tight.between = look
    assert ids(sample(tight, requests)) == expected
    assert preempted, "the bound was met in the middle of turns"
    assert max(most) <= per_token * 32


def test_gpu_bound_follows_the_free_memory(policy, tokenizer, monkeypatch):
    """The first rollouts of a training run come before the optimizer has its states; a bound of
    then is too much later. What torch holds and does not use counts as free. A stand-in for a GPU:
    what CUDA says, and whether rows fit.
    """
    free = [0]
    reserved = [0]
    used = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used[0])
    engine = TransformersEngine(policy, tokenizer, on_callers_thread=True)
    block = torch.zeros(16, 1, 64, 1)
    fits = []
    for free[0], reserved[0], used[0] in ((32768, 0, 0), (0, 1000, 1000), (0, 32768, 0)):
        with engine.ready():
            engine.model = SimpleNamespace(device=torch.device("cuda"))
            engine.slab.layers = [[block, block]]
            fits.append(engine._fits(16, 64))
    assert fits == [True, False, True], "8 KB for rows of half of 32 KB"


@torch.no_grad()
def change_weights(model):
    """Add noise to every weight."""
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(0)
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_weights_may_change_during_a_turn(tiny_policy, tokenizer):
    """Rows at work are read again with the new weights and go on with their own random numbers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    request = SampleRequest(list(range(10, 30)), 12, 3, conversation=1)
    engine = Stepped(model, tokenizer, end_of_turn_ids=[len(tokenizer) + 5], on_callers_thread=True)
    steps = []

    def change(engine):
        steps.append(1)
        if len(steps) == 6:
            change_weights(model)
            engine.forget()

    engine.between = change
    (whole,) = sample(engine, [request])
    first = whole.ids[:5]
    rest = whole.ids[5:]
    engine.between = lambda engine: None
    # What the changed model gives from there on, with the numbers that were left.
    drawn = np.random.default_rng(3).random(12)[5:]
    context = request.context + first
    for number, token in zip(drawn, rest, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([context])).logits[:, -1]
        chosen, _ = Sampling().choose(scores, torch.tensor([number], dtype=torch.double))
        assert int(chosen[0]) == token
        context = [*context, token]


def test_a_cancelled_request_leaves(policy, tokenizer):
    engine = Stepped(policy, tokenizer, end_of_turn_ids=[len(tokenizer) + 5])
    at_work = []
    tasks = []

    async def both():
        tasks.append(asyncio.create_task(engine(SampleRequest([5], 100_000, 0))))
        one = await engine(SampleRequest([6], 20, 0))
        tasks[0].cancel()
        later = await engine(SampleRequest([6], 20, 0))
        return one, later

    engine.between = lambda engine: at_work.append(len(engine.rows))
    one, later = run_with_engine(engine, both())
    assert one.ids == later.ids and len(one.ids) == 20
    assert at_work[-1] == 1 and max(at_work) == 2


# --- threads and failures -------------------------------------------------------------------------


def test_engine_thread_ends_when_idle(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer)
    sample(engine, requests_for(tokenizer, 3))
    worker = next(
        (thread for thread in threading.enumerate() if thread.name == "TransformersEngine"), None
    )
    if worker is not None:
        worker.join(30)
    assert engine._worker is None
    assert len(sample(engine, requests_for(tokenizer, 3))) == 3, "and another comes when there is"


def test_model_is_released_before_the_last_reply(policy, tokenizer):
    """A callback that has asked an agent goes on to train the same model: what the thread sets back
    comes before.
    """

    class LetsGoSlowly(TransformersEngine):
        @contextmanager
        def ready(self):
            with super().ready():
                yield
                time.sleep(0.1)

    engine = LetsGoSlowly(policy.eval(), tokenizer)
    sample(engine, requests_for(tokenizer, 2))
    policy.train()
    time.sleep(0.3)
    assert policy.training


def test_error_fails_current_requests_only(policy, tokenizer):
    engine = Stepped(policy, tokenizer)
    engine.between = lambda engine: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sample(engine, requests_for(tokenizer, 3))
    engine.between = lambda engine: None
    assert len(sample(engine, requests_for(tokenizer, 3))) == 3 and not engine.rows


def test_together_samples_when_everybody_waits():
    """Batches depend on the requests alone: nobody is sampled before all that live have asked."""
    batches = []
    engine = BatchEngine(
        lambda requests: batches.append(len(requests)) or [Sample([1]) for _ in requests],
        on_callers_thread=True,
    )
    living = 4

    async def talk(turns, pause):
        nonlocal living
        for turn in range(turns):
            await engine(SampleRequest([turn], 1, 0))
            await asyncio.sleep(pause)
        living -= 1
        engine.wake()

    run_with_engine(
        engine, gather(talk(n + 1, 0.01 * n) for n in range(4)), count_unfinished=lambda: living
    )
    assert batches == [4, 3, 2, 1]


def test_together_the_clock_does_not_order_the_rows():
    """Who comes back first depends on the clock; the rows of a batch stand in the order of their
    conversations.
    """
    batches = []

    def sampler(requests):
        batches.append([request.conversation for request in requests])
        return [Sample([1]) for _ in requests]

    engine = BatchEngine(sampler, max_batch_size=2, on_callers_thread=True)
    living = 3

    async def talk(number):
        await engine(SampleRequest([1], 1, 0, conversation=number))
        await asyncio.sleep(0.02 * (3 - number))  # the last comes back first
        await engine(SampleRequest([1], 1, 0, conversation=number))
        nonlocal living
        living -= 1
        engine.wake()

    run_with_engine(engine, gather(map(talk, range(3))), count_unfinished=lambda: living)
    assert sum(map(len, batches)) == 6 and all(batch == sorted(batch) for batch in batches)


def test_unavailable_model_fails_all_requests(tokenizer):
    """Also of those who asked before the thread had looked: it ends instead of trying for ever."""

    @contextmanager
    def gone():
        raise FileNotFoundError("no weights")
        yield

    engine = TransformersEngine(gone, tokenizer, end_of_turn_ids=[1])
    with pytest.raises(FileNotFoundError, match="no weights"):
        sample(engine, requests_for(tokenizer, 3))


# --- which models ---------------------------------------------------------------------------------

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def test_sliding_windows(tokenizer):
    """Layers that see only the last tokens: the window is in the mask."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    model = Qwen3ForCausalLM(config).eval()
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    engine = local_policy(model, tokenizer, GREEDY)
    assert isinstance(engine, TransformersEngine)
    plain = TransformersSampler(model, tokenizer, GREEDY)
    played = conversations(lambda requests: sample(engine, requests), tokenizer)
    assert played == conversations(plain, tokenizer) and engine.stats["reused"] > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_kinds_of_attention(tiny_policy, tokenizer, attention):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, attn_implementation=attention).eval()
    engine = TransformersEngine(model, tokenizer, GREEDY)
    plain = TransformersSampler(model, tokenizer, GREEDY)
    assert conversations(lambda requests: sample(engine, requests), tokenizer) == conversations(
        plain, tokenizer
    )
    assert model.config._attn_implementation == attention


def test_a_recurrent_model_goes_in_batches(tokenizer):
    model = MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), state_size=4, eos_token_id=2, **SHAPE)
    ).eval()
    policy = local_policy(model, tokenizer, GREEDY)
    assert isinstance(policy, BatchEngine)
    requests = requests_for(tokenizer, 3)
    assert ids(sample(policy, requests)) == ids(
        [policy.sampler([request])[0] for request in requests]
    )


def test_engine_runs_adapters_without_prompt_learning(tiny_policy, tokenizer):
    """PEFT's wrapper hides the parameters of the model's `forward`; the model in it has them."""

    def adapted(config):
        return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy).eval(), config)

    model = adapted(
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    engine = local_policy(model, tokenizer, GREEDY)
    assert isinstance(engine, TransformersEngine)
    plain = TransformersSampler(model, tokenizer, GREEDY)
    assert conversations(lambda requests: sample(engine, requests), tokenizer) == conversations(
        plain, tokenizer
    )
    prompted = adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert isinstance(local_policy(prompted, tokenizer, GREEDY), BatchEngine)


HEADS = ["trainable", "frozen", "tied", "merged LoRA", "unmerged LoRA", "LoRA of the head"]


@pytest.fixture
def model_with(tiny_policy):
    """A function of a kind of head, to the tiny policy with that head."""

    def build(head):
        model = AutoModelForCausalLM.from_pretrained(
            tiny_policy, tie_word_embeddings=head == "tied"
        ).eval()
        if "LoRA" not in head:
            return model.requires_grad_(head == "trainable")
        targets = ["q_proj", "down_proj", *(["lm_head"] if head == "LoRA of the head" else [])]
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        ).eval()
        if head == "merged LoRA":
            model.merge_adapter()
        return model

    return build


@pytest.mark.parametrize("head", HEADS)
def test_every_head_gives_the_text_of_generate(model_with, tokenizer, head):
    model = model_with(head)
    requests = [
        replace(request, conversation=n) for n, request in enumerate(requests_for(tokenizer, 8))
    ]
    expected = []
    for request in requests:
        output = model.generate(
            input_ids=torch.tensor([request.context]),
            attention_mask=torch.ones(1, len(request.context), dtype=torch.long),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        expected.append(output[0, len(request.context) :].tolist())
    assert (
        ids(sample(TransformersEngine(model, tokenizer, GREEDY, max_batch_size=5), requests))
        == expected
    )
    assert ids(TransformersSampler(model, tokenizer, GREEDY)(requests)) == expected


@pytest.mark.parametrize("head", HEADS)
def test_the_head_reads_no_context(model_with, tokenizer, head):
    """The head computes logits only for tokens that are sampled.

    A slice that is not contiguous would make torch copy a head without gradient for every row.
    """
    model = model_with(head)
    positions = []

    def record(module, inputs):
        assert inputs[0].is_contiguous()
        positions.append(inputs[0].shape[:2])

    model.get_output_embeddings().register_forward_pre_hook(record)
    requests = [SampleRequest([5, 6, 7, 8], 6, seed) for seed in range(4)]
    engine = TransformersEngine(
        model, tokenizer, end_of_turn_ids=[len(tokenizer) + 5], on_callers_thread=True
    )
    sample(engine, requests)
    assert sum(rows * tokens for rows, tokens in positions) == engine.stats["tokens"] == 24
    positions.clear()
    TransformersSampler(model, tokenizer, end_of_turn_ids=[len(tokenizer) + 5])(requests)
    assert positions == [(4, 1)] * 6


def test_engine_names_what_it_cannot_run(tokenizer):
    model = MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), state_size=4, eos_token_id=2, **SHAPE)
    ).eval()
    with pytest.raises(
        ValueError, match=r"MambaForCausalLM, which has linear_attention layers.*local_policy"
    ):
        TransformersEngine(model, tokenizer)
    lent = TransformersEngine(lambda: nullcontext(model), tokenizer, end_of_turn_ids=[2])
    with pytest.raises(ValueError, match="MambaForCausalLM, which has linear_attention layers"):
        sample(lent, requests_for(tokenizer, 2))


# --- in use ---------------------------------------------------------------------------------------


def test_trainer_forgets_caches_before_weights_change(asking_policy, rows, tmp_path):
    """The same rollouts, step after step, though the weights move in between; nothing is kept
    outside of them.
    """

    def records(max_mb):
        folder = tmp_path / f"{max_mb}"
        trainer = trainer_for(asking_policy, folder, rows, prefix_cache_mb=max_mb, max_steps=3)
        kept = []
        forget = trainer.policy.forget

        def forgetting():
            kept.append(trainer.policy.stats["reused"])
            forget()
            assert trainer.policy.cached_bytes == 0 and not trainer.policy.slab.layers

        trainer.policy.forget = forgetting
        trainer.train()
        assert len(kept) == 3
        return kept, [
            (r["step"], r["question"], r["turns"], r["rewards"])
            for r in read_rollouts(folder / "rollouts")
        ]

    nothing, plain = records(0)
    some, cached = records(50)
    assert nothing == [0, 0, 0] and some[0] > 0 and some[-1] > some[0]
    assert cached == plain and len(plain) == 12


def test_an_agent_that_keeps_answers_the_same(asking_policy):
    environment = LLMEnvironment(ScriptedChat(["the answer is Swahili ."]))
    plain = PromptAgent.from_pretrained(asking_policy, environment, prefix_cache_mb=0)
    keeping = PromptAgent.from_pretrained(asking_policy, environment)
    questions = [f"unheard of {i}" for i in range(6)]
    got, wanted = (agent.answer_all(questions, progress=False) for agent in (keeping, plain))
    assert [rollout.ids for rollout in got] == [rollout.ids for rollout in wanted]
    assert keeping.policy.stats["reused"] > 0 and plain.policy.stats["reused"] == 0
    assert [rollout.ids for rollout in keeping.answer_all(questions, progress=False)] == [
        one.ids for one in wanted
    ]


def test_an_agent_takes_a_function_for_its_environment(asking_policy):
    """As the trainers do; and what cannot be called is refused before anything is asked."""
    answers = PromptAgent.from_pretrained(
        asking_policy, lambda rollout: "the answer is Swahili ."
    ).answer_all(["unheard of"] * 4, progress=False)
    assert not any(rollout.error for rollout in answers)
    assert any(rollout.observations for rollout in answers)
    with pytest.raises(TypeError, match="LLMEnvironment is the class|is the class LLMEnvironment"):
        PromptAgent.from_pretrained(asking_policy, LLMEnvironment)
