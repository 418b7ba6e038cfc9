"""Batches of crafted rollouts in several token sequences, for trainers of programs; and, run as a
job of two processes with the arguments POLICY FOLDER LOSS_TYPE BACKEND, a step.
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
from agentic_prompting.trainers.rollouts import Batch
from support.distributed_backends import prepare, stated
from support.forked import forked

B = 8
ROW = {"question": "q", "answers": ["a"]}


def agent(row, base_url, api_key):
    return 0.0


def sequences_of(prompt, parts):
    """The sequences of one rollout: `parts` has the pieces (ids, whether sampled) of each."""
    sequences = []
    context = list(prompt)
    for part in parts:
        sequence = TokenSequence(list(context))
        for ids, is_sampled in part:
            if not is_sampled and not sequence.ids:
                # An observation in front of a sequence's first turn is in its prompt.
                sequence.prompt_ids += ids
            else:
                sequence.ids += ids
                sequence.mask += [is_sampled] * len(ids)
            context += ids
        sequences.append(sequence)
    return sequences


def crafted(pieces, failed):
    """`B` rollouts of three turns with observations between; rollout i in `pieces(i)` sequences."""
    generator = torch.Generator().manual_seed(3)

    def draw(number):
        return torch.randint(20, 200, (number,), generator=generator).tolist()

    rollouts = []
    for i in range(B):
        prompt = draw(5 + i)
        turns = [draw(3 + (i * 7 + k) % 9) for k in range(3)]
        observations = [draw(4 + k + i) for k in range(2)]
        steps = [
            (turns[0], 1),
            (observations[0], 0),
            (turns[1], 1),
            (observations[1], 0),
            (turns[2], 1),
        ]
        cuts = {
            1: [steps],
            2: [steps[:3], steps[3:]],
            3: [steps[:1], steps[1:3], steps[3:]],
        }
        first, *others = sequences_of(prompt, cuts[pieces(i)])
        rollout = Rollout(
            first.prompt_ids,
            row={**ROW, "prompt": [{"role": "user", "content": "q"}]},
            others=others,
        )
        rollout.ids = first.ids
        rollout.mask = first.mask
        rollout.status = "failed" if i in failed else "answered"
        rollout.observations = [Observation("y")] * 2
        rollout.turns = [Turn("x", "act", True)] * 3
        rollout.returned = {"answer": "x", "reward": float(i % 3)}
        rollouts.append(rollout)
    return rollouts


class Crafted:
    """A source of one batch."""

    def __init__(self, rollouts):
        self.rollouts = rollouts

    def next_batch(self, rows, position):
        rows = [dict(rollout.row) for rollout in self.rollouts]
        return Batch(position, rows, [{}] * len(rows), self.rollouts)


def trainer_for(tiny_policy, folder, environment, dtype=torch.float64, **options):
    spg = options.get("steps_per_generation", 1)
    settings = {
        "per_device_train_batch_size": B // spg,
        "num_generations": 4,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_completion_length": 64,
        "max_failed_share": 1.0,
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }
    return MultiTurnGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny_policy).to(dtype),
        [Program.reward] if environment is None else None,
        MultiTurnGRPOConfig(str(folder), **settings),
        [ROW] * B,
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
        environment=environment,
        prompt_template=SANDBOX_TEMPLATE,
    )


def gradient(tiny_policy, folder, pieces, native=False, failed=(), batch_size=None, **options):
    """The gradient and the loss of one generation batch, and the rows of each of its micro-batches."""
    trainer = trainer_for(tiny_policy, folder, None if native else Program(agent), **options)
    if options.get("beta"):  # a reference like the policy has no KL term
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                generator = torch.Generator().manual_seed(parameter.numel())
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.02 * noise)
    trainer.on_policy_source = trainer.batch_source = Crafted(crafted(pieces, failed))
    if batch_size:
        trainer.args.per_device_train_batch_size = batch_size
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = options.get("gradient_accumulation_steps", 1)
    rows = []
    total = 0.0
    for step in range(options.get("steps_per_generation", 1)):
        trainer._step = step
        inputs = trainer._prepare_inputs([ROW] * B)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
        rows.append(len(inputs["prompt_ids"]))
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    flat = [grad.flatten() for grad in gradients if grad is not None]
    return torch.cat(flat), total, rows


def split_errors(tiny_policy, folder, loss_type, parts, beta):
    """The gradient of rollouts in 1 to 3 sequences against the native one, relative to its largest
    component.

    Returns:
        `dict`: `whole` and `split` (the errors of programs with one sequence a rollout, and with
        more), `largest` (component), `losses`, and `rows` (of each).
    """
    options = {
        "loss_type": loss_type,
        "beta": beta,
        "steps_per_generation": parts,
        "gradient_accumulation_steps": parts,
        "failed": (2, 5),
    }
    native, native_loss, native_rows = gradient(
        tiny_policy, folder / "native", lambda i: 1, native=True, **options
    )
    whole, whole_loss, whole_rows = gradient(tiny_policy, folder / "whole", lambda i: 1, **options)
    split, split_loss, split_rows = gradient(
        tiny_policy, folder / "split", lambda i: 1 + i % 3, batch_size=2, **options
    )
    largest = native.abs().max()
    return {
        "whole": ((whole - native).abs().max() / largest).item(),
        "split": ((split - native).abs().max() / largest).item(),
        "largest": largest.item(),
        "losses": (native_loss, whole_loss, split_loss),
        "rows": (native_rows, whole_rows, split_rows),
    }


RATE = 1e4  # of one step of gradient descent: a step so large that parameters in float32 show it to the last digit


def parameters_after_a_step(policy, folder, pieces, environment, failed=(2, 5), **options):
    """The parameters after one step of gradient descent, by name, and how many rows this process
    had.
    """
    options = {
        "optim": "sgd",
        "learning_rate": RATE,
        "max_grad_norm": 0.0,
        "max_steps": 1,
        **options,
    }
    options["lr_scheduler_type"] = "constant"
    trainer = trainer_for(policy, folder, environment, **options)
    rollouts = crafted(pieces, failed)
    rank = trainer.accelerator.process_index
    per_process = B // trainer.accelerator.num_processes
    source = Crafted(rollouts[rank * per_process : (rank + 1) * per_process])
    trainer.on_policy_source = trainer.batch_source = source
    row_counts = []
    loss_of = trainer._compute_loss_of_rows

    def watched_loss(model, inputs):
        row_counts.append(len(inputs["prompt_ids"]))
        return loss_of(model, inputs)

    trainer._compute_loss_of_rows = watched_loss
    trainer.train()
    # Sharded parameters are whole on the first process only.
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    parameters = {name: value.detach().double() for name, value in state.items()}
    return parameters, row_counts, stated(trainer)["type"]


def launched(policy, folder, loss_type, backend="ddp"):
    """A step of two processes, the rollouts of one in a sequence each, those of the other in three,
    against the same step of one process with the native loop, relative to the step's largest
    component.

    Returns:
        `tuple`: The largest error, the rows of each pass by process, and what accelerate says the
        back end was.
    """
    log = Path(folder, "printed.log")
    codes = forked(Path(__file__), [str(policy), str(folder), loss_type, backend], 2, log, 280)
    assert codes == [0, 0], log.read_text()[-3000:]
    native, *_ = parameters_after_a_step(
        policy, Path(folder, "native"), lambda i: 1, None, loss_type=loss_type
    )
    start = dict(AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    steps = {name: native[name] - value.double() for name, value in start.items()}
    largest = max(step.abs().max() for step in steps.values())
    assert largest > RATE * 1e-4
    errors = []
    row_counts = []
    for rank in (0, 1):
        parameters, counts, backend_type = torch.load(Path(folder, f"{rank}.pt"))
        row_counts.append(counts)
        for name in steps if parameters else ():
            errors.append(((parameters[name] - native[name]).abs().max() / largest).item())
    return max(errors), row_counts, backend_type


def main(policy, folder, loss_type, backend):
    prepare(backend, folder)
    outcome = parameters_after_a_step(
        policy,
        folder,
        lambda i: 1 if i < B // 2 else 3,
        Program(agent),
        loss_type=loss_type,
        per_device_train_batch_size=4,
        # DeepSpeed refuses float64 where the processor has instructions for float16.
        dtype=torch.float32 if backend == "zero3" else torch.float64,
    )
    rank = torch.distributed.get_rank()
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # see `leave` in distributed_backends.py


if __name__ == "__main__":
    main(*sys.argv[1:])
