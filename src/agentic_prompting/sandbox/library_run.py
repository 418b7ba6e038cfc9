"""A run in the library of invented towns: a real language model learns to ask, and is evaluated
before and after.

The model is SmolLM2-135M-Instruct unless another one is named. It first imitates a few uneven
demonstrations, then learns from rewards. All settings (`examples/configs/real.yaml`) were chosen on
the countries; nothing was chosen on a town.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..agent import PromptAgent
from ..evaluation import Estimate, paired_difference, wilson_interval
from ..local import small_model
from ..records import atomic_write
from ..rewards import exact_match
from ..rollout import SPEC_FILE, AgentSpec, Rollout, rollout_from_trace
from ..trainers import warm_start
from ..versions import check_inputs, weights_version, write_inputs
from .library import Fact, Library, split_by_subject, town_facts, uneven_demonstrations
from .results import conversation

TOWNS = 96
HELD_OUT_TOWNS = 32
DEMONSTRATIONS = 64
WARM_START_STEPS = 8
_WARM_START_BATCH = 8  # conversations in a supervised step, over all processes
_WARM_START_RATE = 3e-5
_SAMPLED_TOGETHER = 64  # rollouts in one batch


@dataclass(frozen=True)
class LibraryRun:
    """A prepared run in the library.

    Args:
        base_model (`str`): The model as it was published: a folder or its name on the Hub.
        model (`str`): The model to train: the folder of the warm-started one, or `base_model`.
        environment ([`Library`]): The library, with the facts of the held-out towns too.
        train (`Dataset`): Questions to train on: `question`, `answers`, `subject`, `relation`.
        test (`Dataset`): Questions about towns that do not occur in `train`.
    """

    base_model: str
    model: str
    environment: Library
    train: Dataset
    test: Dataset


def prepare_library(
    output_dir: str | Path,
    model: str | None = None,
    seed: int = 0,
    n_test: int | None = None,
    warm_start_steps: int = WARM_START_STEPS,
    facts: Sequence[Fact] | None = None,
    held_out: int = HELD_OUT_TOWNS,
) -> LibraryRun:
    """Draw the towns, find the model, and let it imitate demonstrations about the towns to train
    on.

    Args:
        output_dir (`str` or `Path`): The warm-started model is saved to `output_dir/warm_start`; an
            existing one is used again.
        model (`str`, *optional*): A folder or a name on the Hub. Defaults to [`small_model`].
        seed (`int`, *optional*, defaults to `0`): Decides the towns, their facts, the split and the
            demonstrations.
        n_test (`int`, *optional*): Use at most this many of the 192 held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `8`): Supervised steps of 8 demonstrations;
            0 for none.
        facts (`Sequence[Fact]`, *optional*): Other facts than those about towns, as in
            [`country_facts`].
        held_out (`int`, *optional*, defaults to `32`): The number of subjects that are kept for the
            test.

    Raises:
        [`SmallModelMissing`]: No model is named, and the small one is not available.
    """
    # The library knows all subjects; the questions are split by subject.
    if facts is None:
        facts = town_facts(seed, TOWNS)
    train, test = split_by_subject(facts, held_out, seed)
    environment = Library(facts)

    base_model = model or str(small_model())
    trained_model = base_model
    if warm_start_steps:
        trained_model = str(
            _warm_started(base_model, environment, train, Path(output_dir), warm_start_steps, seed)
        )
    return LibraryRun(
        base_model=base_model,
        model=trained_model,
        environment=environment,
        train=Dataset.from_list([fact.as_row() for fact in train]),
        test=Dataset.from_list([fact.as_row() for fact in test[:n_test]]),
    )


def _warm_started(
    base_model: str,
    environment: Library,
    facts: Sequence[Fact],
    output_dir: Path,
    steps: int,
    seed: int,
) -> Path:
    """The folder of the model after it has imitated demonstrations, on all processes together."""
    folder = output_dir / "warm_start"
    state = PartialState()
    inputs = {
        "model": [base_model, weights_version(base_model)],
        "facts": [fact.as_row() for fact in facts],
        "steps": steps,
        "seed": seed,
    }
    if (folder / SPEC_FILE).exists():
        check_inputs(folder, inputs)
        return folder
    if state.is_main_process:
        print("warm start: the model imitates uneven demonstrations", flush=True)

    # The demonstrations, in the tokens of the training.
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    spec = AgentSpec(environment.prompt_template, grammar=environment.grammar)
    chat_format = spec.create_format(tokenizer)
    traces = uneven_demonstrations(facts, DEMONSTRATIONS, seed)
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]

    warm_start(
        model,
        tokenizer,
        rollouts,
        output_dir / "sft",
        max_steps=steps,
        per_device_train_batch_size=max(1, _WARM_START_BATCH // state.num_processes),
        learning_rate=_WARM_START_RATE,
        lr_scheduler_type="constant",
        seed=seed,
        bf16=False,
        use_cpu=state.device.type == "cpu",
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
    )
    # The run that follows may choose another precision.
    AcceleratorState._reset_state()

    # Its form is written last: a folder with it is complete.
    if state.is_main_process:
        write_inputs(folder, inputs)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        spec.save(folder)
    state.wait_for_everyone()
    return folder


@dataclass(frozen=True)
class LibrarySummary:
    """The result of a run in the library.

    The stages are *before*, the published model; *warm*, the model after its warm start, if it had
    one; and *after*, the trained model.

    Args:
        model (`str`): The published model; the name of the folder for one in a folder.
        questions (`int`): Held-out questions.
        towns (`int`): Towns that they are about.
        steps (`int`): Steps of the training.
        seconds (`float`): Seconds of the whole run.
        failed_rollouts (`int`): Those of the training and of all stages.
        asked (`dict[str, Estimate]`): The share of rollouts that asked the library, by stage.
        exact_match (`dict[str, Estimate]`): The share of right answers, by stage.
        gain ([`Estimate`]): Exact match of *after* minus *before*, paired over questions.
        gain_by_rewards ([`Estimate`], *optional*): *After* minus *warm*, if there was a warm start.
    """

    model: str
    questions: int
    towns: int
    steps: int
    seconds: float
    failed_rollouts: int
    asked: dict[str, Estimate]
    exact_match: dict[str, Estimate]
    gain: Estimate
    gain_by_rewards: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """The summary as `summary.json` has it."""
        summary: dict[str, Any] = {
            "library": True,
            "model": self.model,
            "questions": self.questions,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "failed_rollouts": self.failed_rollouts,
            "exact_match_difference": [_round(self.gain.mean), *_interval(self.gain)],
        }
        if self.gain_by_rewards is not None:
            estimate = self.gain_by_rewards
            summary["exact_match_by_rewards"] = [_round(estimate.mean), *_interval(estimate)]
        for stage, estimate in self.asked.items():
            summary[f"asked_{stage}"] = _round(estimate.mean)
            summary[f"asked_interval_{stage}"] = _interval(estimate)
        # The interval of exact match has the name that all summaries use.
        for stage, estimate in self.exact_match.items():
            summary[f"exact_match_{stage}"] = _round(estimate.mean)
            summary[f"interval_{stage}"] = _interval(estimate)
        return summary

    def lines(self) -> list[str]:
        """The summary as lines to read."""
        lines = []
        for stage, estimate in self.asked.items():
            lines.append(f"{'asked':12}{stage:11}{_with_interval(estimate)}")
        for stage, estimate in self.exact_match.items():
            lines.append(f"{'exact match':12}{stage:11}{_with_interval(estimate)}")
        # The gains, question by question: of the whole run, and of the rewards alone.
        gains = {"gained": self.gain, "by rewards": self.gain_by_rewards}
        for name, gain in gains.items():
            if gain is not None:
                lines.append(
                    f"{'exact match':12}{name:11}{_with_interval(gain)}, paired over questions"
                )
        lines.append(
            f"{self.questions} questions about {self.towns} towns that training never saw, "
            f"{self.steps} steps, {self.seconds:.0f} s, {self.failed_rollouts} failed rollouts"
        )
        return lines


def report_library_run(run: LibraryRun, trainer: Any, seconds: float) -> dict[str, Any]:
    """Ask the model the held-out questions before, between and after; print and write the result.

    Writes `summary.json` and `trajectories.json` (one question before and after) to the trainer's
    `output_dir`.

    Args:
        run ([`LibraryRun`]): The prepared run.
        trainer ([`MultiTurnGRPOTrainer`]): The trainer, after training and `save_model`.
        seconds (`float`): Seconds since the run began. Those of asking are added.

    Returns:
        `dict`: The summary.
    """
    began = time.monotonic()
    rollouts_by_stage = _ask_at_each_stage(run, trainer)
    seconds += time.monotonic() - began
    library_summary = _summarize(run, trainer, rollouts_by_stage, seconds)
    summary = library_summary.to_json()

    # The dialogues of one question.
    before, after = rollouts_by_stage["before"], rollouts_by_stage["after"]
    example = _choose_example(before, after)
    dialogues = {
        "before": conversation(before[example]),
        "after": conversation(after[example]),
    }

    # Write the files first: the model card reads them.
    folder = Path(trainer.args.output_dir)
    atomic_write(folder / "trajectories.json", json.dumps(dialogues, indent=2) + "\n")
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results

    lines = library_summary.lines()
    for stage, dialogue in dialogues.items():
        lines += ["", f"--- {stage} training", *dialogue]
    heading = f"{library_summary.model} learns to look facts up"
    print("\n".join(["", heading, "", *lines, "", f"written to {folder}", ""]), flush=True)
    return summary


def _ask_at_each_stage(run: LibraryRun, trainer: Any) -> dict[str, list[Rollout]]:
    """Ask the model of each stage the same held-out questions."""
    models = {"before": run.base_model, "warm": run.model, "after": str(trainer.args.output_dir)}
    if run.model == run.base_model:
        del models["warm"]
    # Play where the model was trained, and in the precision of the training.
    device = trainer.accelerator.device
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    rows = list(run.test)
    spec = trainer.saved_spec()
    return {stage: ask(model, run, rows, spec, dtype, device) for stage, model in models.items()}


def _summarize(
    run: LibraryRun, trainer: Any, rollouts_by_stage: dict[str, list[Rollout]], seconds: float
) -> LibrarySummary:
    """The result of a run, from the rollouts of each stage."""
    matches = {stage: _matches(rollouts) for stage, rollouts in rollouts_by_stage.items()}
    gain_by_rewards = None
    if "warm" in matches:
        gain_by_rewards = paired_difference(matches["after"], matches["warm"]).difference

    # Failed rollouts: those counted here, and those of training, which logs their share of each
    # batch.
    failed_rollouts = sum(
        rollout.status == "failed"
        for rollouts in rollouts_by_stage.values()
        for rollout in rollouts
    )
    failed_shares = [entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history]
    failed_rollouts += round(sum(failed_shares) * trainer.args.generation_batch_size)

    # A model in a folder is called by the name of the folder.
    model_name = run.base_model
    if Path(run.base_model).exists():
        model_name = Path(run.base_model).name
    return LibrarySummary(
        model=model_name,
        questions=len(run.test),
        towns=len(set(run.test["subject"])),
        steps=trainer.state.global_step,
        seconds=seconds,
        failed_rollouts=failed_rollouts,
        asked={stage: asked_share(rollouts) for stage, rollouts in rollouts_by_stage.items()},
        exact_match={
            stage: exact_match_share(rollouts) for stage, rollouts in rollouts_by_stage.items()
        },
        gain=paired_difference(matches["after"], matches["before"]).difference,
        gain_by_rewards=gain_by_rewards,
    )


def ask(
    model: str,
    run: LibraryRun,
    rows: Sequence[dict[str, Any]],
    spec: AgentSpec,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Rollout]:
    """Play the model's rollouts of some questions, sampled as in training."""
    agent = PromptAgent.from_pretrained(
        model,
        run.environment,
        spec,
        max_batch_size=_SAMPLED_TOGETHER,
        dtype=dtype,
        device_map=str(device),
    )
    return agent.answer_all(rows, seed=seed, progress=False)


def asked_share(rollouts: Sequence[Rollout]) -> Estimate:
    """Share of the rollouts that asked the library, with its 95 % interval; failed ones are left
    out.
    """
    scored = [rollout for rollout in rollouts if rollout.status != "failed"]
    return wilson_interval(sum(bool(rollout.observations) for rollout in scored), len(scored))


def exact_match_share(rollouts: Sequence[Rollout]) -> Estimate:
    """Share of right answers with its 95 % interval; failed rollouts are left out."""
    matches = _matches(rollouts)
    return wilson_interval(int(sum(matches.values())), len(matches))


def _matches(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """Exact match by the number of the question, of the rollouts that did not fail."""
    matches = {}
    for number, rollout in enumerate(rollouts):
        if rollout.status != "failed":
            matches[number] = exact_match(rollout.answer or "", rollout.row["answers"])
    return matches


def _choose_example(before: Sequence[Rollout], after: Sequence[Rollout]) -> int:
    """Draw the number of a question that was wrong before and is right after, or of any if there is
    none.
    """
    matches_before = _matches(before)
    # A question whose rollout failed before training is not an example: nothing is known about it.
    learned = [
        number
        for number, match in _matches(after).items()
        if match > matches_before.get(number, 1.0)
    ]
    return random.Random(0).choice(learned or range(len(after)))


def _interval(estimate: Estimate) -> list[float]:
    return [_round(estimate.low), _round(estimate.high)]


def _round(number: float) -> float:
    return round(number, 4)


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f}   95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
