"""What works for each family of models, at tiny size with random weights; one test for each
question.

A family that the engine cannot run is refused by it in a sentence that names it, and goes in
batches instead ([`local_policy`]); everything else holds for it, too.
"""

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from agentic_prompting.local import Sampling, TransformersEngine, local_policy
from agentic_prompting.rollout import BatchEngine, SampleRequest
from agentic_prompting.sandbox.policy import world_tokenizer
from agentic_prompting.trainers.loading import check_quantization
from agentic_prompting.trainers.loss_inputs import ScoredTokensModel
from support.distributed_backends import TYPES, launch, read
from support.families import END, FAMILIES, TEMPLATES, VOCABULARY, model_of
from support.family_runs import train
from support.marks import long
from support.sampling import sample

NO_END = [10**6]


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
    "sampled": "engine",
    "greedy as `generate`": "yes",
    "log-probabilities within 1e-4": "yes",
    "`ScoredTokensModel`": "yes",
    "gradient checkpointing": "yes",
    "all weights": "yes",
    "LoRA": "yes",
    "QLoRA": "yes",
    "saved and loaded": "yes",
    "bfloat16": "",
    "system message": "yes",
    "thoughts": "plain text",
}
IN_BATCHES = {"sampled": "in batches"}
OTHERWISE = {  # what has a condition, which the tests below check
    ("Granite hybrid", "all weights"): "with `router_aux_loss_coef: 0`",
    ("Granite hybrid", "LoRA"): "the same",
    ("Granite hybrid", "QLoRA"): "the same",
    ("Mamba", "LoRA"): "without `out_proj`",
    ("Mamba", "QLoRA"): "the same, three layers whole",
}
# Mean and largest difference of the log-probabilities of sampler and trainer, both in bfloat16.
BOUND = 0.02


def table():
    """What the tests below check of each family, in Markdown."""
    rows = [["family", *CHECKED], ["---"] * (len(CHECKED) + 1)]
    for name, (_, _, refusal) in FAMILIES.items():
        cells = {**CHECKED, "bfloat16": f"< {BOUND}", **(IN_BATCHES if refusal else {})}
        _, cells["system message"], cells["thoughts"] = TEMPLATES[name]
        rows.append(
            [name, *(OTHERWISE.get((name, column), cell) for column, cell in cells.items())]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_of_families_has_them_all():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    assert table() in page, f"copy this into docs/families.md:\n{table()}"


def texts(n, least=2, most=30, seed=0):
    rng = random.Random(seed)
    return [
        [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(least, most))] for _ in range(n)
    ]


def test_greedy_answers_are_those_of_generate(model, tokenizer):
    """Rows of many lengths, some of which join late, against transformers' own search over each row
    alone.
    """
    policy = local_policy(
        model, tokenizer, Sampling(temperature=0), end_of_turn_ids=[END], max_batch_size=4
    )
    requests = [SampleRequest(text, 4 + n % 3 * 4, n) for n, text in enumerate(texts(6))]
    for request, one in zip(requests, sample(policy, requests), strict=True):
        output = model.generate(
            torch.tensor([request.context]),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(request.context), dtype=torch.long),
        )
        assert one.ids == output[0, len(request.context) :].tolist()


def test_log_probabilities_are_those_of_a_forward_pass(family, model, tokenizer):
    """Rows join and leave, and conversations go on from keys and values that were kept."""
    policy = local_policy(model, tokenizer, end_of_turn_ids=NO_END, max_batch_size=3)
    first = [SampleRequest(text, 2 + 3 * n, n, conversation=n) for n, text in enumerate(texts(5))]
    samples = sample(policy, first)
    then = [
        replace(request, context=[*request.context, *one.ids, *text], max_new_tokens=6)
        for request, one, text in zip(first, samples, texts(5, 1, 12, seed=1), strict=True)
    ]
    for request, one in zip(first + then, samples + sample(policy, then), strict=True):
        with torch.no_grad():
            options = {} if family == "Mamba" else {"output_router_logits": False}
            scores = model(torch.tensor([request.context + one.ids]), **options).logits
        scores = scores.log_softmax(-1)[0, len(request.context) - 1 : -1]
        plain = scores.gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(one.logprobs), plain, atol=1e-4, rtol=0)
    assert FAMILIES[family][2] or policy.stats["reused"] > 0


def test_attention_sinks_stay_with_flash_attention(tokenizer):
    """Flash attention takes no masks, and sdpa knows no sinks: the engine computes them eagerly."""
    model = model_of("gpt-oss")
    request = SampleRequest(texts(1, 20)[0], 6, 0)
    (expected,) = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), [request])
    config = model.config
    before = model.config._attn_implementation
    try:
        config._attn_implementation = "flash_attention_2"
        (one,) = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), [request])
    finally:
        config._attn_implementation = before
    assert one.ids == expected.ids
    torch.testing.assert_close(
        torch.tensor(one.logprobs), torch.tensor(expected.logprobs), atol=1e-5, rtol=0
    )


def loss_and_gradients(model, scored):
    """A policy-gradient loss of three padded rows, scored by TRL's own method; without `scored`
    everywhere.
    """
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))
    mask = torch.tensor([[0] * (n % 3) + [1] * (24 - n % 3) for n in range(3)])
    ids = torch.tensor(texts(3, 24, 24, seed=3)) * mask
    own = torch.tensor([[1] * 4 + [0] * 5 + [1] * 3] * 3)
    has_router = getattr(model.config, "output_router_logits", False)
    model.zero_grad()
    logps, _, auxiliary = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer,
        ScoredTokensModel(model, own) if scored else model,
        ids,
        mask,
        12,
        compute_aux_loss=has_router,
    )
    loss = -(logps * own * torch.tensor([[1.0], [-0.5], [0.3]])).sum()
    (loss + (0.1 * auxiliary if has_router else 0.0)).backward()
    return loss.item(), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


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
        torch.testing.assert_close(
            gradient, other[1][name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("skips", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_scored_tokens_change_no_gradient(trained, skips, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: skips)
    equal(loss_and_gradients(trained, scored=True), loss_and_gradients(trained, scored=False))


def test_gradient_checkpointing_changes_no_gradient(trained):
    plain = loss_and_gradients(trained, scored=True)
    trained.gradient_checkpointing_enable({"use_reentrant": False})
    equal(loss_and_gradients(trained, scored=True), plain)


def test_unsupported_architecture_is_named(family, model, tokenizer):
    refusal = FAMILIES[family][2]
    if refusal is None:
        assert isinstance(local_policy(model, tokenizer, end_of_turn_ids=[END]), TransformersEngine)
        return
    with pytest.raises(ValueError, match=f"cannot run {type(model).__name__}, which has {refusal}"):
        TransformersEngine(model, tokenizer, end_of_turn_ids=[END])
    assert isinstance(local_policy(model, tokenizer, end_of_turn_ids=[END]), BatchEngine)


def test_gpt_oss_turn_ends_at_every_configured_token(tmp_path, monkeypatch):
    """`<|return|>` and `<|call|>`, and not at `<|end|>`, behind which the answer follows the
    thoughts.
    """
    model = copy.deepcopy(model_of("gpt-oss"))
    request = SampleRequest(texts(1, 20)[0], 12, 0)
    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    (free,) = sample(TransformersEngine(model, tokenizer, end_of_turn_ids=NO_END), [request])
    for end in list(dict.fromkeys(free.ids))[1:4]:
        model.generation_config.eos_token_id = [10**6, end]
        (one,) = sample(TransformersEngine(model, tokenizer), [request])
        assert one.ids == free.ids[: free.ids.index(end) + 1] and one.finished
    named = [40, 41, 42]
    monkeypatch.setattr(
        model_of("gpt-oss", len(world_tokenizer())).generation_config, "eos_token_id", named
    )
    trainer = train("gpt-oss", "lora", tmp_path)
    for ends in (
        trainer.policy.end.end_ids,
        trainer.chat_format.end_of_turn_ids,
        trainer.eos_token_ids,
    ):
        assert set(ends) == {*named, world_tokenizer().eos_token_id}


# --- training -------------------------------------------------------------------------------------


def logged(trainer):
    """The entries of both steps; and the weights moved."""
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 2
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 1e-3 for entry in log)
    return log


@pytest.mark.parametrize("way", ["full", "lora"])
def test_family_trains_and_saves(family, way, tmp_path):
    """Sampled by the trainer's own policy, whose log-probabilities are the trainer's."""
    trainer = train(family, way, tmp_path)
    assert max(entry["sampling/logp_difference/max"] for entry in logged(trainer)) <= 1e-4
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = torch.tensor([[20, 30, 40, 50]])
    with torch.no_grad():
        torch.testing.assert_close(
            again(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5, rtol=0
        )


def test_a_family_trains_over_four_bits(family, tmp_path):
    pytest.importorskip("bitsandbytes")
    logged(train(family, "qlora", tmp_path))


class Packed(torch.nn.Linear):
    """A layer as bitsandbytes leaves it: its weights are bytes of another shape, which its own
    `forward` unpacks.
    """

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.whole = [layer.weight]
        self.bias = layer.bias
        self.weight = torch.nn.Parameter(
            torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), False
        )

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.whole[0], self.bias)


def pack(model, *names):
    """A copy of a model with these layers packed."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, Packed(child))
    return model


def test_packed_weights_are_refused():
    says = r"MambaForCausalLM multiplies by the weights of dt_proj .*llm_int8_skip_modules=\['dt_proj', 'lm_head'\]"
    with pytest.raises(ValueError, match=says):
        check_quantization(pack(model_of("Mamba"), "dt_proj", "in_proj"))
    check_quantization(pack(model_of("Mamba"), "in_proj"))
    check_quantization(
        pack(model_of("Granite hybrid"), "out_proj")
    )  # whose code reads them where it has a GPU's kernels
    check_quantization(pack(model_of("Llama"), "q_proj", "o_proj"))


def test_family_with_indivisible_layers_is_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="llm_int8_skip_modules="):
        train("Mamba", "qlora", tmp_path, whole={})


def test_in_bfloat16_sampler_and_trainer_differ_by_rounding(family, tmp_path):
    trainer = train(family, "full", tmp_path, bf16=True)
    means = [entry["sampling/logp_difference/mean"] for entry in logged(trainer)]
    assert max(means) < BOUND
    # Eager attention, which gpt-oss needs for its sinks, does the same sums for one token as for
    # all; sdpa does not.
    is_eager = trainer.model.config._attn_implementation == "eager"
    assert max(means) < 1e-6 if is_eager else max(means) > 1e-5, "in float32 it is less"


def test_unavailable_auxiliary_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match="router_aux_loss_coef=0"):
        train("Granite hybrid", "full", tmp_path, router_aux_loss_coef=0.001)


@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["zero3", "fsdp2"])
def test_two_processes_compute_what_one_does(family, backend, tmp_path):
    jobs = [[family, "full"], [family, "lora"]]
    seen = {}
    for name, processes in (("ddp", 1), (backend, 2)):
        (tmp_path / name).mkdir()
        settings = {
            "backend": name,
            "folder": str(tmp_path / name),
            "processes": processes,
            "jobs": jobs,
        }
        launch("family_runs.py", processes, settings, timeout=400)
        seen[name] = read(tmp_path / name, processes)[0]
    for job, one in seen["ddp"].items():
        other = seen[backend][job]
        assert "error" not in other, other["error"]
        assert (other["type"], other["world"], other["sharded"]) == (TYPES[backend], 2, True)
        for mine, theirs in zip(one["log"], other["log"], strict=True):
            for name in ("loss", "grad_norm", "reward"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), (job, name)
