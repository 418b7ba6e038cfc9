"""Plays rollouts in a session of the policy, with a barrier between processes, and reports a policy server that does
not answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from accelerate import Accelerator

from ..llm import run
from ..rollout import Environment, Limits, Rollout, TextFormat, play_all, reset_rows, run_with_engine
from ..rollout.progress import progress
from .policies import Backend, PolicyUnreachable
from .stopping import first_reason, rank_barrier

T = TypeVar("T")


class Player:
    """Plays rollouts with one policy against one environment.

    Args:
        backend ([`Backend`]): The policy, and what all processes do around a batch of rollouts.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        chat_format ([`TextFormat`]): Prompts and observations as tokens, turns as text.
        limits ([`Limits`]): Turn and token limits.
        accelerator (`Accelerator`): The job's processes.
        full_determinism (`bool`, *optional*, defaults to `False`): As [`play_all`]'s.
        show_progress (`bool`, *optional*, defaults to `True`): Whether a bar counts the rollouts of a batch.
        sync (`Callable`, *optional*): Pushes the weights to where the policy samples.
    """

    def __init__(
        self,
        backend: Backend,
        environment: Environment | None,
        chat_format: TextFormat,
        limits: Limits,
        accelerator: Accelerator,
        *,
        full_determinism: bool = False,
        show_progress: bool = True,
        sync: Callable[[], Any] | None = None,
    ):
        self.backend, self.policy, self.environment = backend, backend.policy, environment
        self.chat_format, self.limits, self.accelerator = chat_format, limits, accelerator
        self.full_determinism, self.show_progress, self.sync = full_determinism, show_progress, sync

    def reset(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with their prompts, after the environment has started an episode for each."""
        return run(reset_rows(self.environment, rows))

    def play(self, rollouts: Sequence[Rollout], what: str) -> None:
        """Play fresh rollouts to their ends, in place, all at once.

        Args:
            rollouts (`Sequence[Rollout]`): Prompts rendered.
            what (`str`): The name of the work, for messages: "the rollouts of step 3".

        Raises:
            [`PolicyUnreachable`]: On every process, if the policy's server did not answer one of them.
            [`PeerFailed`]: Another process failed.
        """
        with progress(len(rollouts), "rollouts") if self.show_progress else nullcontext() as bar:
            self._together(
                what,
                lambda listen: play_all(
                    rollouts,
                    self.policy,
                    self.environment,
                    self.chat_format,
                    self.limits,
                    on_done=lambda rollout: bar and bar.update(),
                    listen=listen,
                    full_determinism=self.full_determinism,
                ),
            )

    def run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine that asks the policy. Called on every process alike; raises as [`Player.play`]."""
        return self._together(what, lambda listen: run_with_engine(self.policy, coroutine, listen))

    def _together(self, what: str, work: Callable[[Callable[[], None]], T]) -> T:
        unreachable: str | None = None
        with rank_barrier(what) as listen, self.backend.session():
            try:
                result = work(listen)
            except PolicyUnreachable as error:  # every process has the same server, and stops with the others
                unreachable = str(error)
        if self.sync is not None:
            raise_on_all(unreachable)
        return result

    def reach(self) -> None:
        """Wait for the policy's server before TRL pushes the weights, because TRL gives up after a minute, on the first
        process alone.

        Raises:
            [`PolicyUnreachable`]: On every process, if the server does not answer.
        """
        if self.backend.reach is None:
            return
        unreachable = None
        if self.accelerator.is_main_process:
            try:
                self.backend.reach()
            except PolicyUnreachable as error:
                unreachable = str(error)
        raise_on_all(unreachable)

    def push_weights(self, updates: int) -> None:
        """Push the weights, the result of so many updates, while turns may be in flight. A policy in this process has
        them already, and is only told their number."""
        if self.sync is None:
            if hasattr(self.policy, "updates"):
                self.policy.updates = updates
        else:
            with self.backend.changing(updates, self.accelerator.wait_for_everyone):
                self.sync()


def raise_on_all(unreachable: str | None) -> None:
    """Raise [`PolicyUnreachable`] on every process if one has a reason to."""
    if reason := first_reason(unreachable):
        raise PolicyUnreachable(reason)
