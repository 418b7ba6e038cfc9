"""Task sets of `verifiers` 0.4 as rows, environment and reward of our trainers.

`verifiers` needs other versions of `openai` and `mcp` than this library, so it is installed in an
environment of its own. Its interpreter runs `verifiers_bridge.py`, which must lie beside this file:
rows, messages to the agent and rewards come from there, sampling stays here.

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0 my-task-set
    PYTHONPATH=examples/contrib python train.py

    # train.py
    from verifiers_tasks import VerifiersTasks tasks = VerifiersTasks("my-task-set",
    python=".venv-verifiers/bin/python") MultiTurnGRPOTrainer(..., train_dataset=tasks.rows(1000),
    environment=tasks, reward_funcs=tasks.reward)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentic_prompting.interop import Dialogue
from agentic_prompting.llm import LLMError, ServerFailed, TimedOut, Unreachable, gather
from agentic_prompting.llm.loop import background_loop, on_background_thread, run, start
from agentic_prompting.llm.masking import mask_secrets
from agentic_prompting.rollout import Observation, Rollout

logger = logging.getLogger(__name__)

_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
_LONGEST_LINE = 1 << 28  # bytes
_POLL_SECONDS = 0.5
_SECONDS_TO_DIE = 5.0


class VerifiersTasks:
    """A task set as rows, environment and reward.

    The agent's turn, without its thoughts, is its reply; the environment's next user message is the
    observation. For tasks of one reply set `max_turns=1`. Multi-agent environments, tools, images
    and containers are refused.

    Args:
        task_set (`str`): The task set's id, as for `--env.taskset.id`. By position only.
        python (`str` or `Path`): The interpreter that has `verifiers` and the task set.
        timeout (`float`, *optional*, defaults to `300`): Seconds for each answer of its process.
        **config: Further fields of the environment's config. `taskset={"difficulty": "hard"}` sets
            fields of the task set itself, as `--env.taskset.difficulty hard` does, `id="..."` names
            an environment.
    """

    grammar = Dialogue()

    def __init__(self, task_set: str, /, python: str | Path, timeout: float = 300.0, **config: Any):
        self.config = {**config, "taskset": {**config.get("taskset", {}), "id": task_set}}
        self.python = str(python)
        self.timeout = timeout
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        background_loop(self)

    def rows(self, n: int | None = None) -> list[dict[str, Any]]:
        """The first `n` tasks, or all, as a dataset's rows.

        Raises:
            [`ServerFailed`]: There is no such task set, or it cannot be played here; the message
            says why.
            [`Unreachable`]: The interpreter cannot be started, or its process ended.
            [`TimedOut`]: There was no answer within `timeout`.
        """
        return run(self._ask(_rows, rows=n))

    def close(self) -> None:
        """End the other process; a later call starts it again."""
        if self._process is not None:
            self._process.kill()

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the first messages of an episode of its task.

        Never raises: a failure stands in the row.
        """
        try:
            episode, messages = await self._ask(_first_messages, begin=row.get("task"))
        except LLMError as error:
            return {**row, "environments": error}
        return {**row, "prompt": messages, "environments": {"episode": episode, "turns": 0}}

    async def step(self, rollout: Rollout) -> Observation | None:
        """The environment's messages after the last turn; `None` if that turn ended the episode."""
        if isinstance(episode := rollout.row["environments"], LLMError):
            return Observation(error=episode)
        try:
            answer = await self._ask(
                _next, episode=episode["episode"], text=rollout.turns[-1].request or ""
            )
        except LLMError as error:
            return Observation(error=error)
        episode["turns"] += 1
        if isinstance(answer, str):
            return Observation(answer)
        episode.update(answer)
        return None

    async def reward(self, rollout: Sequence[Rollout], **columns: Any) -> list[float | None]:
        """For a trainer's `reward_funcs`: the task's own reward; `None` where something outside the
        agent failed.
        """
        scored = gather(map(self._reward, rollout))
        # A trainer awaits rewards on a loop of TRL's, and the other process belongs to ours.
        return await (scored if on_background_thread() else asyncio.wrap_future(start(scored)))

    async def _reward(self, rollout: Rollout) -> float | None:
        episode = rollout.row["environments"]
        if rollout.error is not None or isinstance(episode, LLMError):
            return None
        if (
            len(rollout.turns) > episode["turns"]
        ):  # the turn limit ended the episode before this turn was sent
            observation = await self.step(rollout)
            if observation is not None and observation.error is not None:
                return None
        if "reward" not in episode:
            try:
                episode.update(await self._ask(_end, episode=episode["episode"], text=None))
            except LLMError:
                return None
        return episode["reward"]

    async def _ask(self, read: Callable[[dict[str, Any]], Any], **request: Any) -> Any:
        """What `read` makes of the answer to a request. Raises an [`LLMError`] and nothing else."""
        try:
            line = json.dumps(request)
        except (TypeError, ValueError) as error:
            raise ServerFailed(f"verifiers cannot be sent this row: {error}") from None
        process = await self._running()
        try:
            answer = await asyncio.wait_for(process.answer(line), self.timeout)
        except TimeoutError:
            raise TimedOut(f"verifiers took more than {self.timeout:g} s") from None
        if "error" in answer:
            raise ServerFailed(f"verifiers: {mask_secrets(str(answer['error']))[:500]}")
        try:
            return read(answer)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServerFailed(
                f"an answer of verifiers cannot be used: {type(error).__name__}: {error}"
            ) from None

    async def _running(self) -> _Process:
        """The other process, started if there is none or if it has ended."""
        async with self._starting:
            if self._process is None or self._process.ended:
                command = (self.python, "-P", str(_BRIDGE), json.dumps(self.config))
                pipe = asyncio.subprocess.PIPE
                try:
                    started = await asyncio.create_subprocess_exec(
                        *command, stdin=pipe, stdout=pipe, limit=_LONGEST_LINE
                    )
                except (OSError, ValueError) as error:
                    raise Unreachable(f"{self.python} cannot be started: {error}") from None
                self._process = _Process(started)
            return self._process


class _Process:
    """A process that answers lines of JSON, matched by their `id`.

    When its output ends, breaks or can no longer be read, every waiting request fails at once and
    the process is killed.
    """

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self.ended = ""
        self._numbers = itertools.count()
        self._waiting = dict[int, asyncio.Future[dict[str, Any]]]()
        self._reader = asyncio.create_task(self._read())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def answer(self, request: str) -> dict[str, Any]:
        """The answer to a request, a JSON object without `id`.

        Raises [`Unreachable`] when the process ends first.
        """
        if self.ended:
            raise Unreachable(self.ended)
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f'{{"id": {number}, {request[1:]}\n'.encode())
            return await answer
        except OSError as error:
            raise Unreachable(f"the process of verifiers ended: {error}") from None
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        why = ""
        try:
            await self._read_lines()
        except Exception as error:  # a line without end, above all
            why = f": its output could not be read ({type(error).__name__}: {error})"
        finally:
            self.ended = f"the process of verifiers ended{why}"  # later requests fail at once
            if self._process.stdin is not None:
                self._process.stdin.close()
            # A process that is ending says how only if it is left to: `kill` would take its exit
            # code from asyncio.
            if not await self._ends_within(_POLL_SECONDS):
                self.kill()
            if await self._ends_within(_SECONDS_TO_DIE):
                self.ended = f"the process of verifiers ended with {self._process.returncode}{why}"
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Unreachable(self.ended))

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.returncode is None:
                    await asyncio.sleep(0.01)
        return self._process.returncode is not None

    async def _read_lines(self) -> None:
        """Deliver answers until the output ends, or the process does.

        A child of it may keep the output open, for which `Process.wait` would wait as well: hence
        the return code is polled.
        """
        assert self._process.stdout is not None
        while True:
            line = asyncio.create_task(self._process.stdout.readline())
            running = True
            while running and not line.done():
                running = self._process.returncode is None
                await asyncio.wait({line}, timeout=_POLL_SECONDS)
            if not line.done():
                line.cancel()
                return
            if not line.result():
                return
            self._deliver(line.result())

    def _deliver(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
            number = answer.pop("id")
            if not isinstance(number, int):
                raise TypeError("an id is a number")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = mask_secrets(line.decode("utf-8", "replace"))[:200]
            logger.warning(
                "the process of verifiers wrote a line that is no answer: %s", text.rstrip()
            )
            return
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():  # a request that has timed out has no reader
            waiting.set_result(answer)


# --- what an answer must hold; a KeyError, TypeError or ValueError means that it does not ---


def _rows(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [{**row} for row in answer["rows"]]
    if any("task" not in row or "question" not in row for row in rows):
        raise ValueError("a row has a task and a question")
    return rows


def _messages(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": message["role"], "content": _text(message["content"])}
        for message in answer["messages"]
    ]


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list(content)
    if other := [part["type"] for part in parts if part["type"] != "text"]:
        raise ValueError(f"the agent reads text alone, and a message of the task holds {other[0]}")
    return "\n".join(str(part["text"]) for part in parts)


def _first_messages(answer: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return str(answer["episode"]), _messages(answer)


def _end(answer: Mapping[str, Any]) -> dict[str, Any]:
    reward = answer["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"{reward!r} is no reward")
    return {**answer, "reward": float(reward)}


def _next(answer: Mapping[str, Any]) -> str | dict[str, Any]:
    """The observation's text, or how the episode ended."""
    if "reward" in answer:
        return _end(answer)
    return "\n\n".join(message["content"] for message in _messages(answer))
