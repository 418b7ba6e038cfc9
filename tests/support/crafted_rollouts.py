"""Batches of crafted rollouts in several token sequences, for trainers of programs; and, run under torchrun, a step.

torchrun --nproc_per_node 2 tests/support/crafted_rollouts.py POLICY FOLDER LOSS_TYPE
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting.programs import Program
from agentic_prompting.rollout import Observation, Rollout, TokenSequence, Turn
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.trainers.batch import Batch

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
    """A source of one batch."""

    def __init__(self, rollouts):
        self.rollouts = rollouts

    def next(self, rows, place):
        return Batch(place, [dict(one.row) for one in self.rollouts], [{}] * len(self.rollouts), self.rollouts)


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


def parameters_after_a_step(policy, folder, pieces, environment, failed=(2, 5), **options):
    """The parameters after one step of gradient descent at rate 1, and how many rows this process had."""
    options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, **options}
    options["lr_scheduler_type"] = "constant"
    trainer = trainer_for(policy, folder, environment, **options)
    rollouts, rank = crafted(pieces, failed), trainer.accelerator.process_index
    own = B // trainer.accelerator.num_processes
    source = Crafted(rollouts[rank * own : (rank + 1) * own])
    trainer.on_policy = trainer.source = source
    seen = []
    loss_of = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seen.append(len(inputs["prompt_ids"])) or loss_of(model, inputs)
    trainer.train()
    return torch.cat([value.detach().flatten() for value in trainer.model.parameters()]), seen


def main(policy, folder, loss_type):
    # The process with the first rollouts has one sequence each, the other three.
    found, seen = parameters_after_a_step(
        policy,
        folder,
        lambda i: 1 if i < B // 2 else 3,
        Program(agent),
        loss_type=loss_type,
        per_device_train_batch_size=4,
    )
    rank = torch.distributed.get_rank()
    torch.save((found, seen), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # see `leave` in distributed_backends.py


if __name__ == "__main__":
    main(*sys.argv[1:])
