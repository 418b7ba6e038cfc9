"""Run by test_distributed.py under torchrun: some steps of E-SPL and of Prompt-R1 on every process, and what each saw.

Everything in one launch: imports take longer than the steps.
"""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset

import test_espl_trainer as espl
import test_trainer as prompt_r1
from agentic_prompting.rollout import Sample
from agentic_prompting.sandbox import as_rows, make_split

WORDS = ("Kenya", "Nairobi", "shilling", "Africa", "euro")


class WritesBySeed(espl.Writes):
    """What is written depends on the request's seed alone, which is the same however the batch is spread."""

    def __call__(self, requests):
        return [Sample(self.trainer.chat_format.turn_ids(WORDS[request.seed % 5])) for request in requests]


class ActsBySeed(prompt_r1.Acts):
    """Asks once, then answers; right or wrong, and with or without asking, by the seed: uneven episodes."""

    def _turn(self, request):
        self.answered = request.seed % 2
        if request.seed % 5 == 0:  # answers at once
            return Sample(self.trainer.chat_format.turn_ids(prompt_r1.END.format("yen")))
        return super()._turn(request)


def watched(trainer):
    """Keep the advantages of every batch."""
    advantages, generate = [], trainer._generate_and_score_completions

    def keep(inputs):
        batch = generate(inputs)
        advantages.append(batch["advantages"].tolist())
        return batch

    trainer._generate_and_score_completions = keep
    return advantages


def outcome(trainer, advantages):
    return {
        "world": trainer.accelerator.num_processes,
        "advantages": advantages,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "turns": [entry["rollout/turns"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters()),
    }


def run_espl(policy, folder, rows, per_device):
    trainer = espl.trainer_for(
        policy,
        folder,
        rows,
        evolution_lag=0,
        p_crossover=0.5,
        max_steps=3,
        per_device_train_batch_size=per_device,
    )
    trainer.sampler = WritesBySeed(trainer)
    advantages = watched(trainer)
    trainer.train()
    return {**outcome(trainer, advantages), "state": trainer.state_dict()}


def run_prompt_r1(policy, folder, rows, per_device):
    trainer = prompt_r1.trainer_for(
        policy, folder, rows, per_device_train_batch_size=per_device, num_generations=4, max_steps=3, beta=0.01
    )
    trainer.sampler = ActsBySeed(trainer)
    advantages = watched(trainer)
    trainer.train()
    return outcome(trainer, advantages)


def main(policy: str, folder: str, per_device: int) -> None:
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    seen = {
        "espl": run_espl(policy, Path(folder) / "espl", rows, per_device),
        "prompt_r1": run_prompt_r1(policy, Path(folder) / "prompt_r1", rows, per_device),
    }
    state = PartialState()
    (Path(folder) / f"seen-{state.process_index}.json").write_text(json.dumps(seen))
    state.destroy_process_group()
    # Without the interpreter's teardown, in which 1 of 8 launches aborted after all work was done: a native thread of
    # torch 2.13 asking for the GIL when it was gone. What is tested here is what was written.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
