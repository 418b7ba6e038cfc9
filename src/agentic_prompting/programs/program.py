"""[`Program`]: an agent that keeps its own loop, as an environment that plays whole episodes.

    async def agent(row, base_url, api_key): ...     # or a plain function, or a command

The program calls an address as it would call OpenAI, and the policy answers. An episode is one run
of the program. The calls of a rollout become its token sequences (`session.py`, `call_tree.py`).

The gateway runs on the background loop, `async` programs on a loop of their own. A program that
blocks its loop (with a synchronous client in a coroutine) would otherwise wait for a reply that only
this loop can send.
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
from ..rollout import (
    ChatFormat,
    Environment,
    FreeText,
    Limits,
    Observation,
    Policy,
    Rollout,
    TextFormat,
    Turn,
)
from .advice import Advice, find_changed_message
from .call_tree import Call
from .command import run_command
from .connections import RolloutNetwork
from .failures import OverLimit, ProgramFailed, raised_by
from .gateway import Gateway
from .harness import Harness
from .protocol import MAX_BODY_BYTES, ChatMessage
from .rendering import Renderer
from .session import Session
from .witness import differences, find_records, turns_in
from .workers import THREADS, Workers
from .workspace import Place, Workspace

logger = logging.getLogger(__name__)

TRUTH = ("answer", "answers", "solution", "target", "label", "reference")
"""Columns of a row that a command does not see."""

_STOP_SECONDS = 2.0
_GRACE_SECONDS = 10.0  # for a command to end, after it has heard that its rollout is over
_DEFAULT_WINDOW = (
    131_072  # the context of a harness, in tokens, if neither model nor settings limit it
)
_LONGEST_REPORT = 800  # characters


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


    args = MultiTurnGRPOConfig("runs/agent")
    rows = load_task("hotpotqa", split="train", n=64)
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
        # Check the arguments.
        if callable(agent):
            _check_signature(agent)
            if workspace or reward:
                raise ValueError(
                    "workspace and reward are for a command: a function returns its reward itself"
                )
        elif workers:
            raise ValueError(
                "workers are for a function: a command has its own process in each rollout"
            )
        if min(max_calls, max_sequences, timeout, max_body_bytes) <= 0 or max_llm_calls < 0:
            raise ValueError(
                "max_calls, max_sequences, timeout and max_body_bytes must be positive"
            )
        if self.model in (llms or {}):
            raise ValueError(
                f"{self.model!r} is the policy's own name: give the large LLM another one"
            )

        # The agent: a function, or a command in a workspace.
        self.harness = agent if isinstance(agent, Harness) else None
        self.agent: Callable[..., Any] | list[str]
        if callable(agent):
            self.agent = agent
            self.workspace = None
        else:
            self.agent = _split_command(agent)
            self.workspace = workspace or Workspace()
        self.private_paths: list[str] = []
        self.hidden = tuple(hidden)
        self._reward_function = reward

        # Limits of an episode, and how it ends.
        self.max_calls = max_calls
        self.max_llm_calls = max_llm_calls
        self.max_sequences = max_sequences
        self.timeout = timeout
        self.mistakes = tuple(mistakes)
        self._mistake_types = tuple(
            mistake for mistake in self.mistakes if isinstance(mistake, type)
        )

        # Models, and the address at which they are called.
        self.models = dict(llms or {})
        self.trains = trains
        self._gateway = Gateway(host, port, public_url, max_body_bytes)
        self._renderers: dict[int, Renderer] = {}  # by the id of a chat format
        self._conversation_ids = itertools.count(2**40)  # far from those of `play`
        self._advice = Advice()
        self._workers: Workers | None = None
        if workers and callable(agent):
            self._workers = Workers(agent, self._mistake_types, workers)

    def step(self, rollout: Rollout) -> None:
        """Never called: a program plays whole episodes."""

    @property
    def described_by(self) -> Any:
        return self.agent if inspect.isroutine(self.agent) else type(self)

    @property
    def returns_reward(self) -> bool:
        """Whether the program itself returns rewards. A command's output has none: the policy may have written it."""
        return callable(self.agent) or self._reward_function is not None

    def check(self) -> None:
        """Open the address, and raise the [`LLMError`] that the first rollout would get.

        For example if the port or the harness does not exist, or a large LLM is misconfigured.
        """
        start(self._gateway.listen()).result()
        if self.harness is not None:
            self.harness.check()
        if self.workspace is not None:
            self.workspace.check()
        for chat in self.models.values():
            check = getattr(chat, "check", None)
            if check is not None:
                check()

    def keep_private(self, paths: Sequence[str]) -> None:
        """Hide files and folders from a command, even if they lie in a folder that its workspace shows."""
        self.private_paths += map(os.path.abspath, paths)

    def close(self) -> None:
        """Stop the gateway and the workers."""
        if self._workers is not None:
            self._workers.stop()
        if not on_background_thread():
            start(self._gateway.stop()).result(_STOP_SECONDS)

    @staticmethod
    def reward(rollout: Sequence[Rollout], **columns: Any) -> list[float | None]:
        """The reward that the program itself returned, as a reward function.

        It is 0 for rollouts without an answer, and `None` for failed ones and for a command without
        a reward function.

        Raises:
            `ValueError`: The program returned an answer without a reward.
        """
        rewards: list[float | None] = []
        for episode in rollout:
            returned = episode.returned or {}
            is_answered = episode.status == "answered"
            if is_answered and "reward" not in returned:
                raise ValueError(
                    "the program returned an answer and no reward: return {'answer': ..., 'reward': ...}, or give the "
                    "trainer a reward function"
                )
            reward = returned.get("reward")
            is_unscored = episode.status == "failed" or (is_answered and reward is None)
            rewards.append(None if is_unscored else float(reward or 0.0))
        return rewards

    # ---- an episode ----

    async def play_episode(  # type: ignore[override]
        self, rollout: Rollout, policy: Policy, chat_format: TextFormat, limits: Limits
    ) -> Rollout:
        """Run the program once, in place of the turns of an episode. Arguments as in `rollout.play`.

        Raises:
            `Exception`: Whatever the policy raises. A program that raises fails only its own rollout.
        """
        if not isinstance(chat_format, ChatFormat):
            raise ValueError(
                "a program's calls are conversations: give the tokenizer a chat template, and rows no text `prompt`"
            )
        rollout_place: Place | None = None
        try:
            if self.workspace is not None:
                rollout_place = await asyncio.to_thread(
                    self.workspace.open, rollout.row, self.private_paths
                )
            await self._play(rollout, policy, chat_format, limits, rollout_place)
            if (
                rollout_place is not None
                and self._reward_function is not None
                and rollout.error is None
            ):
                await self._add_reward(rollout, rollout_place, self._reward_function)
            return rollout
        except (ServerFailed, Misconfigured) as error:
            # The files of the row, the reward function, or the isolation.
            return rollout.fail(Observation(error=error))
        finally:
            if rollout_place is not None:
                await asyncio.shield(
                    asyncio.to_thread(rollout_place.close, rollout.error is not None)
                )

    async def _play(
        self,
        rollout: Rollout,
        policy: Policy,
        chat_format: ChatFormat,
        limits: Limits,
        rollout_place: Place | None,
    ) -> None:
        """Run the program, and write its calls and its answer into the rollout."""
        # Open a session: the address at which the policy answers this run.
        system_prompt = _find_system_prompt(rollout.row)
        session = Session(
            rollout=rollout,
            policy=policy,
            renderer=self._find_renderer(chat_format),
            limits=limits,
            llms=self.models,
            max_calls=self.max_calls,
            max_llm_calls=self.max_llm_calls,
            max_sequences=self.max_sequences,
            system_prompt=None if self._takes_system_prompt else system_prompt,
            model=self.model,
            conversation_ids=self._conversation_ids,
            grace_period=None if rollout_place is None else _GRACE_SECONDS,
        )
        base_url, key = await self._gateway.open(session)

        # Run the program until it returns or the session ends.
        if rollout_place is None:
            run = self._run_function(rollout.row, base_url, key, system_prompt)
        else:
            run = self._run_command(
                rollout.row, base_url, key, limits, rollout_place, system_prompt
            )
        task = asyncio.ensure_future(self._convert_errors(run))
        returned: dict[str, Any] | None = None
        error: LLMError | None = None
        try:
            returned = await self._wait_for(task, session)
        except LLMError as failure:
            if not self._is_policy_to_blame(failure, session):
                error = failure
        finally:
            session.close("it has failed" if error else "the program has ended")
            self._gateway.close_key(key)
            task.cancel()
            if rollout_place is not None:  # until its processes have ended
                await asyncio.wait({task})
        if error is None and not session.tree.calls:
            error = ServerFailed(
                "the program made no call that was answered: does it use the base_url that it got?"
            )

        # Write the rollout. In a thread, because a program can send many megabytes.
        await asyncio.to_thread(self._write_rollout, rollout, session, returned, error)
        await self._look_at_calls(session, error)
        if rollout_place is not None:
            await self._compare_record(rollout, session, rollout_place)

    def _find_renderer(self, chat_format: ChatFormat) -> Renderer:
        renderer = self._renderers.get(id(chat_format))
        if renderer is None:
            renderer = Renderer(chat_format)
            self._renderers[id(chat_format)] = renderer
        return renderer

    @property
    def _takes_system_prompt(self) -> bool:
        """Whether the program gets the system prompt of the run, instead of each of its conversations."""
        if callable(self.agent):
            return _takes_system_prompt(self.agent)
        return self.harness is not None and self.harness.prompt_file is not None

    async def _run_function(
        self, row: Mapping[str, Any], base_url: str, key: str, system_prompt: str | None
    ) -> dict[str, Any] | None:
        """Run a function, in a worker or in this process."""
        assert callable(self.agent)
        options = {}
        if self._takes_system_prompt:
            options["system_prompt"] = system_prompt
        if self._workers is not None:
            return _read_returned(await self._workers.run(dict(row), base_url, key, options))
        executor = _program_threads(os.getpid())
        call = call_guarded_on(executor, self.agent, _copy_row(row), base_url, key, **options)
        running = asyncio.run_coroutine_threadsafe(call, _program_loop(os.getpid()))
        return _read_returned(await asyncio.wrap_future(running))

    async def _run_command(
        self,
        row: Mapping[str, Any],
        base_url: str,
        key: str,
        limits: Limits,
        rollout_place: Place,
        system_prompt: str | None,
    ) -> dict[str, Any] | None:
        """Run a command in its workspace."""
        assert isinstance(self.agent, list)
        base_url = rollout_place.base_url(key) or base_url
        hidden = {*self.hidden, rollout_place.workspace.tests, rollout_place.workspace.files}
        shown_row = {name: value for name, value in row.items() if name not in hidden}
        address = self._describe_address(base_url, key, limits)

        network: RolloutNetwork | None = None

        async def serve_network() -> None:
            nonlocal network
            if rollout_place.listener is not None:
                network = await self._gateway.listen_on(rollout_place.listener, key)

        try:
            output = await run_command(
                self.agent,
                shown_row,
                address,
                rollout_place,
                self.harness,
                system_prompt,
                serve_network,
            )
        finally:
            if network is not None:
                network.close()

        # The reward is None until the reward function has seen the folder.
        if isinstance(output, str):
            output = {"answer": output}
        if not output or not output["answer"]:
            return None
        return {**output, "reward": None}

    def _describe_address(self, base_url: str, key: str, limits: Limits) -> dict[str, Any]:
        """What the arguments and settings of a command can name: `{base_url}`, `{api_key}`, ..."""
        window = limits.max_context or _DEFAULT_WINDOW
        address: dict[str, Any] = {
            "base_url": base_url,
            "address": base_url.removesuffix("/v1"),
            "api_key": key,
            "model": self.model,
            "window": window,
            "output": min(limits.max_turn_tokens, window),
        }
        if self.harness is not None:
            api, url = self.harness.dialects[self.harness.dialect]
            address["api"] = api
            address["url"] = fill(url, **address)
        return address

    async def _convert_errors(self, run: Awaitable[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Await a run of the program. Whatever it raises becomes an [`LLMError`]."""
        try:
            return await run
        except LLMError:
            raise
        except Exception as error:
            raise raised_by(error, self._mistake_types) from None

    async def _wait_for(
        self, task: asyncio.Future[dict[str, Any] | None], session: Session
    ) -> dict[str, Any] | None:
        """What the program returns; `None` if its session ends before it does.

        Raises:
            [`LLMError`]: The program, or one of its large LLMs, has failed.
            `Exception`: Whatever the policy raises.
        """
        pending: set[asyncio.Future[Any]] = {task, session.end}
        done, _ = await asyncio.wait(
            pending, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if session.end in done:
            session.end.result()  # raises the error with which the session has ended, if any
        if not done:
            raise TimedOut(f"the program took longer than {self.timeout:g} seconds")
        if task in done:
            return task.result()
        return None

    def _is_policy_to_blame(self, failure: LLMError, session: Session) -> bool:
        """Whether a failure is the policy's mistake, or follows from a limit that the program has reached."""
        if isinstance(failure, OverLimit):
            session.limit_reached = session.limit_reached or "malformed"
            logger.info("a rollout was ended: %s", failure)
            return True
        if isinstance(failure, self._mistake_types):
            return True
        if not isinstance(failure, ProgramFailed):
            return False
        is_mistake = failure.is_mistake or (
            failure.code is not None and failure.code in self.mistakes
        )
        return is_mistake or session.limit_reached is not None or self._gave_up(failure, session)

    def _gave_up(self, failure: ProgramFailed, session: Session) -> bool:
        """Whether a harness ended because of its last reply: some exit with an error if it is empty or cut off."""
        if self.harness is None or failure.code is None or not session.tree.calls:
            return False
        last_call = session.tree.calls[-1]
        is_empty = not last_call.reply.text.strip() and not last_call.reply.tool_calls
        return is_empty or not last_call.sample.finished

    # ---- after an episode ----

    def _write_rollout(
        self,
        rollout: Rollout,
        session: Session,
        returned: dict[str, Any] | None,
        error: LLMError | None,
    ) -> None:
        """Write the calls of a session and the outcome into its rollout."""
        # Token sequences. The first one is the rollout's own.
        session.tree.assign_roles(self.model, self.trains)
        sequences = session.tree.sequences()
        if sequences:
            main_sequence, _ = sequences[0]
            rollout.prompt_ids = main_sequence.prompt_ids
            rollout.ids = main_sequence.ids
            rollout.mask = main_sequence.mask
            rollout.logprobs = main_sequence.logprobs
            rollout.role = main_sequence.role
            rollout.turn_spans = main_sequence.turn_spans
            rollout.others = [sequence for sequence, _ in sequences[1:]]

        # Turns, and between two turns the messages that the program added.
        calls: list[Call] = []
        for _, sequence_calls in sequences:
            calls += sequence_calls
        rollout.turns = [
            Turn(call.text, "act", True, thought=call.reply.thought or None) for call in calls
        ]
        rollout.observations = [
            Observation(_shown_text(call.new_messages), replies=call.llm_replies)
            for call in calls[1:]
        ]

        rollout.counts = {
            "program/calls": len(calls),
            "program/sequences": len(sequences),
            "program/auxiliary_calls": sum(call.role == "auxiliary" for call in calls),
            "program/undelivered_tokens": session.tree.undelivered_tokens,
            "program/limits_reached": float(session.limit_reached is not None),
        }

        # Replies of large LLMs before the first call and after the last one.
        other_replies = tuple(session.llm_replies)
        if calls:
            other_replies = calls[0].llm_replies + other_replies
        if error is not None:
            rollout.fail(Observation(error=error, replies=other_replies))
            return
        if other_replies:
            rollout.observations.append(Observation(replies=other_replies))
        rollout.returned = returned or {}
        if returned is not None:
            rollout.finish("answered")
        else:
            rollout.finish(session.limit_reached or "malformed")

    async def _look_at_calls(self, session: Session, error: LLMError | None) -> None:
        """Warn about common problems of programs."""
        calls = session.tree.calls
        changed_message = ""
        if self._advice.wants_changed_message:
            changed_message = await asyncio.to_thread(find_changed_message, calls)
        self._advice.look_at(
            calls,
            ignored_settings=session.ignored_settings,
            changed_message=changed_message,
            has_raised=isinstance(error, ProgramFailed),
        )

    async def _compare_record(
        self, rollout: Rollout, session: Session, rollout_place: Place
    ) -> None:
        """Compare the calls with the harness's own record of them, if it keeps one."""
        if self.harness is None or not self.harness.trace:
            return
        files = await asyncio.to_thread(find_records, rollout_place.home, self.harness.trace)
        recorded_turns = await asyncio.to_thread(turns_in, files)
        reports = await asyncio.to_thread(differences, session.tree.calls, recorded_turns)
        rollout.counts["program/witness_differences"] = len(reports)
        if reports:
            report = "; ".join(reports)[:_LONGEST_REPORT]
            self._advice.warn_once(
                "witness", f"{self.harness.name} has recorded other calls than we have: {report}"
            )

    async def _add_reward(
        self, rollout: Rollout, rollout_place: Place, reward_function: Callable[..., Any]
    ) -> None:
        await asyncio.to_thread(rollout_place.add_tests, rollout.row)
        try:
            reward = await call_guarded(reward_function, rollout, rollout_place.work)
        except Exception as error:
            raise failure_of(ServerFailed, "the reward function", error) from error
        rollout.returned = {
            **(rollout.returned or {}),
            "reward": _read_reward(reward, "the reward function"),
        }


# ---- arguments of a program ----


def is_agent(value: Any) -> bool:
    """Whether it is a function of `(row, base_url, api_key)`."""
    return (
        inspect.isfunction(value)
        and {"base_url", "api_key"} <= inspect.signature(value).parameters.keys()
    )


def _check_signature(agent: Callable[..., Any]) -> None:
    options = {}
    if _takes_system_prompt(agent):
        options["system_prompt"] = ""
    try:
        inspect.signature(agent).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(f"the agent must take (row, base_url, api_key): {error}") from None


def _takes_system_prompt(agent: Callable[..., Any]) -> bool:
    return "system_prompt" in inspect.signature(agent).parameters


def _split_command(agent: Sequence[str] | str | Harness) -> list[str]:
    if isinstance(agent, Harness):
        agent = agent.command
    parts = shlex.split(agent) if isinstance(agent, str) else list(agent)
    if not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(
            "agent must be a function of (row, base_url, api_key), or a command: a list of texts"
        )
    return parts


# ---- rows and returned values ----


def _find_system_prompt(row: Mapping[str, Any]) -> str | None:
    """The system prompt of the run, in front of the row's prompt."""
    messages = row.get("prompt") or [None]
    first_message = messages[0]
    if isinstance(first_message, Mapping) and first_message.get("role") == "system":
        system_prompt: str = first_message["content"]
        return system_prompt
    return None


def _copy_row(value: Any) -> Any:
    """A row that an agent may change: copies dicts and lists at every depth, and nothing in them."""
    if isinstance(value, Mapping):
        return {name: _copy_row(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy_row(item) for item in value]
    return value


def _read_returned(value: Any) -> dict[str, Any] | None:
    """What a function returned as a dict; `None` if that is no answer.

    Raises:
        [`ServerFailed`]: It is neither a text, a number nor a dict, or its reward is not a number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return {"answer": value} if value.strip() else None
    if isinstance(value, Mapping):
        if "reward" in value:
            return {**value, "reward": _read_reward(value["reward"], "the program")}
        has_answer = value.get("answer") not in (None, "")
        return dict(value) if has_answer else None
    if isinstance(value, int | float):
        return {"answer": str(value), "reward": _read_reward(value, "the program")}
    raise ServerFailed(
        f"the program returned {type(value).__name__}: return a text, a number, a dict or None"
    )


def _read_reward(reward: Any, source: str) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ServerFailed(
            f"{source} could not score the episode: its reward is {text_of(reward, 80, repr)}, not a number"
        )
    return number


def _shown_text(messages: Sequence[ChatMessage]) -> str:
    """The text of the messages that the program itself has added."""
    return "\n".join(message.text for message in messages if message.role != "assistant")


# ---- where functions run ----


@cache
def _program_threads(pid: int) -> ThreadPoolExecutor:
    """Threads for plain functions. Those of the background loop may be needed by large LLMs meanwhile."""
    return ThreadPoolExecutor(THREADS, "agentic-prompting-program")


@cache
def _program_loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of `async` programs. A program that blocks it holds up other programs, but not the gateway."""
    loop = asyncio.new_event_loop()
    threading.Thread(
        target=loop.run_forever, name="agentic-prompting-programs", daemon=True
    ).start()
    return loop
