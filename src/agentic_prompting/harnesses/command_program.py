"""[`CommandProgram`]: an agent that is a command, such as codex, as an environment."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from ..llm import LLMError, Misconfigured, ServerFailed, fill
from ..llm.guard import call_guarded, failure_of
from ..programs import AgentProgram, AgentRun, RunRequest
from ..programs.advice import Advice
from ..programs.agent_program import ProgramOptions, read_reward
from ..programs.connections import RolloutNetwork
from ..programs.gateway import Gateway
from ..programs.session import Session
from ..rollout import Rollout
from .command import CommandFailed, run_command
from .harness import Harness
from .session_records import compare_turns, find_records, read_turns
from .workspace import RolloutWorkspace, Workspace

SOLUTION_COLUMNS = ("answer", "answers", "solution", "target", "label", "reference")
"""Columns of a row that a command does not see."""

_DEFAULT_WINDOW = 131_072  # tokens of a harness's context, if neither model nor settings limit it
_MAX_REPORT_LENGTH = 800  # characters of a report


class CommandProgram(AgentProgram):
    """A command as an environment: it calls the address in its environment, and the policy answers.

    Args:
        command (`list[str]`, `str` or [`Harness`]): Program and arguments. `OPENAI_BASE_URL` and
            `OPENAI_API_KEY` are in its environment (Anthropic's and Google's variables, too),
            `{question}` in an argument is that column of the row, `AGENTIC_PROMPTING_ROW` names a
            file of JSON with it, and the last line of its output is its answer: a text, or a JSON
            object with a text `answer` and other fields. Its reward is never in its output, which
            the policy may have written. Or the settings of a command-line agent, as [`get_harness`]
            returns them.
        workspace ([`Workspace`], *optional*): Where the command runs, and what it may use: by
            default a fresh home and work folder for each rollout, confined with bubblewrap.
        reward (`Callable`, *optional*): `reward(rollout, folder)` of each episode that did not
            fail, while its work folder is still there; the reward that the program returns. Plain
            or `async`.
        hidden (`Sequence[str]`, *optional*): Columns of the row that the command does not see.
        mistakes (`tuple`, *optional*): Exit codes, and exceptions, for which the policy is to
            blame: the rollout is `malformed` and learns. Every other one fails the rollout.
        **options: The other options of [`AgentProgram`]: `llms`, `trains`, the limits and the
            address.

    Raises:
        `TypeError`: The command is empty, or not a list of texts.
        `ValueError`: A limit is not positive, or a large LLM has the policy's name.

    Example:

    ```python
    def tests_pass(rollout, folder):
        return float((folder / "passed").exists())

    program = CommandProgram(["my-agent", "--task", "{question}"], reward=tests_pass)
    ```
    """

    def __init__(
        self,
        command: Sequence[str] | str | Harness,
        workspace: Workspace | None = None,
        reward: Callable[..., Any] | None = None,
        hidden: Sequence[str] = SOLUTION_COLUMNS,
        *,
        mistakes: Sequence[type[BaseException] | int] = (),
        **options: Unpack[ProgramOptions],
    ):
        # Exit codes are looked at here; the base class knows only exceptions.
        exceptions = [mistake for mistake in mistakes if isinstance(mistake, type)]
        super().__init__(mistakes=exceptions, **options)
        self.mistake_codes = tuple(mistake for mistake in mistakes if isinstance(mistake, int))
        self.command = _split_command(command)
        self.harness = command if isinstance(command, Harness) else None
        self.workspace = workspace or Workspace()
        self.private_paths: list[str] = []
        self.hidden = tuple(hidden)
        self.reward_function = reward

    @property
    def returns_reward(self) -> bool:
        """Whether there is a reward function.

        A command's output has no reward: the policy may have written it.
        """
        return self.reward_function is not None

    def check(self) -> None:
        """Open the address, and raise the [`LLMError`] that the first rollout would get.

        For example if the port or the harness does not exist, or a command cannot be isolated.
        """
        if self.harness is not None:
            self.harness.check()
        self.workspace.check()
        super().check()

    def keep_private(self, paths: Sequence[str]) -> None:
        """Hide files and folders from the command, even if they lie in a folder that its workspace
        shows.
        """
        self.private_paths += map(os.path.abspath, paths)

    def hide_columns(self, columns: Mapping[str, str]) -> None:
        """Hide solutions, files and tests under the names of the user's data, too."""
        hidden = (*self.hidden, self.workspace.tests, self.workspace.files)
        own_names = [own_name for name, own_name in columns.items() if name in hidden]
        self.hidden = tuple(dict.fromkeys([*self.hidden, *own_names]))

    @asynccontextmanager
    async def open_run(self, rollout: Rollout) -> AsyncIterator[AgentRun]:
        """The run of an episode, in a workspace that is removed afterwards."""
        rollout_workspace = await asyncio.to_thread(
            self.workspace.open, rollout.row, self.private_paths
        )
        has_failed = False
        try:
            yield CommandRun(self, rollout_workspace, self._gateway, self._advice)
            has_failed = rollout.error is not None
        # Failures of the machine or the settings, which the rollout does not hold yet.
        except (ServerFailed, Misconfigured):
            has_failed = True
            raise
        finally:
            # Also when the episode is cancelled, the folders are closed to the end.
            await asyncio.shield(asyncio.to_thread(rollout_workspace.close, has_failed))


class CommandRun(AgentRun):
    """One run of a command, in its workspace.

    Args:
        program ([`CommandProgram`]): The program.
        rollout_workspace ([`RolloutWorkspace`]): The workspace of the rollout.
        gateway ([`Gateway`]): Serves the network of the rollout.
        advice ([`Advice`]): Warns about the rollout.
    """

    has_processes = True

    def __init__(
        self,
        program: CommandProgram,
        rollout_workspace: RolloutWorkspace,
        gateway: Gateway,
        advice: Advice,
    ):
        self.program = program
        self.harness = program.harness
        self.rollout_workspace = rollout_workspace
        self.gateway = gateway
        self.advice = advice
        self.takes_system_prompt = self.harness is not None and self.harness.prompt_file is not None

    async def play(self, request: RunRequest) -> dict[str, Any] | None:
        """Run the command, and read its answer."""
        # The columns that the agent may know, and the placeholders of its command.
        workspace = self.rollout_workspace.workspace
        hidden = {*self.program.hidden, workspace.tests, workspace.files}
        shown_row = {name: value for name, value in request.row.items() if name not in hidden}
        placeholders = self._build_placeholders(request)

        # Serve the rollout's own network, if it has one, once the command has started.
        network: RolloutNetwork | None = None

        async def serve_network() -> None:
            nonlocal network
            if self.rollout_workspace.listener is not None:
                network = await self.gateway.listen_on(
                    self.rollout_workspace.listener, request.api_key
                )

        try:
            output = await run_command(
                self.program.command,
                shown_row,
                placeholders,
                self.rollout_workspace,
                harness=self.harness,
                system_prompt=request.system_prompt,
                on_start=serve_network,
            )
        finally:
            if network is not None:
                network.close()

        # The reward is None until the reward function has seen the folder.
        if isinstance(output, str):
            output = {"answer": output}
        # An empty answer does not count as an answer.
        if not output or not output["answer"]:
            return None
        return {**output, "reward": None}

    def _build_placeholders(self, request: RunRequest) -> dict[str, Any]:
        """Return the placeholders of a command's arguments and settings: `{base_url}`, `{api_key}`,
        ...
        """
        # In a network of its own, the command reaches the gateway at another address.
        base_url = self.rollout_workspace.base_url(request.api_key) or request.base_url
        window = request.limits.max_context or _DEFAULT_WINDOW
        placeholders: dict[str, Any] = {
            "base_url": base_url,
            "address": base_url.removesuffix("/v1"),
            "api_key": request.api_key,
            "model": self.program.model,
            "window": window,
            "output": min(request.limits.max_turn_tokens, window),
        }

        # A harness has its own name for the dialect, and its own form of the address.
        if self.harness is not None:
            api, url = self.harness.dialects[self.harness.dialect]
            placeholders["api"] = api
            placeholders["url"] = fill(url, **placeholders)
        return placeholders

    def is_policy_to_blame(self, failure: LLMError, session: Session) -> bool:
        """Whether the exit code is listed as a mistake, or a harness gave up because of its last
        reply.

        Some harnesses exit with an error if a reply is empty or cut off.
        """
        if not isinstance(failure, CommandFailed):
            return False
        if failure.code in self.program.mistake_codes:
            return True

        # Without a harness, only the listed exit codes blame the policy.
        if self.harness is None or not session.tree.calls:
            return False
        last_call = session.tree.calls[-1]
        is_empty = not last_call.reply.text.strip() and not last_call.reply.tool_calls
        return is_empty or not last_call.sample.finished

    async def finish(self, rollout: Rollout, session: Session) -> None:
        """Compare the calls with the harness's own record of them, if it keeps one, and add the
        reward.
        """
        if self.harness is not None and self.harness.trace:
            await self._count_differences(rollout, session, self.harness)

        # A failed episode has no reward.
        if self.program.reward_function is not None and rollout.error is None:
            await self._add_reward(rollout, self.program.reward_function)

    async def _count_differences(
        self, rollout: Rollout, session: Session, harness: Harness
    ) -> None:
        """Count the differences from a harness's own record, and warn of the first ones."""
        # In threads: an agent may have left large files.
        files = await asyncio.to_thread(find_records, self.rollout_workspace.home, harness.trace)
        turns = await asyncio.to_thread(read_turns, files)
        differences = await asyncio.to_thread(compare_turns, session.tree.calls, turns)

        rollout.counts["program/witness_differences"] = len(differences)
        if differences:
            report = "; ".join(differences)[:_MAX_REPORT_LENGTH]
            self.advice.warn_once(
                "witness", f"{harness.name} has recorded other calls than the gateway: {report}"
            )

    async def _add_reward(self, rollout: Rollout, reward_function: Callable[..., Any]) -> None:
        """Call the reward function on the work folder, to which the row's tests are added.

        Raises:
            [`ServerFailed`]: The function raised, or its reward is not a number.
        """
        # The command has ended, so the agent never sees the tests.
        await asyncio.to_thread(self.rollout_workspace.add_tests, rollout.row)
        try:
            reward = await call_guarded(reward_function, rollout, self.rollout_workspace.work)
        except Exception as error:
            failure = failure_of(ServerFailed, "the reward function", error)
            # A question that is asked after training has no accepted answer, and needs no reward.
            if rollout.group is None and rollout.row.keys().isdisjoint(self.program.hidden):
                self.advice.warn_once("reward", f"an answer has no reward: {failure}")
                return
            raise failure from error

        # Kept beside what the command returned.
        number = read_reward(reward, "the reward function")
        rollout.returned = {**(rollout.returned or {}), "reward": number}


def _split_command(command: Sequence[str] | str | Harness) -> list[str]:
    if isinstance(command, Harness):
        command = command.command
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    if not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError("command must be a list of texts: the program and its arguments")
    return parts
