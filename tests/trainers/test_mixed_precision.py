"""Weights of one precision under autocast of another: float32 weights with bfloat16 autocast are
TRL's default.

Every way of sampling runs, and gives the log-probabilities that a forward pass over the whole text
gives under the same autocast, up to the rounding of the lower precision.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import LLMEnvironment, PromptAgent
from agentic_prompting.cli import train_program
from agentic_prompting.llm import ScriptedChat, complete
from agentic_prompting.local import (
    Sampling,
    TransformersChat,
    TransformersEngine,
    TransformersSampler,
)
from agentic_prompting.rollout import AgentSpec, SampleRequest
from agentic_prompting.sandbox.setup import prepare_guarded
from support import espl_training
from support.sampling import sample
from support.tokenizers_for_tests import tokenizer_for
from support.training import trainer_for

GREEDY = Sampling(temperature=0)
NO_END = [10**6]
# How far two orders of the same sums may be apart, for logits of about 5: 2^-8 of them is .02 in
# bfloat16.
CLOSE = {torch.float32: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.15}
WEIGHTS = [torch.float32, torch.bfloat16]
AUTOCAST = [None, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for("chatml")


@pytest.fixture(params=WEIGHTS, ids=["float32 weights", "bfloat16 weights"])
def weights(request):
    return request.param


@pytest.fixture(params=AUTOCAST, ids=["no autocast", "bfloat16 autocast", "float16 autocast"])
def autocast(request):
    return request.param


@pytest.fixture
def model(weights, autocast, tokenizer):
    return small_model(tokenizer, weights, autocast)


@pytest.fixture
def close(weights, autocast):
    return max(CLOSE[weights], CLOSE[autocast or weights])


def small_model(tokenizer, weights, autocast, **changes):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )
    return cast(Qwen3ForCausalLM(config).to(weights).eval(), autocast)


def cast(model, autocast):
    """As accelerate prepares a model."""
    if autocast is not None:
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", autocast)(model.forward))
    return model


def logprobs_of(model, request, ids):
    """What one forward pass over the whole text gives to the tokens that were sampled."""
    whole = torch.tensor([request.context + ids])
    with torch.no_grad():
        logprobs = model(whole).logits.float().log_softmax(-1)[0, len(request.context) - 1 : -1]
    return logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def check(model, requests, samples, close, description):
    differences = []
    for request, drawn in zip(requests, samples, strict=True):
        assert len(drawn.ids) == len(drawn.logprobs) == request.max_new_tokens
        differences.append(
            (torch.tensor(drawn.logprobs) - logprobs_of(model, request, drawn.ids)).abs()
        )
    differences = torch.cat(differences)
    print(
        f"{description}: sampler against forward pass: mean {differences.mean():.1e}, max "
        f"{differences.max():.1e}"
    )
    assert differences.max() < close
    return differences


def texts(n, max_length=30, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(4, 200) for _ in range(rng.randint(2, max_length))] for _ in range(n)]


def test_engine(model, tokenizer, close):
    requests = [SampleRequest(text, 8, seed) for seed, text in enumerate(texts(4))]
    samples = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), requests)
    check(model, requests, samples, close, "engine")


def test_engine_with_rows_that_join_and_conversations_that_go_on(model, tokenizer, close):
    engine = TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END, max_batch_size=3)
    first = [
        SampleRequest(text, 2 + 3 * seed, seed, conversation=seed)
        for seed, text in enumerate(texts(6))
    ]
    samples_of_first = sample(engine, first)
    then = [
        replace(request, context=[*request.context, *drawn.ids, 7, 9, 8], max_new_tokens=6)
        for request, drawn in zip(first, samples_of_first, strict=True)
    ]
    check(model, first + then, samples_of_first + sample(engine, then), close, "rows that join")
    assert engine.stats["reused"] > 0


def test_drafts(model, tokenizer, close):
    engine = TransformersEngine(model, tokenizer, GREEDY, end_of_turn_ids=NO_END)
    plain = [SampleRequest(text, 10, 0) for text in texts(3)]
    drafted = [
        replace(one, draft=said.ids[:6])
        for one, said in zip(plain, sample(engine, plain), strict=True)
    ]
    samples = sample(engine, drafted)
    check(model, drafted, samples, close, "drafting")
    assert any(one.drafted for one in samples)


def test_greedy_requests(model, tokenizer, close):
    requests = [SampleRequest(text, 6, 0, greedy=True) for text in texts(3)]
    samples = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), requests)
    check(model, requests, samples, close, "greedy requests")
    for request, drawn in zip(requests, samples, strict=True):
        with torch.no_grad():
            best = (
                model(torch.tensor([request.context + drawn.ids]))
                .logits.float()
                .log_softmax(-1)
                .max(-1)
                .values
            )
        behind = best[0, len(request.context) - 1 : -1] - torch.tensor(drawn.logprobs)
        assert behind.abs().max() < close, (
            "the likeliest token, or one that rounding makes as likely"
        )


def test_whole_batches(model, tokenizer):
    requests = [SampleRequest(text, 6, seed) for seed, text in enumerate(texts(3))]
    samples = TransformersSampler(model, tokenizer, end_of_turn_ids=NO_END)(requests)
    assert [len(drawn.ids) for drawn in samples] == [6, 6, 6]


def test_chat(model, tokenizer):
    with TransformersChat(model, tokenizer, draft=True) as chat:
        short = complete(chat, "Which country?", session="a", max_tokens=6)
        longer = complete(chat, "Which country?", session="a", max_tokens=12)
        other = complete(chat, "Which country then?", session="a", max_tokens=12)
    assert not (short.error or longer.error or other.error)
    assert longer.text.startswith(short.text)


def test_keys_and_values_change_their_type_with_the_autocast(tokenizer):
    """A conversation that began without autocast goes on under it, and the other way round."""
    plain, cast = (small_model(tokenizer, torch.float32, how) for how in (None, torch.bfloat16))
    for first, second in ((plain, cast), (cast, plain)):
        engine = TransformersEngine(first, tokenizer, end_of_turn_ids=NO_END)
        request = SampleRequest([10, 11, 12], 5, 0, conversation=1)
        (one,) = sample(engine, [request])
        engine._worker and engine._worker.join()
        engine._model_source = second
        then = replace(request, context=[*request.context, *one.ids, 7])
        check(plain, [then], sample(engine, [then]), CLOSE[torch.bfloat16], "another autocast")


def test_an_agent_with_greedy_answers(weights, autocast, asking_policy):
    model = cast(
        AutoModelForCausalLM.from_pretrained(asking_policy, dtype=weights).eval(), autocast
    )
    tokenizer = AutoTokenizer.from_pretrained(asking_policy)
    spec = AgentSpec.load(asking_policy)
    environment = LLMEnvironment(ScriptedChat(["the answer is Swahili ."]))
    agent = PromptAgent(model, tokenizer, environment, spec, greedy_answer=True)
    rollouts = agent.answer_all(["unheard of"] * 3, progress=False)
    assert not any(rollout.error for rollout in rollouts)
    assert any(rollout.answer for rollout in rollouts)


# --- in a trainer ---------------------------------------------------------------------------------


@pytest.fixture(params=["no", "bf16", "fp16"])
def precision(request):
    if request.param == "fp16" and not torch.cuda.is_available():
        pytest.skip("accelerate turns fp16 off on a CPU: the same as 'no'")
    return request.param


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_trainer_samples_under_the_autocast_that_it_scores_under(
    weights, precision, lora, asking_policy, rows, tmp_path
):
    """And the sampler's log-probabilities are the trainer's, as far as the precision goes."""
    chat = ScriptedChat(["the answer is Swahili ."])
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    trainer = trainer_for(
        asking_policy,
        tmp_path,
        rows,
        chat,
        options=adapter,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        model_init_kwargs={"dtype": str(weights).removeprefix("torch.")},
    )
    seen = {"sampling": set(), "scoring": set()}
    doing = "sampling"
    played = []
    block = next(
        module for name, module in trainer.model.named_modules() if name.endswith("layers.0")
    )
    block.register_forward_pre_hook(lambda *_: seen[doing].add(_autocast_now()))
    play = trainer.player.play
    trainer.current_gradient_accumulation_steps = 1
    trainer.player.play = lambda rollouts, description: (
        play(rollouts, description) or played.extend(rollouts)
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    )
    doing = "scoring"
    with torch.no_grad():
        scored, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model_wrapped,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            batch["completion_ids"].shape[1],
        )
    expected = torch.bfloat16 if precision == "bf16" else None
    assert seen["sampling"] == seen["scoring"] == {expected}
    is_scored = batch["tool_mask"] * batch["completion_mask"] == 1
    differences = [
        row[: len(rollout.logprobs)]
        .sub(torch.tensor(rollout.logprobs))[mask[: len(rollout.logprobs)]]
        .abs()
        for rollout, row, mask in zip(played, scored.float(), is_scored, strict=True)
    ]
    differences = torch.cat(differences)
    print(f"sampling/logp_difference: mean {differences.mean():.1e}, max {differences.max():.1e}")
    assert len(differences) > 0
    assert differences.max() < max(CLOSE[weights], CLOSE[expected or weights])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_training_learns_finite_things(
    weights, precision, checkpointing, asking_policy, rows, tmp_path
):
    """Steps with [`ScoredTokensModel`], a reference model and old log-probabilities."""
    trainer = trainer_for(
        asking_policy,
        tmp_path,
        rows,
        ScriptedChat(["the answer is Swahili ."]),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        model_init_kwargs={"dtype": str(weights).removeprefix("torch.")},
        beta=0.01,
        num_iterations=2,
        max_steps=2,
        gradient_checkpointing=checkpointing,
        temperature=1.5,
        learning_rate=1e-2,
    )
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert all(
        torch.isfinite(tensor).all() and tensor.dtype == weights for tensor in after.values()
    )
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    assert all(
        log["grad_norm"] == log["grad_norm"]
        for log in trainer.state.log_history
        if "grad_norm" in log
    )


def test_distillation(weights, precision, asking_policy, rows, tmp_path):
    trainer = espl_training.trainer_for(
        asking_policy,
        tmp_path,
        rows,
        max_steps=1,
        distill_epochs=0.5,
        per_device_eval_batch_size=16,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        model_init_kwargs={"dtype": str(weights).removeprefix("torch.")},
    )
    trainer.policy = trainer.player.backend.policy  # the engine in place of the test's writer
    trainer.train()
    assert trainer.final_prompt().text == ""
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())


def _autocast_now():
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


# --- the demonstrations ---------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
FEW_STEPS = [
    "--bf16",
    "true",
    "--max_steps",
    "1",
    "--warm_start_steps",
    "2",
    "--n_test",
    "4",
    "--seed",
    "0",
    "--max_completion_length",
    "120",
    "--max_turns",
    "2",
]


@pytest.mark.parametrize(
    ("program", "config", "batch"),
    [("prompt-r1", "sandbox.yaml", 8), ("espl", "espl/sandbox.yaml", 12)],
)
def test_the_demonstrations(program, config, batch, tmp_path, capsys):
    if program == "espl":
        prepare_guarded(tmp_path, seed=0, n_test=4, warm_start_steps=2, copying_steps=1)
        (tmp_path / "warm_start" / "made_from.json").unlink()  # the program has other settings
    options = [
        "--config",
        CONFIGS / config,
        "--output_dir",
        tmp_path,
        "--per_device_train_batch_size",
        batch,
    ]
    train_program.main(program, [*map(str, options), *FEW_STEPS])
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
