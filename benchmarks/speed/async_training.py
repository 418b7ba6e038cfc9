"""Training that does not wait for stragglers (`async_lead`): the time saved, the cost in score, the losses of a kill.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.async_training --json --quick  # about six minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.async_training --json  # with scores: some hours
    python -m benchmarks.speed.async_training --only virtual --json  # one part

- *real*: the sandbox's policy trained in real time. Its environment answers after 1 s (log-normal, σ 1.0).
- *virtual*: the trainer's own loop over groups on a clock that jumps to the next event, so that an hour takes seconds.
  Turns of 150 tokens (σ 0.6), replies of 2 s (σ 0.6), an update of 10 s, 16 groups of 8, decoding 12 ms + 0.03 ms a
  row. Three layouts: a *server* with devices of its own, which samples on while the weights change; *two nodes*, one of
  which samples at half the speed and one trains; *one node*, where the policy samples only while the trainer waits.
- *kills*: runs killed with SIGKILL at random moments and resumed. Counted are replies that were paid twice, and replies
  whose rollouts were never trained on.
- *score* (not with `--quick`): held-out exact match after equally many rollouts, by the protocol in
  docs/howto/do_not_wait.md. Each training is recorded in `records/lead.jsonl.gz`, from which `recompute.py` makes the
  page's table; a recorded training is not repeated.

The last line of `--json`: `real` (by lead `step_s`, `trainer_idle`, `policy_idle`), `speedup_lead2`, `virtual` (by
layout and lead `step_s`, `over_bound`, `age`), `step_over_bound` (the server's at lead 3: against the larger of a
step's sampling and its update), `discarded`, `paid_twice`, and `score`.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS as RECORDED, Records, ask, correct, interval, share, shown, train

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

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


# --- in the sandbox: real time, and scores ----------------------------------------------------------------------------


class Sleeps:
    """The sandbox's oracle with a delay before each reply."""

    def __init__(self, median: float, sigma: float):
        from agentic_prompting import LLMEnvironment
        from agentic_prompting.sandbox import Oracle

        self.oracle = LLMEnvironment(Oracle())
        self.median = median
        self.sigma = sigma

    async def step(self, rollout: Any) -> Any:
        if self.median:
            drawn = random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(
                0, self.sigma
            )
            await asyncio.sleep(self.median * drawn)
        return await self.oracle.step(rollout)


def trained(
    sandbox: Any,
    folder: Path,
    lead: int,
    steps: int,
    seed: int,
    median: float,
    before: Any = None,
    **changes: Any,
) -> Any:
    """A trainer that has trained for some steps, its environment answering after `median` seconds."""
    from agentic_prompting import PromptR1Config, PromptR1Trainer

    args = {
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
    return train(
        PromptR1Trainer, PromptR1Config(str(folder), **args), sandbox, Sleeps(median, 1.0), before
    )


def in_real_time(folder: Path, steps: int, warm_start_steps: int) -> dict[str, Any]:
    """Seconds of a step once training runs evenly.

    The first steps are left out, because they start as many groups as `async_lead` allows, and so are the last, which
    start none.
    """
    from agentic_prompting.sandbox.setup import prepare_sandbox

    sandbox = prepare_sandbox(folder, 0, warm_start_steps=warm_start_steps)
    found = {}
    for lead in (0, 1, 2):
        first = (
            1 + 4 * lead
        )  # twice the default of max_staleness: the groups of the first step have been used by then
        trainer = trained(sandbox, folder / str(lead), lead, first + steps + lead, 0, median=1.0)
        log = [entry for entry in trainer.state.log_history if "loss" in entry][
            first : first + steps
        ]
        waited = [entry.get("async/trainer_idle") for entry in log if lead]
        found[lead] = {
            "step_s": round(statistics.mean(entry["step_time"] for entry in log), 2),
            "trainer_idle": round(statistics.mean(waited), 3) if waited else None,
            "policy_idle": round(statistics.mean(entry["async/policy_idle"] for entry in log), 3)
            if waited
            else None,
            "token_age": round(statistics.mean(entry["async/token_age"] for entry in log), 2)
            if waited
            else 0.0,
        }
        print(f"real time, lead {lead}: {found[lead]}", flush=True)
    return found


def score(folder: Path, seed: int, lead: int, corrected: bool, steps: int) -> dict[str, Any]:
    """The record of one training; `correct` has `1` or `0` for each held-out question."""
    from agentic_prompting.sandbox.setup import prepare_sandbox

    began = time.perf_counter()
    sandbox = prepare_sandbox(folder / f"seed{seed}", seed, n_test=QUESTIONS)
    here = folder / f"seed{seed}" / f"lead{lead}{'' if corrected else '-uncorrected'}"
    batch = {"per_device_train_batch_size": SCORE_GROUPS * ROLLOUTS, "temperature": TEMPERATURE}
    trainer = trained(
        sandbox, here, lead, steps, seed, 0.3, None if corrected else uncorrect, **batch
    )
    trainer.save_model(str(here / "model"))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    rollouts = ask(
        here / "model", Sleeps(0.0, 0.0), sandbox.test, sampling={"temperature": TEMPERATURE}
    )

    def logged(name: str) -> float:
        return round(statistics.mean(entry.get(name, 0.0) for entry in log), 4)

    return {
        **{
            "seed": seed,
            "lead": lead,
            "corrected": corrected,
            "steps": steps,
            "correct": correct(rollouts),
        },
        **{
            "age": logged("async/token_age"),
            "clipped": logged("async/clipped"),
            "reward": logged("reward"),
        },
        "seconds": round(time.perf_counter() - began),
    }


def uncorrect(trainer: Any) -> None:
    """Make a trainer ignore that older weights sampled a rollout: it trains without the importance ratio."""
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: compute(
        model, {key: value for key, value in inputs.items() if key != "importance_sampling_ratio"}
    )


def scores(folder: Path, records: Records, seeds: Iterable[int], steps: int) -> dict[str, Any]:
    """Run every training that is not recorded, those with the correction first, and summarise all records."""
    wanted = [
        (seed, lead, corrected)
        for corrected in (True, False)
        for seed, lead in itertools.product(seeds, LEADS if corrected else LEADS[1:])
    ]
    for seed, lead, corrected in records.missing(("seed", "lead", "corrected"), wanted):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = score(folder, seed, lead, corrected, steps)
        records.add(record)
        figures = {key: record[key] for key in ("age", "clipped", "seconds")}
        print(
            f"seed {seed}, {_named(lead, corrected)}: {share(record['correct']):.3f} {figures}",
            flush=True,
        )
    return summarise(records.read())


def _named(lead: int, corrected: bool) -> str:
    return f"{lead}" if corrected else f"{lead}, uncorrected"


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By lead and correction: exact match, and the difference from lead 0 paired by seed."""
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in sorted(
        records, key=lambda record: (not record["corrected"], record["lead"], record["seed"])
    ):
        rows.setdefault(_named(record["lead"], record["corrected"]), {})[record["seed"]] = record
    base = rows["0"]
    return {
        name: {
            **interval([share(record["correct"]) for record in of_seed.values()]),
            "minus_lead_0": interval(
                [
                    share(record["correct"]) - share(base[seed]["correct"])
                    for seed, record in of_seed.items()
                ]
            ),
            "age": round(statistics.fmean(record["age"] for record in of_seed.values()), 2),
            "seeds": list(of_seed),
        }
        for name, of_seed in rows.items()
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| `async_lead` | exact match [95 %] | minus lead 0, paired [95 %] | age of a token, updates | seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in summarise(records).items():
        cells = [name, shown(row), shown(row["minus_lead_0"], "+") if name != "0" else ""]
        lines.append(f"| {' | '.join(cells)} | {row['age']:.1f} | {len(row['seeds'])} |")
    return "\n".join(lines)


# --- killed -----------------------------------------------------------------------------------------------------------


def live(policy: Path, folder: Path, steps: int) -> None:
    """Run from the last checkpoint, if there is one, to the end, and log the replies that are paid and used."""
    from datasets import Dataset

    from agentic_prompting import LLMEnvironment
    from agentic_prompting.sandbox import Oracle, as_rows, make_split
    from agentic_prompting.trainers.async_rollouts import AsyncSource
    from support.training import trainer_for

    folder.mkdir(exist_ok=True)

    def note(name: str, *words: Any) -> None:
        with open(folder / name, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    class Paid(LLMEnvironment):
        async def step(self, rollout: Any) -> Any:
            await asyncio.sleep(
                random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, 1) * 0.05
            )
            said = await super().step(rollout)
            note("paid", rollout.seed, len(rollout.turns))
            return said

    take = AsyncSource.take_groups

    def noted(self: Any, wanted: int, place: Any) -> Any:
        groups = take(self, wanted, place)
        for group in groups:
            note("used", *(rollout.seed for rollout in group.rollouts))
        return groups

    AsyncSource.take_groups = noted  # type: ignore[method-assign]
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    trainer = trainer_for(
        policy,
        folder / "run",
        rows,
        environment=Paid(Oracle()),
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        async_lead=2,
        num_generations=4,
        per_device_train_batch_size=16,
        max_turn_tokens=24,
    )
    trainer.train(resume_from_checkpoint=True)
    note("ended", trainer.state.global_step)


def kills(folder: Path, policy: Path, times: int, steps: int) -> dict[str, int]:
    """Count the losses of runs that are killed at a random moment and resumed to their end."""
    here = multiprocessing.get_context("forkserver")
    rng = random.Random(0)
    here.set_forkserver_preload(["support.training", "agentic_prompting.trainers.async_rollouts"])

    def begun(name: str) -> Any:
        process = here.Process(target=live, args=(policy, folder / name, steps))
        process.start()
        return process

    whole = begun("warm up")
    whole.join()
    started = time.monotonic()
    whole = begun("whole")
    whole.join()
    seconds = time.monotonic() - started
    counts = Counter({"discarded": 0, "paid_twice": 0, "killed": 0})
    while counts["killed"] < times:
        name = f"killed {rng.random()}"
        process = begun(name)
        process.join(rng.uniform(0.3 * seconds, seconds))
        if process.exitcode is not None:
            continue  # it ended before the kill
        process.kill()
        process.join()
        again = begun(name)
        again.join()
        assert (folder / name / "ended").exists(), "a resumed run does not come to its end"
        paid = Counter((folder / name / "paid").read_text().split("\n")[:-1])
        used = set((folder / name / "used").read_text().split())
        counts["killed"] += 1
        counts["replies"] += sum(paid.values())
        counts["paid_twice"] += sum(paid.values()) - len(paid)
        counts["discarded"] += sum(reply.split()[0] not in used for reply in paid)
    print(f"kills: {dict(counts)}", flush=True)
    return dict(counts)


# --- the script -------------------------------------------------------------------------------------------------------


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
    found: dict[str, Any] = {}

    def wanted(part: str) -> bool:
        return options.only == part or (
            options.only is None and not (options.quick and part == "score")
        )

    with tempfile.TemporaryDirectory() as name:
        from support.policies import make_asking_policy, make_tiny_policy

        folder = Path(name)
        policy = make_asking_policy(make_tiny_policy(folder / "tiny"), folder / "asking")
        if wanted("kills"):
            found |= kills(folder, policy, 10, steps=6)
        if wanted("virtual"):
            from agentic_prompting.planning.virtual_clock import Pace, run_on_virtual_clock

            layouts = ("server", "two nodes", "one node")
            steps = 20 if options.quick else 60
            found["virtual"] = {
                layout: {lead: run_on_virtual_clock(Pace(), layout, lead, steps) for lead in LEADS}
                for layout in layouts
            }
            print(f"virtual: {found['virtual']}", flush=True)
            found["step_over_bound"] = found["virtual"]["server"][3]["over_bound"]
        if wanted("real"):
            found["real"] = in_real_time(
                folder, 6 if options.quick else 16, 100 if options.quick else 350
            )
            found["speedup_lead2"] = round(
                found["real"][0]["step_s"] / found["real"][2]["step_s"], 2
            )
        if wanted("score"):
            found["score"] = scores(
                options.folder, Records(options.records), options.seeds, options.steps
            )
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
