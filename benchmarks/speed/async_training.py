"""Training that does not wait for stragglers (`async_lead`): the time saved, the cost in score, the
losses of a kill.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.async_training --json --quick  # about six minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.async_training --json  # with scores: some hours
    python -m benchmarks.speed.async_training --only virtual --json  # one part

- *real*: the sandbox's policy trained in real time. Its environment answers after 1 s (log-normal,
  σ 1.0).
- *virtual*: the trainer's own loop over groups on a clock that jumps to the next event, so that an
  hour takes seconds. Turns of 150 tokens (σ 0.6), replies of 2 s (σ 0.6), an update of 10 s, 16
  groups of 8, decoding 12 ms + 0.03 ms a row. Three layouts: a *server* with devices of its own,
  which samples on while the weights change; *two nodes*, one of which samples at half the speed and
  one trains; *one node*, where the policy samples only while the trainer waits.
- *kills*: runs killed with SIGKILL at random moments and resumed. Counted are replies that were
  paid twice, and replies whose rollouts were never trained on.
- *score* (not with `--quick`): held-out exact match after equally many rollouts, by the protocol in
  docs/howto/do_not_wait.md. Each training is recorded in `records/lead.jsonl.gz`, from which
  `recompute.py` makes the page's table; a recorded training is not repeated.

The last line of `--json`: `real` (by lead `step_s`, `trainer_idle`, `policy_idle`),
`speedup_lead2`, `virtual` (by layout and lead `step_s`, `over_bound`, `age`), `step_over_bound`
(the server's at lead 3: against the larger of a step's sampling and its update), `discarded`,
`paid_twice`, and `score`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab import RECORDS as RECORDED, Records, ask, correct, interval, share, shown, train

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from agentic_prompting import PromptR1Trainer
    from agentic_prompting.rollout import Observation, Rollout
    from agentic_prompting.sandbox.setup import SandboxRun
    from agentic_prompting.trainers.async_rollouts import AsyncSource
    from agentic_prompting.trainers.async_rollouts.async_source import RolloutGroup
    from agentic_prompting.trainers.rollouts import BatchPosition

LEADS = 0, 1, 2, 3
GROUPS = 16
ROLLOUTS = 8
RECORDS = RECORDED / "lead.jsonl.gz"
# For the scores; the batch is smaller to save time.
SEEDS = range(5)
STEPS = 24
SCORE_GROUPS = 8
QUESTIONS = 256
TEMPERATURE = 1.0


# --- in the sandbox: real time, and scores --------------------------------------------------------


class SlowOracle:
    """The sandbox's oracle with a delay before each reply."""

    def __init__(self, median: float, sigma: float):
        from agentic_prompting import LLMEnvironment
        from agentic_prompting.sandbox import Oracle

        self.oracle = LLMEnvironment(Oracle())
        self.median = median
        self.sigma = sigma

    async def step(self, rollout: Rollout) -> Observation:
        if self.median:
            await asyncio.sleep(self.median * draw_delay(rollout, self.sigma))
        return await self.oracle.step(rollout)


def draw_delay(rollout: Rollout, sigma: float) -> float:
    """The delay of a turn's reply, log-normal with median 1: the same for the same seed and turn."""
    rng = random.Random(f"{rollout.seed} {len(rollout.turns)}")
    return rng.lognormvariate(0, sigma)


def train_policy(
    sandbox: SandboxRun,
    folder: Path,
    lead: int,
    steps: int,
    seed: int,
    median: float,
    before: Callable[[PromptR1Trainer], None] | None = None,
    **changes: Any,
) -> PromptR1Trainer:
    """A trainer that has trained for some steps, its environment answering after `median` seconds."""
    from agentic_prompting import PromptR1Config, PromptR1Trainer

    options = {
        "max_turn_tokens": 48,
        "max_completion_length": 320,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "num_generations": ROLLOUTS,
        "per_device_train_batch_size": GROUPS * ROLLOUTS,
        "max_steps": steps,
        "async_lead": lead,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        **changes,
    }
    args = PromptR1Config(str(folder), **options)
    return train(PromptR1Trainer, args, sandbox, SlowOracle(median, 1.0), before)


def logged_steps(trainer: PromptR1Trainer) -> list[dict[str, float]]:
    """The log entries of the training steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def mean_of(entries: Iterable[Mapping[str, float]], name: str, digits: int) -> float:
    """The mean of a metric that every entry has."""
    return round(statistics.mean(entry[name] for entry in entries), digits)


def measure_in_real_time(
    folder: Path, steps: int, warm_start_steps: int
) -> dict[int, dict[str, Any]]:
    """Seconds of a step once training runs evenly.

    The first steps are left out, because they start as many groups as `async_lead` allows, and so
    are the last, which start none.
    """
    from agentic_prompting.sandbox.setup import prepare_sandbox

    sandbox = prepare_sandbox(folder, 0, warm_start_steps=warm_start_steps)
    figures: dict[int, dict[str, Any]] = {}
    for lead in (0, 1, 2):
        # 4 is twice the default of max_staleness: the groups of the first step have been used by
        # then.
        first = 1 + 4 * lead
        all_steps = first + steps + lead
        trainer = train_policy(sandbox, folder / str(lead), lead, all_steps, 0, median=1.0)
        entries = logged_steps(trainer)[first : first + steps]
        row: dict[str, Any] = {
            "step_s": mean_of(entries, "step_time", 2),
            "trainer_idle": None,
            "policy_idle": None,
            "token_age": 0.0,
        }
        if lead:
            row["trainer_idle"] = mean_of(entries, "async/trainer_idle", 3)
            row["policy_idle"] = mean_of(entries, "async/policy_idle", 3)
            row["token_age"] = mean_of(entries, "async/token_age", 2)
        figures[lead] = row
        print(f"real time, lead {lead}: {row}", flush=True)
    return figures


def measure_score(
    folder: Path, seed: int, lead: int, corrected: bool, steps: int
) -> dict[str, Any]:
    """The record of one training; `correct` has `1` or `0` for each held-out question."""
    from agentic_prompting.sandbox.setup import prepare_sandbox

    started = time.perf_counter()
    seed_folder = folder / f"seed{seed}"
    run_folder = seed_folder / (f"lead{lead}" if corrected else f"lead{lead}-uncorrected")
    sandbox = prepare_sandbox(seed_folder, seed, n_test=QUESTIONS)
    trainer = train_policy(
        sandbox,
        run_folder,
        lead,
        steps,
        seed,
        median=0.3,
        before=None if corrected else uncorrect,
        per_device_train_batch_size=SCORE_GROUPS * ROLLOUTS,
        temperature=TEMPERATURE,
    )
    trainer.save_model(str(run_folder / "model"))

    sampling = {"temperature": TEMPERATURE}
    environment = SlowOracle(0.0, 0.0)
    rollouts = ask(run_folder / "model", environment, sandbox.test, sampling=sampling)
    entries = logged_steps(trainer)

    def mean_logged(name: str) -> float:
        return round(statistics.mean(entry.get(name, 0.0) for entry in entries), 4)

    return {
        "seed": seed,
        "lead": lead,
        "corrected": corrected,
        "steps": steps,
        "correct": correct(rollouts),
        "age": mean_logged("async/token_age"),
        "clipped": mean_logged("async/clipped"),
        "reward": mean_logged("reward"),
        "seconds": round(time.perf_counter() - started),
    }


def uncorrect(trainer: PromptR1Trainer) -> None:
    """Make a trainer ignore that older weights sampled a rollout: it trains without the importance
    ratio.
    """
    compute_loss = trainer._compute_loss

    def compute_without_ratio(model: Any, inputs: Mapping[str, Any]) -> Any:
        inputs = {
            name: value for name, value in inputs.items() if name != "importance_sampling_ratio"
        }
        return compute_loss(model, inputs)

    trainer._compute_loss = compute_without_ratio


def measure_scores(
    folder: Path, records: Records, seeds: Iterable[int], steps: int
) -> dict[str, dict[str, Any]]:
    """Run every training that is not recorded, those with the correction first, and summarise all
    records.
    """
    trainings = []
    # Without a lead there is nothing to correct.
    for corrected, leads in ((True, LEADS), (False, LEADS[1:])):
        for seed, lead in itertools.product(seeds, leads):
            trainings.append((seed, lead, corrected))
    for seed, lead, corrected in records.missing(("seed", "lead", "corrected"), trainings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = measure_score(folder, seed, lead, corrected, steps)
        records.add(record)
        figures = {name: record[name] for name in ("age", "clipped", "seconds")}
        score = share(record["correct"])
        print(f"seed {seed}, {_name(lead, corrected)}: {score:.3f} {figures}", flush=True)
    return summarise(records.read())


def _name(lead: int, corrected: bool) -> str:
    return f"{lead}" if corrected else f"{lead}, uncorrected"


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By lead and correction: exact match, and the difference from lead 0 paired by seed."""

    def order(record: Mapping[str, Any]) -> tuple[bool, int, int]:
        return not record["corrected"], record["lead"], record["seed"]

    # The records of each way of training by seed.
    records_by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in sorted(records, key=order):
        name = _name(record["lead"], record["corrected"])
        records_by_name.setdefault(name, {})[record["seed"]] = record

    without_lead = {seed: share(record["correct"]) for seed, record in records_by_name["0"].items()}
    summary = {}
    for name, records_by_seed in records_by_name.items():
        scores = {seed: share(record["correct"]) for seed, record in records_by_seed.items()}
        differences = [score - without_lead[seed] for seed, score in scores.items()]
        age = statistics.fmean(record["age"] for record in records_by_seed.values())
        summary[name] = {
            **interval(list(scores.values())),
            "minus_lead_0": interval(differences),
            "age": round(age, 2),
            "seeds": list(scores),
        }
    return summary


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        (
            "| `async_lead` | exact match [95 %] | minus lead 0, paired [95 %] | age of a token, "
            "updates | seeds |"
        ),
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in summarise(records).items():
        difference = "" if name == "0" else shown(row["minus_lead_0"], "+")
        seed_count = len(row["seeds"])
        lines.append(f"| {name} | {shown(row)} | {difference} | {row['age']:.1f} | {seed_count} |")
    return "\n".join(lines)


# --- killed ---------------------------------------------------------------------------------------


def run_to_end(policy: Path, folder: Path, steps: int) -> None:
    """Run from the last checkpoint, if there is one, to the end, and log the replies that are paid
    and used.
    """
    from datasets import Dataset

    from agentic_prompting import LLMEnvironment
    from agentic_prompting.sandbox import Oracle, as_rows, make_split
    from agentic_prompting.trainers.async_rollouts import AsyncSource
    from support.training import trainer_for

    folder.mkdir(exist_ok=True)

    def log_line(name: str, *values: Any) -> None:
        with open(folder / name, "a") as file:
            file.write(" ".join(map(str, values)) + "\n")

    class LoggingEnvironment(LLMEnvironment):
        async def step(self, rollout: Rollout) -> Observation:
            await asyncio.sleep(draw_delay(rollout, 1) * 0.05)
            observation = await super().step(rollout)
            log_line("paid", rollout.seed, len(rollout.turns))
            return observation

    take_groups = AsyncSource.take_groups

    def log_taken_groups(
        self: AsyncSource, group_count: int, position: BatchPosition
    ) -> list[RolloutGroup]:
        groups = take_groups(self, group_count, position)
        for group in groups:
            log_line("used", *(rollout.seed for rollout in group.rollouts))
        return groups

    AsyncSource.take_groups = log_taken_groups  # type: ignore[method-assign]
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    trainer = trainer_for(
        policy,
        folder / "run",
        rows,
        environment=LoggingEnvironment(Oracle()),
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        async_lead=2,
        num_generations=4,
        per_device_train_batch_size=16,
        max_turn_tokens=24,
    )
    trainer.train(resume_from_checkpoint=True)
    log_line("ended", trainer.state.global_step)


def kills(folder: Path, policy: Path, times: int, steps: int) -> dict[str, int]:
    """Count the losses of runs that are killed at a random moment and resumed to their end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["support.training", "agentic_prompting.trainers.async_rollouts"]
    )
    rng = random.Random(0)

    def start(name: str) -> BaseProcess:
        process = context.Process(target=run_to_end, args=(policy, folder / name, steps))
        process.start()
        return process

    # The seconds of a run that is not killed, without its imports.
    start("warm up").join()
    started = time.monotonic()
    start("whole").join()
    seconds = time.monotonic() - started

    counts = Counter({"discarded": 0, "paid_twice": 0, "killed": 0})
    while counts["killed"] < times:
        name = f"killed {rng.random()}"
        process = start(name)
        process.join(rng.uniform(0.3 * seconds, seconds))
        if process.exitcode is not None:
            continue  # it ended before the kill
        process.kill()
        process.join()
        start(name).join()
        assert (folder / name / "ended").exists(), "a resumed run does not come to its end"

        # A reply is a line with its rollout's seed and turn; what is used are seeds.
        paid = Counter((folder / name / "paid").read_text().split("\n")[:-1])
        used_seeds = set((folder / name / "used").read_text().split())
        counts["killed"] += 1
        counts["replies"] += sum(paid.values())
        counts["paid_twice"] += sum(paid.values()) - len(paid)
        counts["discarded"] += sum(reply.split()[0] not in used_seeds for reply in paid)
    print(f"kills: {dict(counts)}", flush=True)
    return dict(counts)


# --- the script -----------------------------------------------------------------------------------


def measure_virtual(steps: int) -> dict[str, Any]:
    """Every layout and lead on the virtual clock."""
    from agentic_prompting.planning.virtual_clock import Pace, run_on_virtual_clock

    by_layout: dict[str, dict[int, Any]] = {}
    for layout in ("server", "two nodes", "one node"):
        by_layout[layout] = {}
        for lead in LEADS:
            by_layout[layout][lead] = run_on_virtual_clock(Pace(), layout, lead, steps)
    print(f"virtual: {by_layout}", flush=True)
    return {"virtual": by_layout, "step_over_bound": by_layout["server"][3]["over_bound"]}


def measure_real(folder: Path, is_quick: bool) -> dict[str, Any]:
    """Real time, and what a lead of 2 saves."""
    steps = 6 if is_quick else 16
    warm_start_steps = 100 if is_quick else 350
    by_lead = measure_in_real_time(folder, steps, warm_start_steps)
    speedup = by_lead[0]["step_s"] / by_lead[2]["step_s"]
    return {"real": by_lead, "speedup_lead2": round(speedup, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, without scores")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--only", choices=["real", "virtual", "kills", "score"], help="one part")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/lead"), help="models of the scores"
    )
    parser.add_argument("--records", type=Path, default=RECORDS, help="of the scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the scores")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the scores")
    options = parser.parse_args()
    parts = ["kills", "virtual", "real"]
    if options.only:
        parts = [options.only]
    elif not options.quick:
        parts.append("score")

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        from support.policies import make_asking_policy, make_tiny_policy

        folder = Path(name)
        policy = make_asking_policy(make_tiny_policy(folder / "tiny"), folder / "asking")
        if "kills" in parts:
            figures |= kills(folder, policy, 10, steps=6)
        if "virtual" in parts:
            figures |= measure_virtual(20 if options.quick else 60)
        if "real" in parts:
            figures |= measure_real(folder, options.quick)
        if "score" in parts:
            records = Records(options.records)
            figures["score"] = measure_scores(options.folder, records, options.seeds, options.steps)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
