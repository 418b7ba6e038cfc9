"""Training runs killed with SIGKILL at random moments, resumed, and compared with an undisturbed run.

Used by test_under_fire.py, test_program_training.py and `benchmarks/reliability.py`. Importing torch takes longer than
such a run, so this file as a script imports once and forks a child for each start of a run. The calling process has the
server, counts the replies that were paid for, and kills.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.misbehaving import MisbehavingServer

HERE = Path(__file__).parent
LATENCY = 0.02


def oracle() -> Callable[[dict[str, Any]], str]:
    """A function that replies as the sandbox's oracle, for [`MisbehavingServer`]."""
    from agentic_prompting.sandbox import Oracle

    knows = Oracle()
    return lambda request: knows.answer(request["messages"][-1]["content"])


# --- the side that kills ------------------------------------------------------------------------------------------


class Lives:
    """A process that has imported everything and forks training runs."""

    def __init__(self, policy: Path, steps: int, program: str = ""):
        command = [sys.executable, str(HERE / "killed_runs.py"), str(policy), str(steps), program]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
        }
        log = Path(policy).parent / "killed_runs.log"
        self._log = open(log, "ab")  # noqa: SIM115  # for as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        assert self._said() == "ready", (self._process.wait(10), log.read_text()[-3000:])

    def live(self, folder: Path, url: str, seconds: float | None = None) -> int:
        """Start or resume the run in `folder`, and kill it after `seconds`. Returns its exit code."""
        print(json.dumps([[str(folder), url], seconds]), file=self._process.stdin, flush=True)
        return int(self._said())

    def close(self) -> None:
        self._process.communicate(timeout=60)
        self._log.close()

    def _said(self) -> str:
        return self._process.stdout.readline().strip()  # type: ignore[union-attr]


def killed_and_resumed(
    policy: Path, folder: Path, kills: int, seed: int = 0, steps: int = 5, program: str = ""
) -> dict[str, Any]:
    """Play one run undisturbed, then `kills` more, each killed at a random moment and resumed.

    Args:
        policy (`Path`): The folder of the model.
        folder (`Path`): The runs.
        kills (`int`): Runs that are killed.
        seed (`int`, *optional*, defaults to `0`): Decides when.
        steps (`int`, *optional*, defaults to `5`): Of each run.
        program (`str`, *optional*): One of `PROGRAMS` in place of [`LLMEnvironment`].

    Returns:
        `dict`: `tried`, `resumed` (came to the end), `paid_twice` (replies on disk that were asked for again),
        `paid_in_vain` (replies on disk that the undisturbed run had no use for), `lost_in_flight` (at most, by one
        kill: answered, but not yet on disk), `same_losses` and `same_weights` (as undisturbed, to the last bit),
        `uncounted` (of the replies in vain: more than the rollouts that the resumed run logged as played anew).
    """
    rng = random.Random(seed)
    lives = Lives(policy, steps, program)
    with MisbehavingServer(latency=LATENCY, say=oracle()) as server:
        started = time.monotonic()
        assert lives.live(folder / "whole", server.base_url) == 0, (
            Path(policy).parent / "killed_runs.log"
        ).read_text()[-3000:]
        seconds, whole = time.monotonic() - started, _result(folder / "whole")
        seen: list[dict[str, Any]] = []
        while len(seen) < kills:
            one = _one_kill(lives, server, folder / f"killed-{rng.random()}", rng.uniform(0, seconds), whole)
            seen += [one] if one else []  # otherwise it had ended before the kill
    lives.close()
    totals = {name: sum(one[name] for one in seen) for name in ("resumed", "paid_twice", "paid_in_vain", "uncounted")}
    lost = max(one["lost_in_flight"] for one in seen)
    same = {name: all(one[name] for one in seen) for name in ("same_losses", "same_weights")}
    return {"tried": kills, **totals, "lost_in_flight": lost, **same, "replies": whole["replies"]}


def _one_kill(lives: Lives, server: MisbehavingServer, folder: Path, moment: float, whole: dict) -> dict[str, Any]:
    before = server.answered.total()
    if lives.live(folder, server.base_url, moment) == 0:
        return {}
    time.sleep(2 * LATENCY)  # replies in flight are lost
    paid, kept = server.answered.total() - before, _replies(folder)
    resumed = lives.live(folder, server.base_url) == 0
    now = _result(folder) if resumed else {"replies": 0, "losses": None, "weights": None, "anew": 0}
    in_vain = now["replies"] - whole["replies"]
    return {
        "resumed": resumed,
        "paid_twice": server.answered.total() - before - paid - (now["replies"] - kept),
        "paid_in_vain": in_vain,
        "uncounted": max(in_vain - now["anew"], 0),
        "lost_in_flight": paid - kept,
        "same_losses": now["losses"] == whole["losses"],
        "same_weights": now["weights"] == whole["weights"],
    }


def _replies(folder: Path) -> int:
    path = folder / "replies.sqlite"
    if not path.exists():
        return 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'replies'").fetchone()
        return connection.execute("SELECT COUNT(*) FROM replies").fetchone()[0] if tables else 0


def _result(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "result.json").read_text()), "replies": _replies(folder)}


# --- the side that is killed --------------------------------------------------------------------------------------


async def repeats(row: Any, base_url: str, api_key: str, salt: str = "") -> dict[str, Any]:
    """A program that does the same again, given the same replies: it asks the policy, a large LLM, the policy."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def asked(model: str, *messages: dict[str, str]) -> Any:
            return (await client.chat.completions.create(model=model, messages=list(messages))).choices[0].message  # type: ignore[arg-type]

        first = {"role": "user", "content": row["question"]}
        said = await asked("agent", first)
        heard = await asked("oracle", {"role": "user", "content": f"{row['question']} {said.content} {salt}"})
        last = await asked(
            "agent", first, said.model_dump(include={"role", "content"}), {"role": "user", "content": heard.content}
        )
    words = (last.content or "").split()
    return {"answer": last.content or "nothing", "reward": sum(word < "n" for word in words) / max(len(words), 1)}


async def differs(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """A program that asks otherwise each time."""
    return await repeats(row, base_url, api_key, salt=os.urandom(4).hex())


PROGRAMS = {"repeats": repeats, "differs": differs}


def live(policy: str, folder: str, url: str, steps: int, program: str) -> None:
    """Run from the last checkpoint, if there is one, to the end."""
    from datasets import Dataset

    from agentic_prompting import MultiTurnGRPOTrainer, OpenAIChat, Program, PromptR1Trainer, ReplayCache
    from agentic_prompting.sandbox import as_rows, make_split
    from support.training import trainer_for

    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    with OpenAIChat("m", url, cache=ReplayCache(Path(folder) / "replies.sqlite")) as chat:
        own = Program(PROGRAMS[program], llms={"oracle": chat}) if program else None
        trainer = trainer_for(
            policy, folder, rows, chat, MultiTurnGRPOTrainer if program else PromptR1Trainer, own,
            max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2,
            full_determinism=not program, check_environment=False, num_generations=4, per_device_train_batch_size=8,
            async_lead=int(program == "differs"),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=True)
    weights = b"".join(tensor.numpy().tobytes() for tensor in trainer.model.state_dict().values())
    log = trainer.state.log_history
    losses = [(e["step"], e["loss"], e["reward"]) for e in log if "loss" in e]
    anew = sum(entry.get("async/played_anew", 0) for entry in log)
    result = {"losses": losses, "weights": hashlib.sha256(weights).hexdigest(), "anew": anew}
    (Path(folder) / "result.json").write_text(json.dumps(result))


def give_birth(policy: str, steps: int, program: str) -> None:
    """Fork a child for each line of the input."""
    for module in ("agentic_prompting.llm.openai_http", "support.training"):  # the slow imports
        importlib.import_module(module)

    print("ready", flush=True)
    for line in sys.stdin:
        arguments, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            _live_and_die(policy, *arguments, steps, program)
        print(_exit_code(child, seconds), flush=True)


def _live_and_die(*arguments: Any) -> None:
    os.dup2(2, 1)  # the calling process must not read the run's output
    try:
        live(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _exit_code(child: int, seconds: float | None) -> int:
    """Wait for `child` and kill it when its time is up; the parent knows that the process id is still the child's."""
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)


if __name__ == "__main__":
    give_birth(sys.argv[1], int(sys.argv[2]), sys.argv[3])
