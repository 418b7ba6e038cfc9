"""Training that does not wait for stragglers (`lead`): what it saves, what it costs in score, what a kill loses.

    OMP_NUM_THREADS=1 python benchmarks/async_training.py --json --quick     # about six minutes on two free cores
    OMP_NUM_THREADS=1 python benchmarks/async_training.py --json             # with scores: some hours
    python benchmarks/async_training.py --only virtual --json                # one part

- *real*: the sandbox's policy trained in real time, its environment answering after 1 s (log-normal, σ 1.0).
- *virtual*: the trainer's own loop over groups on a clock that jumps to the next event, so that an hour takes seconds.
  Turns of 150 tokens (σ 0.6), replies of 2 s (σ 0.6), an update of 10 s, 16 groups of 8, decoding 12 ms + 0.03 ms a
  row. Three layouts: a *server* with devices of its own, which samples on while the weights change; *two nodes*, one of
  which samples at half the speed and one trains; *one node*, where the policy samples only while the trainer waits.
- *kills*: runs killed with SIGKILL at random moments and resumed: replies paid twice, and replies paid for no rollout
  that was learnt from.
- *score* (not with `--quick`): held-out exact match after equally many rollouts, by the protocol in
  docs/howto/do_not_wait.md. A record of each training goes to `records/lead.jsonl.gz`, from which `recompute.py` makes
  the page's table; what is recorded already is not run again.

The last line of `--json`: `real` (by lead `step_s`, `trainer_idle`, `policy_idle`), `speedup_lead2`, `virtual` (by
layout and lead `step_s`, `over_bound`, `age`), `step_over_bound` (the server's at lead 3: against the larger of a
step's sampling and its update), `discarded`, `paid_twice`, and `score`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import multiprocessing
import os
import random
import selectors
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from league import git, read_records, share, t_interval, with_interval

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

GROUPS, ROLLOUTS, LEADS = 16, 8, (0, 1, 2, 3)
RECORDS = TESTS.parent / "records" / "lead.jsonl.gz"
# Of the scores; the smaller batch is for time.
SEEDS, STEPS, SCORE_GROUPS, QUESTIONS, TEMPERATURE = range(5), 24, 8, 256, 1.0


# --- in the sandbox: real time, and scores
# -------------------------------------------------------------------------


class Sleeps:
    """The sandbox's oracle, after a while."""

    def __init__(self, median: float, sigma: float):
        from agentic_prompting import LLMEnvironment
        from agentic_prompting.sandbox import Oracle

        self.oracle, self.median, self.sigma = LLMEnvironment(Oracle()), median, sigma

    async def step(self, rollout: Any) -> Any:
        if self.median:
            drawn = random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, self.sigma)
            await asyncio.sleep(self.median * drawn)
        return await self.oracle.step(rollout)


def sandbox_trainer(sandbox: Any, folder: Path, lead: int, steps: int, seed: int, median: float, **changes: Any) -> Any:
    from agentic_prompting import PromptR1Config, PromptR1Trainer

    args = {
        "max_turn_tokens": 48, "max_completion_length": 320, "learning_rate": 1e-3, "lr_scheduler_type": "linear",
        "num_generations": ROLLOUTS, "per_device_train_batch_size": GROUPS * ROLLOUTS, "max_steps": steps,
        "lead": lead, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": seed, **changes,
    }  # fmt: skip
    return PromptR1Trainer(
        model=str(sandbox.model),
        environment=Sleeps(median, 1.0),
        args=PromptR1Config(str(folder), **args),
        train_dataset=sandbox.train,
        prompt_template=sandbox.spec.prompt_template,
    )


def in_real_time(folder: Path, steps: int, warm_start_steps: int) -> dict[str, Any]:
    """Seconds of a step once training runs evenly: without the first ones, when as much is begun as `lead` allows, and
    without the last, which begin nothing."""
    from agentic_prompting.sandbox.setup import prepare_sandbox

    sandbox, found = prepare_sandbox(folder, 0, warm_start_steps=warm_start_steps), {}
    for lead in (0, 1, 2):
        first = 1 + 4 * lead  # twice the default of max_staleness: what began at once has been used by then
        trainer = sandbox_trainer(sandbox, folder / str(lead), lead, first + steps + lead, 0, median=1.0)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry][first : first + steps]
        waited = [entry.get("async/trainer_idle") for entry in log if lead]
        found[lead] = {
            "step_s": round(statistics.mean(entry["step_time"] for entry in log), 2),
            "trainer_idle": round(statistics.mean(waited), 3) if waited else None,
            "policy_idle": round(statistics.mean(entry["async/policy_idle"] for entry in log), 3) if waited else None,
            "token_age": round(statistics.mean(entry["async/token_age"] for entry in log), 2) if waited else 0.0,
        }
        print(f"real time, lead {lead}: {found[lead]}", flush=True)
    return found


def score(folder: Path, seed: int, lead: int, corrected: bool, steps: int) -> dict[str, Any]:
    """One training and its held-out questions, as a record: right or wrong, `1` or `0`, for each."""
    from agentic_prompting import AgentSpec, PromptAgent, exact_match
    from agentic_prompting.sandbox.setup import prepare_sandbox

    began = time.perf_counter()
    sandbox = prepare_sandbox(folder / f"seed{seed}", seed, n_test=QUESTIONS)
    here = folder / f"seed{seed}" / f"lead{lead}{'' if corrected else '-uncorrected'}"
    batch = {"per_device_train_batch_size": SCORE_GROUPS * ROLLOUTS, "temperature": TEMPERATURE}
    trainer = sandbox_trainer(sandbox, here, lead, steps, seed, median=0.3, **batch)
    if not corrected:
        uncorrect(trainer)
    trainer.train()
    trainer.save_model(str(here / "model"))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    spec = replace(AgentSpec.load(here / "model"), sampling={"temperature": TEMPERATURE})
    agent = PromptAgent.from_pretrained(here / "model", Sleeps(0.0, 0.0), spec, max_batch_size=QUESTIONS)
    answers = agent.answer_all(list(sandbox.test), progress=False)

    def logged(name: str) -> float:
        return round(statistics.mean(entry.get(name, 0.0) for entry in log), 4)

    return {
        **{"seed": seed, "lead": lead, "corrected": corrected, "steps": steps, "commit": git("rev-parse", "HEAD")},
        "correct": "".join(str(int(exact_match(one.answer or "", one.row["answers"]))) for one in answers),
        **{"age": logged("async/token_age"), "clipped": logged("async/clipped"), "reward": logged("reward")},
        "seconds": round(time.perf_counter() - began),
    }


def uncorrect(trainer: Any) -> None:
    """Have a trainer learn from what older weights sampled as if those of now had sampled it."""
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: compute(
        model, {key: value for key, value in inputs.items() if key != "importance_sampling_ratio"}
    )


def scores(folder: Path, records: Path, seeds: Iterable[int], steps: int) -> dict[str, Any]:
    """Every training that is not among the records, each written there at once, those with a correction first."""
    known = {(one["seed"], one["lead"], one["corrected"]) for one in read_records(records)}
    records.parent.mkdir(parents=True, exist_ok=True)
    for corrected in (True, False):
        for seed, lead in itertools.product(seeds, LEADS if corrected else LEADS[1:]):
            if (seed, lead, corrected) in known:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record = score(folder, seed, lead, corrected, steps)
            with gzip.open(records, "at", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            told = {key: record[key] for key in ("age", "clipped", "seconds")}
            print(f"seed {seed}, {_named(lead, corrected)}: {share(record['correct']):.3f} {told}", flush=True)
    return summarise(read_records(records))


def _named(lead: int, corrected: bool) -> str:
    return f"{lead}" if corrected else f"{lead}, uncorrected"


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By lead and correction: exact match, and the difference from lead 0 paired by seed."""
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in sorted(records, key=lambda one: (not one["corrected"], one["lead"], one["seed"])):
        rows.setdefault(_named(one["lead"], one["corrected"]), {})[one["seed"]] = one
    base = rows["0"]
    return {
        name: {
            **t_interval([share(one["correct"]) for one in of_seed.values()]),
            "minus_lead_0": t_interval(
                [share(one["correct"]) - share(base[seed]["correct"]) for seed, one in of_seed.items()]
            ),
            "age": round(statistics.fmean(one["age"] for one in of_seed.values()), 2),
            "seeds": list(of_seed),
        }
        for name, of_seed in rows.items()
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| `lead` | exact match [95 %] | minus lead 0, paired [95 %] | age of a token, updates | seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in summarise(records).items():
        cells = [name, with_interval(row), with_interval(row["minus_lead_0"], "+") if name != "0" else ""]
        lines.append(f"| {' | '.join(cells)} | {row['age']:.1f} | {len(row['seeds'])} |")
    return "\n".join(lines)


# --- on a virtual clock
# --------------------------------------------------------------------------------------------

TOKENS, TOKENS_SIGMA, REPLY, REPLY_SIGMA, UPDATE = 150, 0.6, 2.0, 0.6, 10.0
STEP, STEP_PER_ROW = 0.012, 0.00003
TURNS = 3


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now, select = 0.0, self._selector.select

        def jump(timeout: float | None = None) -> list:
            if timeout is None:
                raise RuntimeError("everything waits for nothing")
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


class Decoder:
    """A policy whose rows each get a token per decoding step, all in the same batch."""

    def __init__(self, own_devices: bool, speed: float, chat_format: Any):
        self.own_devices, self.speed, self.format = own_devices, speed, chat_format
        self.rows: list[list[Any]] = []  # tokens left, and who waits
        self.lending, self.tokens, self.busy = not own_devices, 0, 0.0

    async def __call__(self, request: Any) -> Any:
        from agentic_prompting.rollout import Sample

        length = max(1, round(random.Random(request.seed).lognormvariate(0, TOKENS_SIGMA) * TOKENS))
        done = asyncio.get_running_loop().create_future()
        self.rows.append([length, done])
        await done
        asked = self.format.tokenizer.decode(request.context).count("<interaction_response>")
        act = "<answer> done </answer>" if asked >= TURNS - 1 else "<interaction_prompt> more </interaction_prompt>"
        ids = self.format.turn_ids(f"<think> go on </think> {act}")
        return Sample(ids, [0.0] * len(ids))

    async def work(self) -> None:
        while True:
            if not self.rows or not (self.own_devices or self.lending):
                await asyncio.sleep(STEP)
                continue
            seconds = (STEP + STEP_PER_ROW * len(self.rows)) / self.speed
            await asyncio.sleep(seconds)
            self.busy, self.tokens = self.busy + seconds, self.tokens + len(self.rows)
            for row in self.rows:
                row[0] -= 1
            for _, done in (row for row in self.rows if row[0] <= 0):
                done.set_result(None)
            self.rows = [row for row in self.rows if row[0] > 0]


class Replies:
    async def step(self, rollout: Any) -> str:
        await asyncio.sleep(
            random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, REPLY_SIGMA) * REPLY
        )
        return "noted"


def on_a_virtual_clock(folder: Path, policy: Path, layout: str, lead: int, steps: int) -> dict[str, Any]:
    """Steps of the trainer's own `CarryOver`: waiting for groups, then an update."""
    from transformers import AutoTokenizer

    from agentic_prompting.rollout import ChatFormat, Limits, TagGrammar
    from agentic_prompting.trainers import carry_over

    loop, speed = VirtualLoop(), 0.5 if layout == "two nodes" else 1.0
    update = UPDATE / speed
    chat_format = ChatFormat(AutoTokenizer.from_pretrained(policy), TagGrammar())
    decoder = Decoder(layout != "one node", speed, chat_format)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(
            output_dir=str(folder / f"{layout} {lead}"), lead=lead, max_staleness=2 * lead, seed=0,
            steps_per_generation=1, gradient_accumulation_steps=1, generation_batch_size=GROUPS * ROLLOUTS,
            per_device_train_batch_size=GROUPS * ROLLOUTS,
        ),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        state=SimpleNamespace(global_step=0, max_steps=10**6),
        num_iterations=1, shuffle_dataset=True, _step=0, train_dataset=[{"question": str(i)} for i in range(1024)],
        rollouts_per_row=lambda: ROLLOUTS, metadata=lambda index: {}, chat_format=chat_format, limits=Limits(TURNS),
        prompt_messages=lambda row, index: [{"role": "user", "content": row["question"]}],
        begun=lambda rows: rows, policy=decoder, environment=Replies(), run_sampling=lambda work: work(None),
        _metrics={"train": Metrics()},
    )  # fmt: skip
    working = loop.create_task(decoder.work())
    ends, ages = [], []
    with mock.patch.object(carry_over, "run_with_engine", lambda policy, work, listen: loop.run_until_complete(work)):
        carried = carry_over.CarryOver(trainer, resumes=False)
        for step in range(steps):
            trainer.state.global_step = trainer._step = step
            decoder.lending = True
            carried.take(GROUPS)
            decoder.lending = False
            loop.run_until_complete(asyncio.sleep(update))
            ends.append(loop.now)
            ages.append(trainer._metrics["train"]["async/token_age"][-1])
    for task in asyncio.all_tasks(loop):
        task.cancel()
    working.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    half = steps // 2
    seconds = (ends[-1] - ends[half - 1]) / (steps - half)
    # A step's tokens in as full a batch as its rollouts make.
    sampling = GROUPS * ROLLOUTS * TURNS * TOKENS * 2.718281828 ** (TOKENS_SIGMA**2 / 2)
    sampling *= (STEP / (GROUPS * ROLLOUTS * (1 + lead)) + STEP_PER_ROW) / speed
    bound = max(sampling, update) if decoder.own_devices else sampling + update
    row = {"step_s": round(seconds, 2), "over_bound": round(seconds / bound, 3)}
    row |= {"trainer_idle": round(1 - update / seconds, 3), "age": round(statistics.mean(ages[half:]), 2)}
    print(f"virtual, {layout}, lead {lead}: {row}", flush=True)
    return row


class Metrics(dict):
    def __missing__(self, name: str) -> list:
        return self.setdefault(name, [])


# --- killed
# --------------------------------------------------------------------------------------------------------


def live(policy: Path, folder: Path, steps: int) -> None:
    """One life of a run: from its last checkpoint, if there is one, to its end. Writes down what is paid and used."""
    from datasets import Dataset

    from agentic_prompting import LLMEnvironment
    from agentic_prompting.sandbox import Oracle, as_rows, make_split
    from agentic_prompting.trainers.carry_over import CarryOver
    from support.training import trainer_for

    folder.mkdir(exist_ok=True)

    def note(name: str, *words: Any) -> None:
        with open(folder / name, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    class Paid(LLMEnvironment):
        async def step(self, rollout: Any) -> Any:
            await asyncio.sleep(random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, 1) * 0.05)
            said = await super().step(rollout)
            note("paid", rollout.seed, len(rollout.turns))
            return said

    take = CarryOver.take

    def noted(self: Any, wanted: int) -> Any:
        groups = take(self, wanted)
        for group in groups:
            note("used", *(rollout.seed for rollout in group.rollouts))
        return groups

    CarryOver.take = noted  # type: ignore[method-assign]
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    trainer = trainer_for(
        policy, folder / "run", rows, environment=Paid(Oracle()), max_steps=steps, save_strategy="steps", save_steps=2,
        lead=2, num_generations=4, per_device_train_batch_size=16, max_turn_tokens=24,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    note("ended", trainer.state.global_step)


def kills(folder: Path, policy: Path, times: int, steps: int) -> dict[str, int]:
    """Runs that are killed at a random moment, resumed to their end, and looked through."""
    here, rng = multiprocessing.get_context("forkserver"), random.Random(0)
    here.set_forkserver_preload(["test_trainer", "agentic_prompting.trainers.carry_over"])

    def begun(name: str) -> Any:
        process = here.Process(target=live, args=(policy, folder / name, steps))
        process.start()
        return process

    whole = begun("warm up")
    whole.join()
    started = time.monotonic()
    whole = begun("whole")
    whole.join()
    seconds, found = time.monotonic() - started, Counter({"discarded": 0, "paid_twice": 0, "killed": 0})
    while found["killed"] < times:
        name = f"killed {rng.random()}"
        process = begun(name)
        process.join(rng.uniform(0.3 * seconds, seconds))
        if process.exitcode is not None:
            continue  # it came to its end before
        process.kill()
        process.join()
        again = begun(name)
        again.join()
        assert (folder / name / "ended").exists(), "a resumed run does not come to its end"
        paid = Counter((folder / name / "paid").read_text().split("\n")[:-1])
        used = set((folder / name / "used").read_text().split())
        found["killed"] += 1
        found["replies"] += sum(paid.values())
        found["paid_twice"] += sum(paid.values()) - len(paid)
        found["discarded"] += sum(one.split()[0] not in used for one in paid)
    print(f"kills: {dict(found)}", flush=True)
    return dict(found)


# --- all
# -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, without scores")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--only", choices=["real", "virtual", "kills", "score"], help="one part")
    parser.add_argument("--folder", type=Path, default=Path("runs/lead"), help="models of the scores")
    parser.add_argument("--records", type=Path, default=RECORDS, help="of the scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the scores")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the scores")
    options = parser.parse_args()
    found: dict[str, Any] = {}

    def wanted(part: str) -> bool:
        return options.only == part or (options.only is None and not (options.quick and part == "score"))

    with tempfile.TemporaryDirectory() as name:
        from support.policies import make_asking_policy, make_tiny_policy

        folder = Path(name)
        policy = make_asking_policy(make_tiny_policy(folder / "tiny"), folder / "asking")
        if wanted("kills"):
            found |= kills(folder, policy, 10, steps=6)
        if wanted("virtual"):
            layouts, steps = ("server", "two nodes", "one node"), 20 if options.quick else 60
            found["virtual"] = {
                layout: {lead: on_a_virtual_clock(folder, policy, layout, lead, steps) for lead in LEADS}
                for layout in layouts
            }
            found["step_over_bound"] = found["virtual"]["server"][3]["over_bound"]
        if wanted("real"):
            found["real"] = in_real_time(folder, 6 if options.quick else 16, 100 if options.quick else 350)
            found["speedup_lead2"] = round(found["real"][0]["step_s"] / found["real"][2]["step_s"], 2)
        if wanted("score"):
            found["score"] = scores(options.folder, options.records, options.seeds, options.steps)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
