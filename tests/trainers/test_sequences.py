"""A rollout in several token sequences has the gradient of the same rollout in one: for a program's episodes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting.programs import Program
from agentic_prompting.rollout import Observation, Rollout, TokenSequence, Turn
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.trainers.batch import Batch
from agentic_prompting.trainers.sequences import padded_rows, sequences_of

B = 8
ROW = {"question": "q", "answers": ["a"]}


def agent(row, base_url, api_key):
    return 0.0


def crafted(pieces, failed):
    """`B` rollouts of three turns with observations between; rollout i in `pieces(i)` sequences."""
    generator = torch.Generator().manual_seed(3)

    def draw(number):
        return torch.randint(20, 200, (number,), generator=generator).tolist()

    rollouts = []
    for i in range(B):
        prompt, turns = draw(5 + i), [draw(3 + (i * 7 + k) % 9) for k in range(3)]
        seen = [draw(4 + k + i) for k in range(2)]
        steps = [(turns[0], 1), (seen[0], 0), (turns[1], 1), (seen[1], 0), (turns[2], 1)]
        cuts = {1: [steps], 2: [steps[:3], steps[3:]], 3: [steps[:1], steps[1:3], steps[3:]]}[pieces(i)]
        sequences, context = [], list(prompt)
        for part in cuts:
            sequence = TokenSequence(list(context))
            for ids, own in part:
                if not own and not sequence.ids:  # what stands in front of a sequence's first turn is its prompt
                    sequence.prompt_ids += ids
                else:
                    sequence.ids += ids
                    sequence.mask += [own] * len(ids)
                context += ids
            sequences.append(sequence)
        first, *others = sequences
        rollout = Rollout(first.prompt_ids, row={**ROW, "prompt": [{"role": "user", "content": "q"}]}, others=others)
        rollout.ids, rollout.mask, rollout.status = first.ids, first.mask, "failed" if i in failed else "answered"
        rollout.observations = [Observation("y")] * 2
        rollout.turns, rollout.returned = [Turn("x", "act", True)] * 3, {"answer": "x", "reward": float(i % 3)}
        rollouts.append(rollout)
    return rollouts


class Crafted:
    """A source of one batch, and how it was made."""

    def __init__(self, rollouts):
        self.rollouts = rollouts

    def next(self, rows, place):
        return Batch(place, [dict(one.row) for one in self.rollouts], [{}] * B, self.rollouts)


def trainer_for(tiny_policy, folder, environment, **options):
    spg = options.get("steps_per_generation", 1)
    settings = {
        "per_device_train_batch_size": B // spg, "num_generations": 4, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "report_to": [], "max_completion_length": 64, "max_failed_share": 1.0,
        "disable_tqdm": True, "save_strategy": "no", **options,
    }  # fmt: skip
    return MultiTurnGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny_policy).double(),
        [Program.reward] if environment is None else None,
        MultiTurnGRPOConfig(str(folder), **settings),
        [ROW] * B,
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
        environment=environment,
        prompt_template=SANDBOX_TEMPLATE,
    )


def gradient(tiny_policy, folder, pieces, native=False, failed=(), most=None, **options):
    """The gradient and the loss of one generation batch, and the rows of each of its micro-batches."""
    trainer = trainer_for(tiny_policy, folder, None if native else Program(agent), **options)
    if options.get("beta"):  # a reference like the policy has no KL term
        with torch.no_grad():
            for p in trainer.ref_model.parameters():
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
                p.add_(0.02 * noise)
    trainer.on_policy = trainer.source = Crafted(crafted(pieces, failed))
    trainer.args.per_device_train_batch_size = most or trainer.args.per_device_train_batch_size
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = options.get("gradient_accumulation_steps", 1)
    rows, total = [], 0.0
    for step in range(options.get("steps_per_generation", 1)):
        trainer._step = step
        inputs = trainer._prepare_inputs([ROW] * B)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
        rows.append(len(inputs["prompt_ids"]))
    found = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(found), total, rows


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_split_error(tiny_policy, tmp_path, loss_type, parts, beta):
    options = {
        "loss_type": loss_type, "beta": beta, "steps_per_generation": parts, "gradient_accumulation_steps": parts,
        "failed": (2, 5),
    }  # fmt: skip
    native, loss, _ = gradient(tiny_policy, tmp_path / "a", lambda i: 1, native=True, **options)
    whole, loss_whole, rows_whole = gradient(tiny_policy, tmp_path / "b", lambda i: 1, **options)
    split, loss_split, rows = gradient(tiny_policy, tmp_path / "c", lambda i: 1 + i % 3, most=2, **options)
    largest = native.abs().max()
    assert largest > 1e-4 and sum(rows_whole) == B and sum(rows) > B and len(set(rows)) == 1
    errors = [((one - native).abs().max() / largest).item() for one in (whole, split)]
    print(f"{loss_type} beta={beta} parts={parts}: split_error {errors}, {sum(rows_whole)} -> {sum(rows)} rows")
    assert max(errors) <= 1e-6
    assert loss_whole == pytest.approx(loss, abs=1e-6) and loss_split == pytest.approx(loss, abs=1e-6)


def test_rewards_and_logs_have_one_entry_for_each_rollout(tiny_policy, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, Program(agent))
    trainer.on_policy = trainer.source = Crafted(crafted(lambda i: 1 + i % 3, (2,)))
    trainer.model.train()
    scored = trainer._generate_and_score_completions([ROW] * B)
    assert len(scored["advantages"]) == len(scored["prompt_ids"]) > B
    assert len(trainer._logs["completion"]) == len(trainer._logs["prompt"]) == B == len(trainer._logs["advantages"])
    assert trainer.reward_func_names == ["reward"]
    owners = [owner for owner, rollout in enumerate(crafted(lambda i: 1 + i % 3, (2,))) for _ in sequences_of(rollout)]
    by_rollout = torch.tensor(trainer._logs["advantages"])
    assert torch.allclose(scored["advantages"].float(), by_rollout[owners].float())


def test_rows_are_as_many_as_parts_need(monkeypatch):
    monkeypatch.setattr("agentic_prompting.trainers.sequences.gather_object", lambda rows: [*rows, 13])
    assert padded_rows(9, 4) == 16 and padded_rows(17, 1) == 17


WRONG = {
    "loss_type": "bnpo",
    "importance_sampling_level": "sequence",
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.1,
    "off_policy_mask_threshold": 0.5,
    "mask_truncated_completions": True,
    "async_lead": 1,
    "full_determinism": True,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_refused_by_name(tiny_policy, tmp_path, name):
    with pytest.raises(ValueError, match=f"several token sequences.*{name}"):
        trainer_for(tiny_policy, tmp_path, Program(agent), **{name: WRONG[name]})


def test_a_failed_rollout_keeps_one_row():
    assert [len(sequences_of(one)) for one in crafted(lambda i: 3, range(B))] == [1] * B
    assert [len(sequences_of(one)) for one in crafted(lambda i: 1 + i % 3, ())] == [1, 2, 3, 1, 2, 3, 1, 2]
