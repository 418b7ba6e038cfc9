"""The large-LLM side under fire: what is lost, doubled, paid twice or moved when endpoints fail and
processes die.

    python -m benchmarks.reliability.faults [--quick] [--json]

Prints the table of docs/reliability.md; with `--json` the last line is one JSON object. About five
minutes on two free cores, with `--quick` under one (fewer calls, a shorter outage, one kill). The
misbehaving server, the hostile texts and the killed runs are those of the tests, so that both speak
of the same things.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

from agentic_prompting.llm import LLMError, OpenAIChat, Reply, start  # noqa: E402
from support.base_exceptions import in_own_process  # noqa: E402
from support.misbehaving import FAULTS, MisbehavingServer  # noqa: E402


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    calls: int = 2000
    latency: float = 10.0
    repeats: int = 3
    outage: float = 20.0
    kills: int = 10
    kill_steps: int = 5
    texts: int = 10_000
    forged: int = 200
    lead_kills: int = 20
    lead_steps: int = 6
    every_change: bool = True


QUICK = Size(
    calls=300,
    latency=5.0,
    repeats=1,
    outage=4.0,
    kills=1,
    kill_steps=3,
    texts=500,
    forged=20,
    lead_kills=1,
    lead_steps=3,
    every_change=False,
)

# --- helpers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_process(**options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A misbehaving server of its own process: its address, and what it counted, filled in at the
    end.
    """
    command = [sys.executable, "-m", "support.misbehaving"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    process = subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    counted: dict[str, Any] = {}
    yield process.stdout.readline().strip(), counted  # type: ignore[union-attr]
    counted.update(json.loads(process.communicate("\n")[0]))


def ask_all(chat: OpenAIChat, texts: list[str]) -> dict[str, Reply]:
    futures = {text: start(chat([{"role": "user", "content": text}])) for text in texts}
    return {text: future.result(600) for text, future in futures.items()}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


# --- the parts ------------------------------------------------------------------------------------


def random_faults(size: Size) -> dict[str, Any]:
    """Many calls of which each attempt meets one of the passing faults with a probability of 30 %."""
    with (
        server_process(share=0.3, latency=0.02, hang=15) as (url, counted),
        OpenAIChat("m", url, timeout=5) as chat,
    ):
        started = time.perf_counter()
        replies = ask_all(chat, [f"call {i}" for i in range(size.calls)])
        seconds = time.perf_counter() - started
    good = {text: reply for text, reply in replies.items() if reply.error is None}
    typed = sum(isinstance(reply.error, LLMError) and not reply.text for reply in replies.values())
    return {
        "calls": size.calls,
        "lost": size.calls - len(good) - typed,
        "duplicated": sum(times > 1 for times in counted["answered"].values()),
        "answered_with_error_text": sum(
            reply.text != f"reply to {text}" for text, reply in good.items()
        ),
        "success_share": len(good) / size.calls,
        "attempts": sum(reply.attempts for reply in replies.values()),
        "seconds": round(seconds, 1),
    }


def every_fault() -> int:
    """How many kinds of fault end as they should when they do not stop: in their own error, or in a
    reply. Each with a client of its own, so that no other fault has opened its circuit breaker.
    """

    def ends_as_expected(name: str) -> bool:
        with OpenAIChat("m", server.base_url, timeout=4, max_retries=1) as chat:
            reply = ask_all(chat, [name])[name]
        expected = FAULTS[name].error
        if expected is None:
            return reply.text == f"reply to {name}"
        return (
            type(reply.error).__name__ == expected
            and reply.attempts == 1 + FAULTS[name].passes
            and not reply.text
        )

    by_name = MisbehavingServer(
        lambda number, request: request["messages"][-1]["content"], hang_seconds=12
    )
    with by_name as server, ThreadPoolExecutor(12) as threads:
        outcomes = dict(zip(FAULTS, threads.map(ends_as_expected, FAULTS), strict=True))
    right = [name for name, is_right in outcomes.items() if is_right]
    with MisbehavingServer() as server, OpenAIChat("m", server.base_url, patience=30) as chat:
        server.go_down()  # refused connections, then an outage of 2 s
        server.outage(2)
        refused = ask_all(chat, [str(i) for i in range(20)])
        if all(reply.error is None for reply in refused.values()):
            right += ["refused connections", "outage"]
    assert len(right) == len(FAULTS) + 2, f"not as expected: {set(FAULTS) - set(right)}"
    return len(right)


def concurrency(size: Size, in_flight: int = 1024) -> dict[str, Any]:
    """Many calls at once, against a server in another process that takes `latency` seconds for
    each.
    """
    measurements = []
    with (
        server_process(latency=size.latency) as (url, _),
        OpenAIChat("m", url, max_concurrency=in_flight, timeout=120) as chat,
    ):
        ask_all(chat, ["warm up"])
        for number in range(size.repeats):
            baseline = resident_mb()
            threads = threading.active_count()
            peak = [0.0, 0]
            processor = time.process_time()
            started = time.perf_counter()
            done = threading.Event()

            def watch(peak: list = peak, done: threading.Event = done) -> None:
                while not done.wait(0.02):
                    peak[:] = max(peak[0], resident_mb()), max(peak[1], threading.active_count())

            watcher = threading.Thread(target=watch)
            watcher.start()
            replies = ask_all(chat, [f"{number} {i}" for i in range(in_flight)])
            seconds = time.perf_counter() - started
            done.set()
            watcher.join()
            assert all(reply.error is None for reply in replies.values())
            measurements.append(
                {
                    "ratio_to_latency": seconds / size.latency,
                    "extra_mb": peak[0] - baseline,
                    "extra_threads": peak[1] - threads - 1,  # one of them watches
                    "processor_ms_a_call": 1000 * (time.process_time() - processor) / in_flight,
                }
            )

    # The median of each figure, but the most of the memory.
    result: dict[str, Any] = {"in_flight": in_flight, "latency": size.latency}
    for name in measurements[0]:
        median = statistics.median(measurement[name] for measurement in measurements)
        result[name] = round(median, 3)
    result["extra_mb"] = max(measurement["extra_mb"] for measurement in measurements)
    return result


def outage(size: Size, policy: Path, folder: Path) -> dict[str, Any]:
    """Two training runs through one outage each: one that waits for it, one of no patience whose
    steps fail.
    """
    patient = run_through_outage(size.outage, policy, folder / "patient", patience=120.0)
    hasty = run_through_outage(size.outage, policy, folder / "hasty", patience=0.5)
    return {
        "survived": patient["went_on"] and hasty["went_on"],
        "weights_moved": patient["moved"] + hasty["moved"],
        "failed_rollouts": patient["failed"],
        "failed_steps_without_patience": hasty["failed_steps"],
        "seconds": size.outage,
    }


def run_through_outage(
    seconds: float, policy: Path, folder: Path, patience: float
) -> dict[str, Any]:
    from datasets import Dataset

    from agentic_prompting.sandbox import as_rows, make_split
    from support import killed_runs
    from support.failing_runs import Watch, same
    from support.training import trainer_for

    class BringsItDown(Watch):
        """After the first step the server goes down; two steps after it is back training may end."""

        back: threading.Timer | None = None
        good_since = 0

        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            if self.back is None:
                self.back = server.outage(seconds)
            self.good_since += not self.back.is_alive()
            control.should_training_stop = self.good_since > 2

    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    watch = BringsItDown()
    with (
        MisbehavingServer(latency=0.02, say=killed_runs.oracle()) as server,
        OpenAIChat(
            "m", server.base_url, patience=patience, max_retries=5 if patience > 1 else 0
        ) as chat,
    ):
        trainer = trainer_for(
            policy,
            folder,
            rows,
            chat,
            max_steps=5000,
            max_failed_share=1.0,
            weight_decay=0.1,
            beta=0.01,
        )
        trainer.add_callback(watch)
        trainer.train()

    # The steps without a reward, and whether the weights moved in one of them.
    failed_shares = [
        entry["rollout/failed"] for entry in trainer.state.log_history if "rollout/failed" in entry
    ]
    failed_steps = [step for step, share in enumerate(failed_shares) if share == 1 and step > 0]
    moved = 0
    for step in failed_steps:
        moved += not same(watch.weights[step - 1], watch.weights[step])
    return {
        "went_on": failed_shares[-1] == 0,
        "failed": round(sum(failed_shares) * 4),
        "failed_steps": len(failed_steps),
        "moved": moved,
    }


def hostile_inputs(size: Size) -> int:
    """How many hostile replies and tool calls changed nothing of what counts.

    Stops at the first that did.
    """
    from agentic_prompting.rollout import ChatFormat
    from support.hostile import check_tool_call, episode, hostile_texts, json_bombs, what_counts
    from support.tokenizers_for_tests import FAMILIES, tokenizer_for

    formats = [ChatFormat(tokenizer_for(name)) for name in FAMILIES]
    harmless = [what_counts(form, episode(form, "It is Kenya.")) for form in formats]
    for number, text in enumerate(hostile_texts(size.texts)):
        form = formats[number % len(formats)]
        expected = harmless[number % len(formats)]
        assert what_counts(form, episode(form, text)) == expected, text[:200]
    bombs = json_bombs()
    for bomb in bombs.values():
        check_tool_call(bomb)
    return size.texts + len(bombs)


def base_exceptions() -> dict[str, int]:
    """How many calls of code of a user's that raises `SystemExit` and its like hang, and how many
    lose its name.
    """
    outcomes = in_own_process()
    hangs = 0
    named = 0
    for case, text in outcomes.items():
        exception = case.split()[2]
        hangs += text is None
        named += f"{exception}: from the user's code" in (text or "")
    return {"cases": len(outcomes), "hangs": hangs, "named": named}


def lead_kills(size: Size, folder: Path, policy: Path) -> dict[str, int]:
    """Runs that play a step ahead, killed and resumed: replies that were paid for and lost are
    counted in `lost`.
    """
    from benchmarks.speed.async_training import kills

    (folder / "lead").mkdir(exist_ok=True)
    figures = kills(folder / "lead", policy, size.lead_kills, steps=size.lead_steps)
    return {
        "tried": figures["killed"],
        "lost": figures["discarded"],
        "twice": figures["paid_twice"],
    }


# --- all of it ------------------------------------------------------------------------------------


def measure(size: Size) -> dict[str, Any]:
    """In this order: memory is measured before torch is imported."""
    result: dict[str, Any] = random_faults(size)
    result["concurrency"] = concurrency(size)
    result["faults_tried"] = every_fault()
    result["inputs_tried"] = hostile_inputs(size)
    result["base_exceptions"] = base_exceptions()
    from datasets import Dataset

    from agentic_prompting.sandbox import as_rows, make_split
    from benchmarks.reliability.forged_tokens import forged_tokens
    from support.killed_runs import killed_and_resumed
    from support.policies import make_asking_policy, make_tiny_policy
    from support.resume_changes import resume_changes
    from support.second_starts import second_starts

    result["forged_tokens"] = forged_tokens(size.forged)

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        policy = make_asking_policy(make_tiny_policy(folder / "tiny"), folder / "asking")
        result["outage"] = outage(size, policy, folder)
        rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
        result["second_starts"] = second_starts(folder)
        result["resume_changes"] = resume_changes(
            folder / "tiny", folder, rows, quick=not size.every_change
        )
        result["kills"] = lead_kills(size, folder, policy)
        result["kill9"] = killed_and_resumed(policy, folder, size.kills, steps=size.kill_steps)
    return result


def table(result: dict[str, Any]) -> str:
    concurrency = result["concurrency"]
    outage = result["outage"]
    kills = result["kill9"]
    exceptions = result["base_exceptions"]
    second = result["second_starts"]
    changed = result["resume_changes"]
    forged = result["forged_tokens"]
    lead = result["kills"]
    nothing = f"{result['lost']} / {result['duplicated']} / {result['answered_with_error_text']}"
    through = f"went on: {outage['survived']}, {outage['failed_rollouts']} rollouts failed"
    hasty = (
        f"{outage['failed_steps_without_patience']} steps failed whole, {outage['weights_moved']} "
        "moved a weight"
    )
    rows = [
        (
            "calls at 30 % random faults",
            f"{result['calls']:,} ({result['attempts']:,} requests, {result['seconds']} s)",
            "",
        ),
        ("lost / duplicated / answered with error text", nothing, "0 / 0 / 0"),
        ("success with default retries", f"{result['success_share']:.2%}", "≥ 99 %"),
        ("calls in flight at once", f"{concurrency['in_flight']:,}", "1,024"),
        (
            f"time, as a multiple of a latency of {concurrency['latency']:g} s",
            f"{concurrency['ratio_to_latency']:.2f}",
            "≤ 1.3",
        ),
        ("processor time a call", f"{concurrency['processor_ms_a_call']:.1f} ms", ""),
        ("memory on top", f"{concurrency['extra_mb']:.0f} MB", "< 300 MB"),
        ("threads on top", f"{concurrency['extra_threads']:.0f}", "no thread a call"),
        (f"training through an outage of {outage['seconds']:g} s", through, "goes on"),
        ("the same without patience", hasty, "0 moved"),
        (
            "killed with -9 at random moments / resumed",
            f"{kills['tried']} / {kills['resumed']}",
            "all",
        ),
        (
            f"… replies paid twice / in vain, of {kills['replies']} a run",
            f"{kills['paid_twice']} / {kills['paid_in_vain']}",
            "0 / 0",
        ),
        (
            "… losses and weights as undisturbed, bit for bit",
            f"{kills['same_losses'] and kills['same_weights']}",
            "",
        ),
        ("kinds of fault tried, each ending as documented", str(result["faults_tried"]), "≥ 25"),
        (
            "calls whose code exits, is cancelled, ...: hang",
            f"{exceptions['hangs']} of {exceptions['cases']}",
            "0 of ≥ 40",
        ),
        (
            "second starts in a folder that is in use: refused, files changed",
            f"{second['refused']} of {second['tried']}, {second['files_changed']}",
            "all, 0",
        ),
        (
            "resumes with other settings or weights: silent",
            f"{changed['silent']} of {changed['tried']}",
            "0 of ≥ 12",
        ),
        (
            "special tokens forged by texts from outside",
            f"{forged['total']} ({forged['doors']} doors, {forged['texts']} texts each)",
            "0 (≥ 6 doors, 200 texts)",
        ),
        (
            "killed with a step in flight: replies lost / paid twice",
            f"{lead['tried']} kills: {lead['lost']} / {lead['twice']}",
            "≥ 20: 0 / 0",
        ),
        ("hostile inputs tried, none of effect", f"{result['inputs_tried']:,}", "≥ 10,000"),
    ]
    return "\n".join(
        ["| | measured | wanted |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    started = time.perf_counter()
    result = measure(QUICK if args.quick else Size())
    print(table(result))
    print(
        f"\n{time.perf_counter() - started:.0f} s in all, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
