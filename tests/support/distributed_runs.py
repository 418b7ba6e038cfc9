"""Run by test_distributed.py under torchrun: steps of Prompt-R1 and E-SPL on one back end.

Each process writes its observations. One launch runs all parts of a back end, because imports take
longer than steps.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from agentic_prompting import ESPLTrainer, LLMEnvironment, PromptR1Reward, PromptR1Trainer
from agentic_prompting.rollout import Sample
from agentic_prompting.sandbox import Oracle, as_rows, make_split
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.trainers.async_rollouts import AsyncSource
from agentic_prompting.trainers.policies import PeerFailed
from support import distributed_backends as backends
from support.espl_training import EDIT, Reference, arguments as espl_arguments
from support.training import arguments as prompt_r1_arguments


def uneven(trainer):
    """Make the trainer's own policy, whichever it is, play turns of uneven number.

    The real policy's words get the form of a turn. Rows with an even number answer at once, the
    others ask twice before. The rows of a batch are on different processes, so one process plays
    one turn and the other three.
    """
    chat_format = trainer.chat_format
    rows = list(trainer.train_dataset)
    asked = []

    class Uneven(type(trainer.policy)):
        async def __call__(self, request):
            asked.append(request.conversation)
            sample = await super().__call__(request)
            said = re.sub(
                r"<[^>]*>", "", chat_format.tokenizer.decode(sample.ids, skip_special_tokens=True)
            )
            context = chat_format.tokenizer.decode(request.context)
            number, row = next((i, row) for i, row in enumerate(rows) if row["question"] in context)
            if number % 2 and context.count("<interaction_response>") < 2:
                act = "<interaction_prompt> which country ? </interaction_prompt>"
            else:
                act = f"<answer> {row['answers'][0] if request.seed % 2 else 'yen'} </answer>"
            ids = chat_format.turn_ids(f"<think> {said} </think> {act}")
            return Sample(ids, [-1.0] * len(ids))

    trainer.policy.__class__ = Uneven
    trainer.policy.asked = asked


class Replays(Reference):
    """The same reply to the same question, as a recorded reference gives."""

    def _say(self, messages):
        request = messages[-1]["content"]
        return (
            EDIT % (len(request) % 1000)
            if "JSON" in request
            else "It went wrong at the second step."
        )


def trainer_for(settings, name, method, lora=False, rows=8, **changes):
    """A trainer of either method whose batch is two rows, four rollouts each; or `"several"`,
    Prompt-R1's with an environment for the even rows and one for the odd ones.
    """
    folder = Path(settings["folder"]) / name
    changes = {
        "per_device_train_batch_size": 8 // settings["processes"],
        "max_steps": 3,
        "max_turns": 3,
        "max_turn_tokens": 6,
        "max_completion_length": 160,
        "max_grad_norm": 1.0,
        "full_determinism": True,
        **changes,
    }
    data = as_rows(make_split(0, n_test=8)[1])[:rows]
    if method == "several":
        data = [
            {**row, "environment": ("even", "odd")[number % 2]} for number, row in enumerate(data)
        ]
    environments = {"even": LLMEnvironment(Oracle()), "odd": LLMEnvironment(Oracle())}
    common = {
        "model": settings["policy"],
        "train_dataset": Dataset.from_list(data),
        "environment": environments if method == "several" else environments["even"],
        "prompt_template": SANDBOX_TEMPLATE,
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    }
    if method == "espl":
        ours = {"reflection": "one_call"} if lora else {}
        args = espl_arguments(
            folder, evolution_lag=0, p_crossover=0.5, **{"beta": 0.01, **ours, **changes}
        )
        trainer = ESPLTrainer(
            args=args,
            reward_funcs=PromptR1Reward(),
            reference=Replays(),
            initial_prompt="Answer .\n[G0]. Ask .",
            **common,
        )
    else:
        trainer = PromptR1Trainer(
            args=prompt_r1_arguments(folder, num_generations=4, beta=0.01, **changes), **common
        )
    uneven(trainer)
    return trainer


LOGGED = (
    "step",
    "loss",
    "grad_norm",
    "reward",
    "reward_std",
    "kl",
    "num_tokens",
    "entropy",
    "rollout/turns",
    "epoch",
)
BY_NAME = tuple(
    f"environments/{name}/{what}"
    for name in ("even", "odd")
    for what in ("reward", "turns", "share")
)


def outcome(trainer, advantages=()):
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **backends.stated(trainer),
        "log": [
            {name: entry[name] for name in (*LOGGED, *BY_NAME) if name in entry} for entry in log
        ],
        "advantages": list(advantages),
        "calls": sorted(Counter(trainer.policy.asked).values()),
        "population": trainer.state_dict() if isinstance(trainer, ESPLTrainer) else None,
    }


def plain(settings, method, lora):
    """Three steps."""
    # LoRA starts out changing nothing: a larger step, so that there is something to compare after
    # three.
    rate = 2e-2 if lora else 1e-3
    trainer = trainer_for(
        settings, f"{method}-{lora}", method, lora, shuffle_dataset=False, learning_rate=rate
    )
    advantages = []
    generate = trainer._generate_and_score_completions

    def keep(inputs):
        batch = generate(inputs)
        advantages.append(batch["advantages"].tolist())
        return batch

    trainer._generate_and_score_completions = keep
    trainer.train()
    return outcome(trainer, advantages)


def resumed(settings, method, lora):
    """Seven steps at a stretch; and two from a checkpoint after the fifth, which lies in the second
    epoch and in the middle of a block of two updates on the same rollouts.
    """
    options = {
        "rows": 4,
        "num_iterations": 2,
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    whole = trainer_for(settings, f"whole-{method}", method, lora, **options)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-5"
    again = trainer_for(
        settings, f"again-{method}", method, lora, **{**options, "save_strategy": "no"}
    )
    again.train(resume_from_checkpoint=str(checkpoint))
    return {"whole": outcome(whole), "again": outcome(again)}


class Slow(LLMEnvironment):
    """An environment whose replies are slow."""

    async def step(self, rollout):
        await asyncio.sleep(0.1)
        return await super().step(rollout)


def carried(settings, method):
    """Six steps with a lead of one, one process slower than the other; and again from the
    checkpoint after the third, where what was played since is written down.
    """
    seen = []
    take = AsyncSource.take_groups

    def watched(self, wanted, place):
        groups = take(self, wanted, place)
        turns = sum(len(log.turns) for group in groups for log in group.episode_logs)
        seen[-1].append(([group.number for group in groups], self.updates, turns))
        return groups

    AsyncSource.take_groups = watched
    options = {
        "async_lead": 1,
        "full_determinism": False,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    outcomes = []
    asked = []
    for resume in (False, "checkpoint-3"):
        seen.append([])
        trainer = trainer_for(settings, f"carried-{method}", method, **options)
        if trainer.accelerator.process_index:
            trainer.environment.__class__ = Slow
        trainer.train(resume_from_checkpoint=resume and str(Path(trainer.args.output_dir) / resume))
        outcomes.append(outcome(trainer))
        asked.append(len(trainer.policy.asked))
    AsyncSource.take_groups = take
    return {"outcomes": outcomes, "groups": seen, "asked": asked}


def planted(settings):
    """The last process fails in its second batch.

    Under DDP it stays until the other has heard: once it is gone, the launcher ends the rest, heard
    or not. (Under ZeRO-3 the other is in a collective by then, which only this end ends.)
    """
    trainer = trainer_for(
        settings, "planted", "prompt_r1", shuffle_dataset=False, **settings["planted"]
    )
    step = trainer.policy.step

    def failing(arrived):
        if (
            trainer.accelerator.process_index == settings["processes"] - 1
            and trainer.state.global_step >= 1
        ):
            raise ArithmeticError("planted in the sampler")
        step(arrived)

    trainer.policy.step = failing
    heard = Path(settings["folder"]) / "heard"
    try:
        trainer.train()
    except PeerFailed:
        heard.touch()
        raise
    except ArithmeticError:
        while (
            settings["backend"] == "ddp" and not heard.exists()
        ):  # for ever, if nobody hears: the launch has a limit
            time.sleep(0.05)
        raise


def fewer(settings):
    """Go on with a checkpoint of a job of another size."""
    trainer = trainer_for(
        settings, "fewer", "prompt_r1", rows=4, num_iterations=2, max_steps=7, save_strategy="no"
    )
    trainer.train(resume_from_checkpoint=settings["checkpoint"])
    assert trainer.state.global_step == 7


def skew_clocks():
    """Let the processes' clocks differ by a minute, as those of two machines may."""
    read_clock = time.time
    rank = int(os.environ.get("RANK", "0"))
    time.time = lambda: read_clock() + 60 * rank


def main(settings):
    skew_clocks()
    backends.prepare(settings["backend"], settings["folder"])
    if settings.get("planted"):
        planted(settings)
    if settings.get("checkpoint"):
        fewer(settings)
        backends.leave(settings["folder"], {})
    if settings.get("carry"):
        backends.leave(
            settings["folder"],
            {method: carried(settings, method) for method in ("prompt_r1", "espl")},
        )
        return
    methods = [("prompt_r1", False), ("prompt_r1", True), ("espl", False), ("espl", True)]
    methods += [("several", False)]
    seen = {
        f"{method}-{'lora' if lora else 'full'}": plain(settings, method, lora)
        for method, lora in methods
    }
    if settings["resume"]:
        seen["resume"] = {
            method: resumed(settings, method, lora) for method, lora in (methods[0], methods[3])
        }
    backends.leave(settings["folder"], seen)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
