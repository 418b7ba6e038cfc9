"""What works for each family of models, at tiny size with random weights; one test for each question.

A family that the engine cannot run is refused by it in a sentence that names it, and goes in batches instead
([`local_policy`]); everything else holds for it, too.
"""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from agentic_prompting.local import Sampling, TransformersEngine, local_policy
from agentic_prompting.rollout import BatchEngine, SampleRequest
from agentic_prompting.trainers.loss import ScoredTokens
from support.sampling import sample

VOCABULARY, END = 128, 2
NO_END = [10**6]
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
# Without router logits: TRL 1.16 looks for their number of experts under a name that Granite's configuration lacks.
MAMBA = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# Family: its class without `ForCausalLM`, its configuration, and what the engine's refusal says of it (None: it runs).
FAMILIES = {
    "Qwen3": ("Qwen3", HEAD, None),
    "Qwen3-MoE": ("Qwen3Moe", {**HEAD, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}, None),
    "Mixtral": ("Mixtral", {**HEAD, **EXPERTS, "num_local_experts": 4}, None),
    "Llama": ("Llama", HEAD, None),
    "Gemma 3": ("Gemma3", {**HEAD, **WINDOW}, None),
    "Mistral": ("Mistral", {**HEAD, "sliding_window": 8}, None),
    "Phi3": ("Phi3", {"sliding_window": 8}, None),
    "OLMo2": ("Olmo2", {}, None),
    "gpt-oss": ("GptOss", {**HEAD, **WINDOW, **EXPERTS, "num_local_experts": 4}, None),
    "Qwen3-Next": ("Qwen3Next", {**HEAD, **LINEAR, **EXPERTS, **SHARED}, "linear_attention layers"),
    "Granite hybrid": ("GraniteMoeHybrid", MAMBA, "linear_attention layers"),
    "Mamba": ("Mamba", {"state_size": 4}, "linear_attention layers"),
}


@cache
def model_of(family):
    name, changes, _ = FAMILIES[family]
    shape = {**SHAPE, **changes}
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**shape)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return model_of(family)


@pytest.fixture(scope="module")
def tokenizer():
    """What a policy asks of a tokenizer where nothing is decoded."""
    return SimpleNamespace(pad_token_id=0, bos_token_id=None)


CHECKED = {
    "sampled": "engine", "greedy as `generate`": "yes", "log-probabilities within 1e-4": "yes", "`ScoredTokens`": "yes",
    "gradient checkpointing": "yes",
}  # fmt: skip
IN_BATCHES = {"sampled": "in batches", "log-probabilities within 1e-4": "none"}


def table():
    """What the tests below check of each family, in Markdown."""
    rows = [["family", *CHECKED], ["---"] * (len(CHECKED) + 1)]
    for name, (_, _, refusal) in FAMILIES.items():
        rows.append([name, *{**CHECKED, **(IN_BATCHES if refusal else {})}.values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_of_families_has_them_all():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    assert table() in page, f"copy this into docs/families.md:\n{table()}"


def texts(n, least=2, most=30, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCABULARY) for _ in range(rng.randint(least, most))] for _ in range(n)]


def test_greedy_answers_are_those_of_generate(model, tokenizer):
    """Rows of many lengths, some of which join late, against transformers' own search over each row alone."""
    policy = local_policy(model, tokenizer, Sampling(temperature=0), end_of_turn_ids=[END], max_batch_size=4)
    requests = [SampleRequest(text, 4 + n % 3 * 4, n) for n, text in enumerate(texts(6))]
    for request, one in zip(requests, sample(policy, requests), strict=True):
        output = model.generate(
            torch.tensor([request.context]), max_new_tokens=request.max_new_tokens, do_sample=False,
            eos_token_id=END, pad_token_id=0, attention_mask=torch.ones(1, len(request.context), dtype=torch.long),
        )  # fmt: skip
        assert one.ids == output[0, len(request.context) :].tolist()


def test_log_probabilities_are_those_of_a_forward_pass(family, model, tokenizer):
    """Rows join and leave, and conversations go on from keys and values that were kept."""
    if FAMILIES[family][2]:
        pytest.skip(f"{family} has {FAMILIES[family][2]}: it goes in batches, which give no log-probabilities")
    engine = TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END, max_batch_size=3)
    first = [SampleRequest(text, 2 + 3 * n, n, conversation=n) for n, text in enumerate(texts(5))]
    said = sample(engine, first)
    then = [
        replace(request, context=[*request.context, *one.ids, *text], max_new_tokens=6)
        for request, one, text in zip(first, said, texts(5, 1, 12, seed=1), strict=True)
    ]
    for request, one in zip(first + then, said + sample(engine, then), strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([request.context + one.ids]), output_router_logits=False).logits
        scores = scores.log_softmax(-1)[0, len(request.context) - 1 : -1]
        plain = scores.gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(one.logprobs), plain, atol=1e-4, rtol=0)
    assert engine.stats["reused"] > 0


def test_attention_sinks_stay_where_flash_attention_is_asked_for(tokenizer):
    """Flash attention takes no masks, and sdpa knows no sinks: the engine computes them eagerly."""
    model, request = model_of("gpt-oss"), SampleRequest(texts(1, 20)[0], 6, 0)
    (expected,) = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), [request])
    config, before = model.config, model.config._attn_implementation
    try:
        config._attn_implementation = "flash_attention_2"
        (one,) = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), [request])
    finally:
        config._attn_implementation = before
    assert one.ids == expected.ids
    torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(expected.logprobs), atol=1e-5, rtol=0)


def loss_and_gradients(model, scored):
    """A policy-gradient loss of three padded rows, scored by TRL's own method; without `scored` everywhere."""
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))
    mask = torch.tensor([[0] * (n % 3) + [1] * (24 - n % 3) for n in range(3)])
    ids = torch.tensor(texts(3, 24, 24, seed=3)) * mask
    own = torch.tensor([[1] * 4 + [0] * 5 + [1] * 3] * 3)
    has_router = getattr(model.config, "output_router_logits", False)
    model.zero_grad()
    logps, _, auxiliary = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, ScoredTokens(model, own) if scored else model, ids, mask, 12, compute_aux_loss=has_router
    )
    loss = -(logps * own * torch.tensor([[1.0], [-0.5], [0.3]])).sum()
    (loss + (0.1 * auxiliary if has_router else 0.0)).backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.fixture
def trained(model):
    """With TRL's head; as it was afterwards."""
    add_fused_lm_head(model)
    yield model.train()
    model.eval()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    del model.forward


def equal(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1].keys() == other[1].keys()
    assert any(gradient.abs().max() > 0 for gradient in one[1].values())
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("skips", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_scored_tokens_change_no_gradient(trained, skips, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: skips)
    equal(loss_and_gradients(trained, scored=True), loss_and_gradients(trained, scored=False))


def test_gradient_checkpointing_changes_no_gradient(trained):
    plain = loss_and_gradients(trained, scored=True)
    trained.gradient_checkpointing_enable({"use_reentrant": False})
    equal(loss_and_gradients(trained, scored=True), plain)


def test_what_the_engine_cannot_run_is_refused_by_name(family, model, tokenizer):
    refusal = FAMILIES[family][2]
    if refusal is None:
        assert isinstance(local_policy(model, tokenizer, end_of_turn_ids=[END]), TransformersEngine)
        return
    with pytest.raises(ValueError, match=f"cannot run {type(model).__name__}, which has {refusal}"):
        TransformersEngine(model, tokenizer, end_of_turn_ids=[END])
    assert isinstance(local_policy(model, tokenizer, end_of_turn_ids=[END]), BatchEngine)
