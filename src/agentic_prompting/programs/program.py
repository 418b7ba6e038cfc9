"""[`Program`]: an agent that keeps its own loop, as an environment that plays whole episodes.

    async def agent(row, base_url, api_key): ...     # or a plain function, or a command

The program calls an address as it would call OpenAI, and the policy answers. An episode is one run of the program; the
calls of a rollout become its token sequences (`session.py`).

The gateway is on the background loop. `async` programs run on a loop of their own: one that blocks it (a synchronous
client in a coroutine) would otherwise wait for a reply that only its own loop can send.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import os
import shlex
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from ..llm import ChatModel, LLMError, Misconfigured, ServerFailed, TimedOut, fill
from ..llm.guard import call_guarded, call_guarded_on, failure_of, text_of
from ..llm.loop import on_background_thread, start
from ..rollout import ChatFormat, Environment, FreeText, Limits, Observation, Policy, Rollout, TextFormat, Turn
from .advice import Advice
from .command import run_command
from .failures import OverLimit, ProgramFailed, raised_by
from .gateway import Gateway
from .harness import Harness
from .protocol import MAX_BODY_BYTES, Entry
from .rendering import Renderer
from .session import Call, Session
from .witness import differences, find_records, turns_in
from .workers import THREADS, Workers
from .workspace import Place, Workspace

logger = logging.getLogger(__name__)

TRUTH = ("answer", "answers", "solution", "target", "label", "reference")
"""Columns of a row that a command does not see."""

_STOP_SECONDS = 2.0
_GRACE = 10.0  # seconds that a command has after it has heard that its rollout is over
_WINDOW = 131_072  # tokens that a harness is given as the limit, where neither model nor settings have a limit


class Program(Environment):
    """An agent program as an environment: it calls `base_url` as it would call OpenAI, and the policy answers.

    Args:
        agent (`Callable`, `list[str]`, `str` or [`Harness`]): A function of `(row, base_url, api_key)`, plain or
            `async`, which also gets `system_prompt` if it has such a parameter. It returns its answer, its reward, or a
            dict with `answer`, `reward` and what else rewards read. Or a command: `OPENAI_BASE_URL` and
            `OPENAI_API_KEY` are in its environment (Anthropic's and Google's variables, too), `{question}` in an
            argument is that column of the row, `AGENTIC_PROMPTING_ROW` names a file of JSON with it, and the last line
            of its output is its answer: a text, or a JSON object with a text `answer` and other fields. Its reward is
            never in its output, which the policy may have written. Or the settings of a command-line agent, as
            [`harness`] gives them.
        llms (`dict[str, ChatModel]`, *optional*): Large LLMs that the program calls at the same address, by the name of
            the model. They count towards the job's budget. If one fails, the rollout fails.
        mistakes (`tuple`, *optional*): Exceptions (and exit codes of a command) for which the policy is to blame, such
            as output that cannot be parsed: the rollout is `malformed` and learns. Every other one fails the rollout.
        trains (`Callable[[Call], bool]`, *optional*): Whether a call's tokens are in the loss. By default those of the
            agent are, and not those beside its work; see [`Call`].
        max_calls (`int`, *optional*, defaults to `64`): Calls of the policy in an episode. A request that is refused
            counts as one.
        max_llm_calls (`int`, *optional*, defaults to `64`): Calls of the large LLMs of `llms=` in an episode.
        max_sequences (`int`, *optional*, defaults to `16`): Token sequences in an episode.
        timeout (`float`, *optional*, defaults to `600.0`): Seconds of an episode.
        workers (`int`, *optional*, defaults to `0`): Processes that run the agent, which is then a function of a module
            that they can import. 0 runs it in this process. Use some where the agent computes, or where its clients
            cost more processor time than this process can spare.
        hidden (`Sequence[str]`, *optional*): Columns of the row that a command does not see.
        workspace ([`Workspace`], *optional*): Where a command runs, and what it may use: a fresh home and work folder
            for each rollout, confined with bubblewrap.
        reward (`Callable`, *optional*): `reward(rollout, folder)` of each episode of a command that did not fail, while
            its work folder is still there; the reward that the program returns. Plain or `async`.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): The address that the gateway listens on.
        port (`int`, *optional*, defaults to `0`): Its port; 0 takes a free one.
        public_url (`str`, *optional*): How programs that run elsewhere reach the gateway: `http://trainer:8000`.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): A request with a larger body is refused.

    Raises:
        `TypeError`: The agent is neither a function of three arguments nor a command.
        `ValueError`: A limit is not positive, or a large LLM has the policy's name.

    Example:

    ```python
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    shared = DefaultAsyncHttpxClient()  # a client of its own costs each rollout 30 ms


    async def agent(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared)
        messages = [{"role": "user", "content": row["question"]}]
        reply = await client.chat.completions.create(model="agent", messages=messages)
        return reply.choices[0].message.content


    args, rows = MultiTurnGRPOConfig("runs/agent"), load_task("hotpotqa", split="train", n=64)
    MultiTurnGRPOTrainer("Qwen/Qwen3-4B", exact_match_reward, args, rows, environment=Program(agent)).train()
    ```
    """

    grammar = FreeText()
    model = "agent"  # the policy's name at the address

    def __init__(
        self,
        agent: Callable[..., Any] | Sequence[str] | str | Harness,
        llms: Mapping[str, ChatModel] | None = None,
        mistakes: Sequence[type[BaseException] | int] = (),
        trains: Callable[[Call], bool] | None = None,
        max_calls: int = 64,
        max_sequences: int = 16,
        timeout: float = 600.0,
        workers: int = 0,
        hidden: Sequence[str] = TRUTH,
        workspace: Workspace | None = None,
        reward: Callable[..., Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        max_llm_calls: int = 64,
        max_body_bytes: int = MAX_BODY_BYTES,
    ):
        self.harness = agent if isinstance(agent, Harness) else None
        self.workspace = workspace or (None if callable(agent) else Workspace())
        self.private_paths: list[str] = []
        self.agent: Callable[..., Any] | list[str]
        if callable(agent):
            self.agent = agent
            _check_signature(agent)
        else:
            words = agent.command if isinstance(agent, Harness) else agent
            self.agent = shlex.split(words) if isinstance(words, str) else list(words)
            if not self.agent or not all(isinstance(part, str) for part in self.agent):
                raise TypeError("agent must be a function of (row, base_url, api_key), or a command: a list of texts")
        if (workspace or reward) and callable(agent):
            raise ValueError("workspace and reward are a command's: a function returns its reward itself")
        if workers and not callable(agent):
            raise ValueError("workers are for a function: a command has a process of its own for each rollout")
        if min(max_calls, max_sequences, timeout, max_body_bytes) <= 0 or max_llm_calls < 0:
            raise ValueError("max_calls, max_sequences, timeout and max_body_bytes must be positive")
        if self.model in (llms or {}):
            raise ValueError(f"{self.model!r} is the policy's own name: give the large LLM another one")
        self.models, self.mistakes, self.trains = dict(llms or {}), tuple(mistakes), trains
        self.max_calls, self.max_sequences, self.timeout = max_calls, max_sequences, timeout
        self.hidden, self._score = tuple(hidden), reward
        self.max_llm_calls = max_llm_calls
        self._gateway = Gateway(host, port, public_url, max_body_bytes)
        self._renderers: dict[int, Renderer] = {}
        self._conversations = itertools.count(2**40)  # far from those of `play`
        self._advice = Advice()
        self._kinds = tuple(one for one in self.mistakes if isinstance(one, type))
        self._workers = Workers(self.agent, self._kinds, workers) if workers and callable(self.agent) else None

    def step(self, rollout: Rollout) -> None:
        """Never called: a program plays whole episodes."""

    @property
    def described_by(self) -> Any:
        return self.agent if inspect.isroutine(self.agent) else type(self)

    def check(self) -> None:
        """Open the address, and raise the [`LLMError`] that a first rollout would get: no such port or harness, or a
        large LLM that cannot be asked."""
        start(self._gateway.listen()).result()
        if self.harness is not None:
            self.harness.check()
        if self.workspace is not None:
            self.workspace.check()
        for chat in self.models.values():
            if (check := getattr(chat, "check", None)) is not None:
                check()

    def keep_private(self, paths: Sequence[str]) -> None:
        """Hide files and folders from a command, also where they lie in something that its workspace shows."""
        self.private_paths += map(os.path.abspath, paths)

    def close(self) -> None:
        """Stop the gateway and the workers."""
        if self._workers is not None:
            self._workers.stop()
        if not on_background_thread():
            start(self._gateway.stop()).result(_STOP_SECONDS)

    @property
    def returns_reward(self) -> bool:
        """Whether the program itself returns rewards. A command's output is none: the policy may have written it."""
        return callable(self.agent) or self._score is not None

    @staticmethod
    def reward(rollout: Sequence[Rollout], **columns: Any) -> list[float | None]:
        """The reward that the program itself returned, as a reward function; 0 where it gave no answer, and `None`
        where it is a command without a reward.

        Raises:
            `ValueError`: It returned an answer without a reward.
        """
        rewards: list[float | None] = []
        for one in rollout:
            returned = one.returned or {}
            reward = returned.get("reward")
            if one.status == "answered" and "reward" not in returned:
                raise ValueError(
                    "the program returned an answer and no reward: return {'answer': ..., 'reward': ...}, or give the "
                    "trainer a reward function"
                )
            has_none = one.status == "failed" or (one.status == "answered" and reward is None)
            rewards.append(None if has_none else float(reward or 0.0))
        return rewards

    async def play_episode(  # type: ignore[override]
        self, rollout: Rollout, policy: Policy, chat_format: TextFormat, limits: Limits
    ) -> Rollout:
        """Run the program once, in place of the turns of an episode. Arguments as `rollout.play`'s.

        Raises:
            `Exception`: Whatever the policy raises. A program that raises fails its own rollout only.
        """
        if not isinstance(chat_format, ChatFormat):
            raise ValueError(
                "a program's calls are conversations: give the tokenizer a chat template, and rows no text `prompt`"
            )
        place: Place | None = None
        try:
            if self.workspace is not None:
                place = await asyncio.to_thread(self.workspace.open, rollout.row, self.private_paths)
            await self._play(rollout, policy, chat_format, limits, place)
            if place is not None and self._score is not None and rollout.error is None:
                await self._add_reward(rollout, place, self._score)
            return rollout
        except (ServerFailed, Misconfigured) as error:  # the row's files, the reward, or no isolation here
            return rollout.fail(Observation(error=error))
        finally:
            if place is not None:
                await asyncio.shield(asyncio.to_thread(place.close, rollout.error is not None))

    async def _add_reward(self, rollout: Rollout, place: Place, score: Callable[..., Any]) -> None:
        await asyncio.to_thread(place.add_tests, rollout.row)
        try:
            reward = await call_guarded(score, rollout, place.work)
        except Exception as error:
            raise failure_of(ServerFailed, "the reward function", error) from error
        rollout.returned = {**(rollout.returned or {}), "reward": _number(reward, "the reward function")}

    async def _play(
        self, rollout: Rollout, policy: Policy, chat_format: ChatFormat, limits: Limits, place: Place | None
    ) -> None:
        renderer = self._renderers.get(id(chat_format)) or Renderer(chat_format)
        self._renderers[id(chat_format)] = renderer
        first, *_ = rollout.row.get("prompt") or [{}]
        system = first["content"] if isinstance(first, Mapping) and first.get("role") == "system" else None
        by_file = self.harness is not None and self.harness.prompt_file is not None
        takes_system = _takes_system(self.agent) if callable(self.agent) else by_file
        session = Session(
            rollout, policy, renderer, limits, self.models, self.max_calls, self.max_sequences,
            None if takes_system else system, self.model, self._conversations, self.max_llm_calls,
        )  # fmt: skip
        base_url, key = await self._gateway.open(session)
        if callable(self.agent):
            ended = self._run(rollout.row, base_url, key, {"system_prompt": system} if takes_system else {})
        else:
            ended = self._run_command(rollout.row, base_url, key, limits, place, system)
        work, error = asyncio.ensure_future(self._guarded(ended)), None
        returned: Any = None
        try:
            returned = await self._outcome(session, work)
        except LLMError as failure:
            error = self._blamed(session, failure)
        finally:
            session.close("the program has ended" if error is None else "it has failed")
            self._gateway.close_key(key)
            work.cancel()
            if not callable(self.agent):  # until its processes have ended
                await asyncio.wait({work})
        if error is None and not session.calls:
            error = ServerFailed("the program made no call that was answered: does it use the base_url that it got?")
        self._write(rollout, session, returned, error)
        self._advice.look_at(session.calls, session.ignored, raised=isinstance(error, ProgramFailed))
        if place is not None:
            await self._compare_record(rollout, session, place)

    async def _compare_record(self, rollout: Rollout, session: Session, place: Place) -> None:
        """Compare the calls with the harness's own record of them, if it keeps one."""
        if self.harness is None or not self.harness.trace:
            return
        files = await asyncio.to_thread(find_records, place.home, self.harness.trace)
        turns = await asyncio.to_thread(turns_in, files)
        found = await asyncio.to_thread(differences, session.calls, turns)
        rollout.counts["program/witness_differences"] = len(found)
        if found:
            what = "; ".join(found)[:800]
            self._advice.warn_once("witness", f"{self.harness.name} has recorded other calls than we have: {what}")

    async def _outcome(self, session: Session, work: asyncio.Future[Any]) -> Any:
        """What the program returned; `None` where it was not waited for, as its rollout was over.

        Raises:
            [`LLMError`]: The program, or a large LLM of its, has failed.
            `Exception`: Whatever the policy raises.
        """
        over = asyncio.ensure_future(_after_the_end(session))
        waited: set[asyncio.Future[Any]] = {work, session.broken, *([over] if not callable(self.agent) else [])}
        try:
            done, _ = await asyncio.wait(waited, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if session.broken in done:
            session.broken.result()
        if not done:
            raise TimedOut(f"the program took longer than {self.timeout:g} seconds")
        return work.result() if work in done else None

    def _blamed(self, session: Session, failure: LLMError) -> LLMError | None:
        """The error that fails the rollout; `None` where the policy is to blame, or the program ran into a limit."""
        if isinstance(failure, OverLimit):
            session.stopped = session.stopped or "malformed"
            logger.info("a rollout was ended: %s", failure)
            return None
        is_own = isinstance(failure, self._kinds)
        if isinstance(failure, ProgramFailed):
            is_own = is_own or failure.is_mistake or (failure.code is not None and failure.code in self.mistakes)
            is_own = is_own or session.stopped is not None or self._is_cut(session, failure)
        return None if is_own else failure

    async def _guarded(self, ended: Awaitable[Any]) -> dict[str, Any] | None:
        try:
            returned: dict[str, Any] | None = await ended
            return returned
        except LLMError:
            raise
        except Exception as error:
            raise raised_by(error, self._kinds) from None

    async def _run(
        self, row: Mapping[str, Any], base_url: str, key: str, options: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        assert callable(self.agent)
        if self._workers is not None:
            return _as_returned(await self._workers.run(dict(row), base_url, key, options))  # pickled: a copy
        call = call_guarded_on(_threads(os.getpid()), self.agent, _copy_of(row), base_url, key, **options)
        running = asyncio.run_coroutine_threadsafe(call, _programs_loop(os.getpid()))
        return _as_returned(await asyncio.wrap_future(running))

    async def _run_command(
        self, row: Mapping[str, Any], base_url: str, key: str, limits: Limits, place: Place | None, system: str | None
    ) -> dict[str, Any] | None:
        assert isinstance(self.agent, list) and place is not None
        server: asyncio.Server | None = None
        base_url = place.base_url(key) or base_url
        hidden = {*self.hidden, place.workspace.tests, place.workspace.files}
        shown = {name: value for name, value in row.items() if name not in hidden}
        window = limits.max_context or _WINDOW
        address = {
            "base_url": base_url, "address": base_url.removesuffix("/v1"), "api_key": key, "model": self.model,
            "window": window, "output": min(limits.max_turn_tokens, window),
        }  # fmt: skip
        if self.harness is not None:
            api, url = self.harness.dialects[self.harness.dialect]
            address |= {"api": api, "url": fill(url, **address)}

        async def started() -> None:
            nonlocal server
            if place.listener is not None:
                server = await self._gateway.listen_on(place.listener, key)

        try:
            returned = await run_command(self.agent, shown, address, place, self.harness, system, started)
        finally:
            if server is not None:
                server.close()
        if isinstance(returned, str):
            returned = {"answer": returned}
        if not returned or not returned["answer"]:
            return None
        return {**returned, "reward": None}  # until the function of Program(reward=...) has seen the folder

    def _is_cut(self, session: Session, failure: ProgramFailed) -> bool:
        """Whether a harness gave up at a reply that was cut at its limit, or was empty: some end with an error then."""
        if self.harness is None or not session.calls or failure.code is None:
            return False
        last = session.calls[-1]
        return not (last.sample.finished and (last.reply.text.strip() or last.reply.calls))

    def _write(self, rollout: Rollout, session: Session, returned: Any, error: LLMError | None) -> Rollout:
        """The calls of a session as its rollout."""
        session.assign_roles(self.trains)
        found = session.sequences()
        calls = [call for _, calls in found for call in calls]
        if found:
            (own, _), *others = found
            rollout.prompt_ids, rollout.ids, rollout.mask = own.prompt_ids, own.ids, own.mask
            rollout.logprobs, rollout.role, rollout.turn_spans = own.logprobs, own.role, own.turn_spans
            rollout.others = [sequence for sequence, _ in others]
        rollout.turns = [Turn(call.text, "act", True, thought=call.reply.thought or None) for call in calls]
        rollout.observations = [Observation(_shown(call.new), replies=call.replies) for call in calls[1:]]
        left = (*(calls[0].replies if calls else ()), *session.replies)  # before the first call, and after the last
        auxiliary = sum(call.role == "auxiliary" for call in calls)
        rollout.counts = {
            "program/calls": len(calls),
            "program/sequences": len(found),
            "program/auxiliary_calls": auxiliary,
            "program/undelivered_tokens": session.undelivered,
            "program/limits_reached": float(session.stopped is not None),
        }
        if error is not None:
            return rollout.fail(Observation(error=error, replies=left))
        if left:
            rollout.observations.append(Observation(replies=left))
        rollout.returned = returned if returned is not None else {}
        return rollout.finish("answered" if returned is not None else session.stopped or "malformed")


def _copy_of(value: Any) -> Any:
    """A row for an agent to change: its dicts and lists are copied, at every depth, and what is in them is not."""
    if isinstance(value, Mapping):
        return {name: _copy_of(item) for name, item in value.items()}
    return [_copy_of(item) for item in value] if isinstance(value, list) else value


def _as_returned(value: Any) -> dict[str, Any] | None:
    """A program's returned value as a dict; `None` if that is no answer.

    Raises:
        [`ServerFailed`]: It is neither a text, a number nor a dict, or its reward is no number.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, Mapping):
        if "reward" in value:
            return {**value, "reward": _number(value["reward"], "the program")}
        return None if value.get("answer") in (None, "") else dict(value)
    if isinstance(value, int | float):
        return {"answer": str(value), "reward": _number(value, "the program")}
    if not isinstance(value, str):
        raise ServerFailed(f"the program returned {type(value).__name__}: return a text, a number, a dict or None")
    return {"answer": value}


def _number(reward: Any, whose: str) -> float:
    try:
        if math.isfinite(number := float(reward)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ServerFailed(f"{whose} could not score the episode: its reward is {text_of(reward, 80, repr)}, and no number")


async def _after_the_end(session: Session) -> None:
    """A while after the rollout's last answer: a command that still runs then is ended."""
    await session.spent.wait()
    await asyncio.sleep(_GRACE)


def _shown(new: Sequence[Entry]) -> str:
    return "\n".join(entry.text for entry in new if entry.role != "assistant")


def _check_signature(agent: Callable[..., Any]) -> None:
    try:
        inspect.signature(agent).bind(None, None, None, **{"system_prompt": ""} if _takes_system(agent) else {})
    except TypeError as error:
        raise TypeError(f"the agent must take (row, base_url, api_key): {error}") from None


def is_agent(thing: Any) -> bool:
    """Whether it is a function of `(row, base_url, api_key)`."""
    return inspect.isfunction(thing) and {"base_url", "api_key"} <= inspect.signature(thing).parameters.keys()


def _takes_system(agent: Callable[..., Any]) -> bool:
    return "system_prompt" in inspect.signature(agent).parameters


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Threads of plain functions: apart from those of the background loop, which large LLMs may need meanwhile."""
    return ThreadPoolExecutor(THREADS, "agentic-prompting-program")


@cache
def _programs_loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of `async` programs: one that blocks holds up the others, but never the gateway."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agentic-prompting-programs", daemon=True).start()
    return loop
