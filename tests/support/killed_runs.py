"""Training runs killed with SIGKILL at random moments, resumed, and compared with an undisturbed
run.

Used by test_under_fire.py, test_program_training.py and benchmarks/reliability/faults.py. As a
script, this is a run; each start of one is forked (`forked.py`). The calling process has the server
and counts the replies that were paid for.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.forked import forked, started
from support.misbehaving import MisbehavingServer

LATENCY = 0.02


def oracle() -> Callable[[dict[str, Any]], str]:
    """A function that replies as the sandbox's oracle, for [`MisbehavingServer`]."""
    from agentic_prompting.sandbox import Oracle

    knows = Oracle()
    return lambda request: knows.answer(request["messages"][-1]["content"])


# --- the side that kills --------------------------------------------------------------------------


def killed_and_resumed(
    policy: Path,
    folder: Path,
    kills: int,
    seed: int = 0,
    steps: int = 5,
    program: str = "",
    script: Path = Path(__file__),
    say: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Play one run undisturbed, then `kills` more, each killed at a random moment and resumed.

    Args:
        policy (`Path`): The folder of the model.
        folder (`Path`): The runs.
        kills (`int`): Runs that are killed.
        seed (`int`, *optional*, defaults to `0`): Decides when.
        steps (`int`, *optional*, defaults to `5`): Of each run.
        program (`str`, *optional*): One of `PROGRAMS` in place of [`LLMEnvironment`]; or
            `"stand_in"` or the name of a harness, whose commands run in work folders.
        script (`Path`, *optional*): What is run and killed, with the arguments of `live`.
        say (`Callable`, *optional*): What the server replies; as the sandbox's oracle by default.

    Returns:
        `dict`: `tried`, `resumed` (came to the end), `paid_twice` (replies on disk that were asked
        for again), `paid_in_vain` (replies on disk that the undisturbed run had no use for),
        `lost_in_flight` (at most, by one
        kill: answered, but not yet on disk), `same_losses` and `same_weights` (as undisturbed, to
            the last bit),
        `uncounted` (of the replies in vain: more than the rollouts that the resumed run logged as
        played anew), `left` (folders and processes of the killed runs that are there after the next
        start; its port is always one).
    """
    rng = random.Random(seed)
    log = folder / "printed.log"

    def live_one(folder: Path, url: str, seconds: float = float("inf")) -> int:
        """Start or resume the run in `folder`, and kill it after `seconds`. Returns its exit code."""
        words = [str(policy), str(folder), url, str(steps), program, str(port)]
        return forked(script, words, 1, log, seconds, group=False)[0]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    started()  # imports are no part of a run's time, from which the moments are drawn
    with MisbehavingServer(latency=LATENCY, say=say or oracle()) as server:
        began = time.monotonic()
        assert live_one(folder / "whole", server.base_url) == 0, log.read_text()[-3000:]
        seconds = time.monotonic() - began
        whole = _result(folder / "whole")
        seen: list[dict[str, Any]] = []
        while len(seen) < kills:
            one = _one_kill(
                live_one, server, folder / f"killed-{rng.random()}", rng.uniform(0, seconds), whole
            )
            seen += [one] if one else []  # otherwise it had ended before the kill
    totals = {
        name: sum(one[name] for one in seen)
        for name in ("resumed", "paid_twice", "paid_in_vain", "uncounted", "left")
    }
    lost = max(one["lost_in_flight"] for one in seen)
    same = {name: all(one[name] for one in seen) for name in ("same_losses", "same_weights")}
    return {"tried": kills, **totals, "lost_in_flight": lost, **same, "replies": whole["replies"]}


def _one_kill(
    live_one: Callable[..., int],
    server: MisbehavingServer,
    folder: Path,
    moment: float,
    whole: dict[str, Any],
) -> dict[str, Any]:
    before = server.answered.total()
    if live_one(folder, server.base_url, moment) == 0:
        return {}
    time.sleep(2 * LATENCY)  # replies in flight are lost
    paid = server.answered.total() - before
    kept = _replies(folder)
    resumed = live_one(folder, server.base_url) == 0
    now = (
        _result(folder)
        if resumed
        else {"replies": 0, "losses": None, "weights": None, "anew": 0, "folders": 1}
    )
    in_vain = now["replies"] - whole["replies"]
    return {
        "resumed": resumed,
        "paid_twice": server.answered.total() - before - paid - (now["replies"] - kept),
        "paid_in_vain": in_vain,
        "uncounted": max(in_vain - now["anew"], 0),
        "lost_in_flight": paid - kept,
        "left": now["folders"] - 1 + len(_processes_of(folder)),
        "same_losses": now["losses"] == whole["losses"],
        "same_weights": now["weights"] == whole["weights"],
    }


def _processes_of(folder: Path) -> list[str]:
    """Those of which an argument names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [entry.parent.name] if str(folder).encode() in entry.read_bytes() else []
    return found


def _replies(folder: Path) -> int:
    path = folder / "replies.sqlite"
    if not path.exists():
        return 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (tables,) = connection.execute(
            "SELECT COUNT(*) FROM sqlite_master WHERE name = 'replies'"
        ).fetchone()
        return connection.execute("SELECT COUNT(*) FROM replies").fetchone()[0] if tables else 0


def _result(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "result.json").read_text()), "replies": _replies(folder)}


# --- the side that is killed ----------------------------------------------------------------------


async def repeats(row: Any, base_url: str, api_key: str, salt: str = "") -> dict[str, Any]:
    """A program that does the same again, given the same replies: it asks the policy, a large LLM,
    the policy.
    """
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def asked(model: str, *messages: dict[str, str]) -> Any:
            return (
                (await client.chat.completions.create(model=model, messages=list(messages)))
                .choices[0]
                .message
            )  # type: ignore[arg-type]

        first = {"role": "user", "content": row["question"]}
        said = await asked("agent", first)
        heard = await asked(
            "oracle", {"role": "user", "content": f"{row['question']} {said.content} {salt}"}
        )
        last = await asked(
            "agent",
            first,
            said.model_dump(include={"role", "content"}),
            {"role": "user", "content": heard.content},
        )
    words = (last.content or "").split()
    return {
        "answer": last.content or "nothing",
        "reward": sum(word < "n" for word in words) / max(len(words), 1),
    }


async def differs(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """A program that asks otherwise each time."""
    return await repeats(row, base_url, api_key, salt=os.urandom(4).hex())


PROGRAMS = {"repeats": repeats, "differs": differs}


def program_of(name: str, folder: Path, llms: dict[str, Any], port: int) -> Any:
    """A program by its name. The folders of its rollouts are in the run's folder."""
    from agentic_prompting.harnesses import HARNESSES, CommandProgram, Harness, get_harness
    from agentic_prompting.programs import Program

    if name in PROGRAMS:
        return Program(PROGRAMS[name], llms=llms, port=port)
    tempfile.tempdir = str(folder / "tmp")
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    script = folder / "stand_in.py"  # its path marks its processes
    shutil.copy(Path(__file__).with_name("stand_in.py"), script)
    command = (sys.executable, "-S", str(script), "{question}")
    own = Harness(
        "stand-in", command, {"chat": ("", "{base_url}")}, {"URL": "{url}", "KEY": "{api_key}"}
    )
    agent = get_harness(name) if name in HARNESSES else own
    return CommandProgram(agent, llms=llms, port=port, reward=early_words)


def early_words(rollout: Any, folder: Path) -> float:
    """The share of the answer's words that begin with the first letters."""
    words = (rollout.answer or "").split()
    return sum(word < "n" for word in words) / max(len(words), 1)


def live(policy: str, folder: str, url: str, steps: int, program: str, port: int) -> None:
    """Run from the last checkpoint, if there is one, to the end."""
    from datasets import Dataset

    from agentic_prompting import MultiTurnGRPOTrainer, OpenAIChat, PromptR1Trainer, ReplayCache
    from agentic_prompting.sandbox import as_rows, make_split
    from support.training import trainer_for

    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    with OpenAIChat("m", url, cache=ReplayCache(Path(folder) / "replies.sqlite")) as chat:
        own = program_of(program, Path(folder), {"oracle": chat}, port) if program else None
        trainer = trainer_for(
            policy,
            folder,
            rows,
            chat,
            MultiTurnGRPOTrainer if program else PromptR1Trainer,
            own,
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            full_determinism=not program,
            check_environment=False,
            num_generations=4,
            per_device_train_batch_size=8,
            async_lead=int(program == "differs"),
        )
        trainer.train(resume_from_checkpoint=True)
    write_result(trainer, Path(folder))


def write_result(trainer: Any, folder: Path) -> None:
    """Write what a run that came to its end is compared by."""
    weights = b"".join(tensor.numpy().tobytes() for tensor in trainer.model.state_dict().values())
    log = trainer.state.log_history
    losses = [(e["step"], e["loss"], e["reward"]) for e in log if "loss" in e]
    anew = sum(entry.get("async/played_anew", 0) for entry in log)
    folders = len(list(folder.glob("tmp/agentic-prompting-*/*"))) or 1  # its own, and any other
    result = {
        "losses": losses,
        "weights": hashlib.sha256(weights).hexdigest(),
        "anew": anew,
        "folders": folders,
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    live(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
