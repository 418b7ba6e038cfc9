"""The advantages by token of a batch whose one group straddles the processes; and, run as a job of two processes with
the arguments POLICY FOLDER CREDIT, written to a file by each.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset

from agentic_prompting.rollout import Sample
from agentic_prompting.sandbox import as_rows, make_split
from support.distributed_backends import prepare
from support.forked import forked
from support.training import ASK, END, trainer_for

SIZE = 8  # rollouts of the group


def by_turns(rollout, **columns):
    """Rewards that depend on the rollout alone, not on its place in a process's part."""
    return [[float((one.seed >> 8 + turn) % 3) for turn in range(len(one.turns))] for one in rollout]


def advantages(policy, folder, credit, processes=1):
    """For each rollout of this process the advantages of its own tokens."""
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    trainer = trainer_for(
        policy, folder, rows, options={"reward_funcs": by_turns}, credit=credit, num_generations=SIZE,
        per_device_train_batch_size=SIZE // processes,
    )  # fmt: skip
    form = trainer.chat_format

    async def acts(request):
        """Asks up to twice, as its seed decides, in one of two ways."""
        asked = form.tokenizer.decode(request.context).count("<interaction_response>")
        if asked < 2 and (asked == 0 or request.seed % 2):
            return Sample(form.turn_ids(ASK.replace("first", "the") if request.seed % 4 < 2 else ASK))
        return Sample(form.turn_ids(END.format("yen")))

    trainer.policy = acts
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([rows[0]] * (SIZE // processes))
    own = (batch["tool_mask"] * batch["completion_mask"]).bool()
    return [row[places].tolist() for row, places in zip(batch["advantages"], own, strict=True)]


def launched(policy, folder, credit):
    """What [`advantages`] returns, from two processes, in their order."""
    log = Path(folder, "printed.log")
    codes = forked(Path(__file__), [str(policy), str(folder), credit], 2, log, 280)
    assert codes == [0, 0], log.read_text()[-3000:]
    return [row for rank in (0, 1) for row in torch.load(Path(folder, f"{rank}.pt"))]


def main(policy, folder, credit):
    prepare("ddp", folder)
    found = advantages(policy, Path(folder, "run"), credit, processes=2)
    torch.save(found, Path(folder) / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # see `leave` in distributed_backends.py


if __name__ == "__main__":
    main(*sys.argv[1:])
