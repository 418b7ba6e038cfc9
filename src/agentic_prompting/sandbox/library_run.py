"""A run in the library of invented towns: a real language model learns to ask, and is evaluated before and after.

The model is SmolLM2-135M-Instruct unless another one is named. It first imitates a few uneven demonstrations, then
learns from rewards. All settings (`examples/configs/real.yaml`) were chosen on the countries; nothing was chosen on a
town.
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
    """The parts of a run in the library.

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
    """Draw the towns, find the model, and let it imitate demonstrations about the towns to train on.

    Args:
        output_dir (`str` or `Path`): The warm-started model is saved to `output_dir/warm_start`; an existing one is
            used again.
        model (`str`, *optional*): A folder or a name on the Hub. Defaults to [`small_model`].
        seed (`int`, *optional*, defaults to `0`): Decides the towns, their facts, the split and the demonstrations.
        n_test (`int`, *optional*): Use at most this many of the 192 held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `8`): Supervised steps of 8 demonstrations; 0 for none.
        facts (`Sequence[Fact]`, *optional*): Other facts than those about towns, as in [`country_facts`].
        held_out (`int`, *optional*, defaults to `32`): The number of subjects that are kept for the test.

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


def report_library_run(run: LibraryRun, trainer: Any, seconds: float) -> dict[str, Any]:
    """Ask the model the held-out questions before, between and after; print and write the result.

    *Before* is the published model, *warm* the model after its warm start, *after* the trained one.

    Writes `summary.json` and `trajectories.json` (one question before and after) to the trainer's `output_dir`.

    Args:
        run ([`LibraryRun`]): The prepared run.
        trainer ([`MultiTurnGRPOTrainer`]): The trainer, after training and `save_model`.
        seconds (`float`): Seconds since the run began. Those of asking are added.

    Returns:
        `dict`: The summary.
    """
    folder = Path(trainer.args.output_dir)
    began = time.monotonic()
    # Play where the model was trained, and in the precision of the training.
    device = trainer.accelerator.device
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    rows = list(run.test)

    # The same questions for the model at each time.
    spec = trainer.saved_spec()
    models = {"before": run.base_model, "warm": run.model, "after": str(folder)}
    if run.model == run.base_model:
        del models["warm"]
    rollouts_by_stage = {
        when: ask(model, run, rows, spec, dtype, device) for when, model in models.items()
    }
    before, after = rollouts_by_stage["before"], rollouts_by_stage["after"]
    seconds += time.monotonic() - began

    # Failed rollouts: those counted here, and those of training, which logs their share of each batch.
    failed_rollouts = sum(
        rollout.status == "failed"
        for rollouts in rollouts_by_stage.values()
        for rollout in rollouts
    )
    failed_shares = [entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history]
    failed_rollouts += round(sum(failed_shares) * trainer.args.generation_batch_size)

    # The gain, question by question: of the whole run, and of the rewards alone.
    difference = paired_difference(_matches(after), _matches(before)).difference
    gains = {"gained": difference}
    if "warm" in rollouts_by_stage:
        warm = _matches(rollouts_by_stage["warm"])
        gains["by rewards"] = paired_difference(_matches(after), warm).difference
    # A model in a folder is called by the name of the folder.
    model_name = run.base_model
    if Path(run.base_model).exists():
        model_name = Path(run.base_model).name
    summary: dict[str, Any] = {
        "library": True,
        "model": model_name,
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "failed_rollouts": failed_rollouts,
        "exact_match_difference": _rounded(difference),
    }
    if "by rewards" in gains:
        summary["exact_match_by_rewards"] = _rounded(gains["by rewards"])

    # Both measures at each time. The interval of exact match has the name that all summaries use.
    lines = []
    for when, rollouts in rollouts_by_stage.items():
        estimate = asked_share(rollouts)
        summary[f"asked_{when}"] = round(estimate.mean, 4)
        summary[f"asked_interval_{when}"] = _rounded(estimate)[1:]
        lines.append(f"{'asked':12}{when:11}{_with_interval(estimate)}")
    for when, rollouts in rollouts_by_stage.items():
        estimate = exact_match_share(rollouts)
        summary[f"exact_match_{when}"] = round(estimate.mean, 4)
        summary[f"interval_{when}"] = _rounded(estimate)[1:]
        lines.append(f"{'exact match':12}{when:11}{_with_interval(estimate)}")
    for gain, estimate in gains.items():
        lines.append(
            f"{'exact match':12}{gain:11}{_with_interval(estimate)}, paired over questions"
        )
    # The size of the run.
    towns = {row["subject"] for row in rows}
    lines.append(
        f"{len(rows)} questions about {len(towns)} towns that training never saw, "
        f"{summary['steps']} steps, {seconds:.0f} s, {failed_rollouts} failed rollouts"
    )

    # The dialogues of one question.
    example = _choose_example(before, after)
    dialogues = {
        "before": conversation(before[example]),
        "after": conversation(after[example]),
    }
    for when, dialogue in dialogues.items():
        lines += ["", f"--- {when} training", *dialogue]

    # Write the files first: the model card reads them.
    atomic_write(folder / "trajectories.json", json.dumps(dialogues, indent=2) + "\n")
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results

    heading = f"{model_name} learns to look facts up"
    print("\n".join(["", heading, "", *lines, "", f"written to {folder}", ""]), flush=True)
    return summary


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
    """Share of the rollouts that asked the library, with its 95 % interval; failed ones are left out."""
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
    """Draw the number of a question that was wrong before and is right after, or of any if there is none."""
    matches_before = _matches(before)
    # A question whose rollout failed before training is not an example: nothing is known about it.
    learned = [
        number
        for number, match in _matches(after).items()
        if match > matches_before.get(number, 1.0)
    ]
    return random.Random(0).choice(learned or range(len(after)))


def _rounded(estimate: Estimate) -> list[float]:
    return [round(number, 4) for number in (estimate.mean, estimate.low, estimate.high)]


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f}   95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
