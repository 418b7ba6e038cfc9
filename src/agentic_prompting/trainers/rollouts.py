"""From dataset rows to a batch of finished rollouts.

[`Prompts`] render the rows, a [`RolloutPlayer`] plays one rollout of each, and a [`Batch`] gives
TRL their token ids and masks. A [`BatchSource`] combines these steps: [`OnPolicySource`] plays
rollouts within the step that trains on them, [`AsyncSource`] plays them several steps ahead.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.utils.rnn import pad_sequence

from ..llm import run
from ..llm.guard import describe
from ..rollout import (
    AgentSpec,
    Environment,
    Limits,
    Rollout,
    TextFormat,
    TokenSequence,
    play_all,
    reset_rows,
    rollout_seed,
    run_with_engine,
)
from ..rollout.progress import show_progress
from .checkpointing.stop_training import gather_first_reason
from .policies import Backend, PeerFailed, PolicyUnreachable

T = TypeVar("T")

PADDING_ROW = -1  # the rollout index of a row that belongs to no rollout

# The key-value store in which the processes wait for each other: the prefix of our keys, and the
# seconds between two looks, doubled each time.
STORE_PREFIX = "agentic_prompting/rank_barrier"
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.25


# --- which batch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPosition:
    """The position of a batch in a run.

    All seeds derive from it, so a resumed run needs no random state.

    Args:
        seed (`int`): The run's seed.
        mode (`str`): `train` or `eval`.
        step (`int`): Number of weight updates before the batch.
        index_in_step (`int`, *optional*, defaults to `0`): Distinguishes the batches of a step. In
            training, the micro-batch within the step at which the batch is generated. In
            evaluation, which has no steps, the index of the batch within the evaluation.
        batch_index (`int`, *optional*, defaults to `0`): Number of training batches generated
            before.
        batch_count (`int`, *optional*, defaults to `0`): Number of training batches in the whole
            run.
        group_size (`int`, *optional*, defaults to `1`): Rollouts per group.
    """

    seed: int
    mode: Literal["train", "eval"]
    step: int
    index_in_step: int = 0
    batch_index: int = 0
    batch_count: int = 0
    group_size: int = 1

    @property
    def is_training(self) -> bool:
        return self.mode == "train"

    @property
    def description(self) -> str:
        """The name of the work, for error messages."""
        if self.is_training:
            return f"the rollouts of step {self.step}"
        return f"an evaluation at step {self.step}"

    @property
    def sharing_key(self) -> str:
        """Rollouts with the same key may share replies, unless it is empty, as in evaluations."""
        if not self.is_training:
            return ""
        return f"{self.seed}.{self.step}.{self.index_in_step}"

    def rollout_seed(self, rollout_index: int) -> int:
        """Return the seed of a rollout, given its index in the global batch."""
        if self.is_training:
            return rollout_seed(self.seed, self.mode, self.step, self.index_in_step, rollout_index)
        # Without the step, so that all evaluations sample with the same seeds.
        return rollout_seed(self.seed, self.mode, self.index_in_step, rollout_index)

    def reset_seed(self, group_index: int) -> int:
        """Return the seed that the environment's `reset` may draw from.

        Args:
            group_index (`int`): The index of the row in the global batch.
        """
        step = self.step if self.is_training else 0
        return rollout_seed(self.seed, self.mode, step, self.index_in_step, "reset", group_index)


# --- rows -> prompts ---------------------------------------------------------------------------


class Prompts(Protocol):
    """Renders rows as prompts, and holds none itself.

    E-SPL has its own class, which chooses system prompts.
    """

    @property
    def rollouts_per_row(self) -> int:
        """The number of times that the sampler repeats each training row."""

    def start_batch(self, step: int) -> None:
        """Prepare a training batch. Called on all processes before its rows are rendered."""

    def choose_metadata(self, index: int, training: bool) -> dict[str, Any]:
        """Return the metadata of the rollout at this index of the global batch, as plain JSON.

        It is stored with the rollout and is sufficient to render the row again.
        """

    def render_messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Any]:
        """Return the prompt messages of a row.

        Raises:
            `LookupError`: If `metadata` names something that does not exist.
        """


class RowPrompts:
    """Renders every row with the agent's own template.

    Args:
        spec ([`AgentSpec`]): Contains the template.
        rollouts_per_row (`int`): Rollouts per group.
    """

    def __init__(self, spec: AgentSpec, rollouts_per_row: int):
        self.spec = spec
        self.rollouts_per_row = rollouts_per_row

    def start_batch(self, step: int) -> None:
        """Do nothing: all batches are rendered alike."""

    def choose_metadata(self, index: int, training: bool) -> dict[str, Any]:
        """Return no metadata: all rollouts of a row have the same prompt."""
        return {}

    def render_messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Any]:
        """Return the messages of [`AgentSpec.messages`]."""
        return [dict(message) for message in self.spec.messages(row)]


# --- prompts -> rollouts -----------------------------------------------------------------------


class RolloutPlayer:
    """Plays rollouts with one policy in one environment.

    Args:
        backend ([`Backend`]): Provides the policy, and the session around a batch of rollouts.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        chat_format ([`TextFormat`]): Converts prompts, observations and turns between text and
            tokens.
        limits ([`Limits`]): Turn and token limits.
        accelerator (`Accelerator`): The processes of the job.
        full_determinism (`bool`, *optional*, defaults to `False`): As in [`play_all`].
        show_progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar per
            batch.
        sync_weights (`Callable`, *optional*): Pushes the weights to a policy outside of this
            process.
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
        sync_weights: Callable[[], Any] | None = None,
    ):
        self.backend = backend
        self.policy = backend.policy
        self.environment = environment
        self.chat_format = chat_format
        self.limits = limits
        self.accelerator = accelerator
        self.full_determinism = full_determinism
        self.show_progress = show_progress
        self.sync_weights = sync_weights

    def wait_for_server(self) -> None:
        """Wait until the policy's server answers, if the policy is on a server.

        Called before TRL pushes the weights: TRL gives up after a minute, and only on the first
        process.

        Raises:
            [`PolicyUnreachable`]: On every process, if the server does not answer.
        """
        if self.backend.wait_for_server is None:
            return
        error_message = None
        # Only the first process asks the server; the others learn of a failure from it.
        if self.accelerator.is_main_process:
            try:
                self.backend.wait_for_server()
            except PolicyUnreachable as error:
                error_message = str(error)
        raise_on_all_processes(error_message)

    def push_weights(self, step: int) -> None:
        """Push the weights after this many updates to the policy. Turns may be in flight."""
        if self.sync_weights is not None:
            with self.backend.around_push(step, self.accelerator.wait_for_everyone):
                self.sync_weights()
        elif hasattr(self.policy, "updates"):
            # A policy in this process already has the weights and only needs their version.
            self.policy.updates = step

    def reset_rows(self, rows: list[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Let the environment start an episode for each row, and return the episodes' rows.

        Args:
            rows (`list[dict]`): Rows with rendered prompts.
            seeds (`Sequence[int]`): What each `reset` may draw from; equal in a group.
        """
        return run(reset_rows(self.environment, rows, self.limits, seeds=seeds))

    def play(self, rollouts: Sequence[Rollout], description: str) -> None:
        """Play all rollouts concurrently to their ends, in place.

        Args:
            rollouts (`Sequence[Rollout]`): New rollouts with rendered prompts.
            description (`str`): The name of the work, for error messages.

        Raises:
            [`PolicyUnreachable`]: On every process, if the policy's server did not answer one of
                them.
            [`PeerFailed`]: If another process failed.
        """
        # Each process has a bar for its own rollouts.
        progress_bar: Any = nullcontext()
        if self.show_progress:
            progress_bar = show_progress(len(rollouts), "rollouts")

        with progress_bar as bar:

            def update_bar(rollout: Rollout) -> None:
                if bar is not None:
                    bar.update()

            # Look for failed processes all the while, so that none plays on alone.
            def play_rollouts(check_peers: Callable[[], None]) -> None:
                play_all(
                    rollouts,
                    self.policy,
                    self.environment,
                    self.chat_format,
                    self.limits,
                    on_done=update_bar,
                    poll=check_peers,
                    full_determinism=self.full_determinism,
                )

            self._run_in_session(play_rollouts, description)

    def run(self, coroutine: Coroutine[Any, Any, T], description: str) -> T:
        """Run a coroutine that uses the policy, on all processes together. Raises as [`play`]."""

        def run_coroutine(check_peers: Callable[[], None]) -> T:
            return run_with_engine(self.policy, coroutine, check_peers)

        return self._run_in_session(run_coroutine, description)

    def _run_in_session(self, use_policy: Callable[[Callable[[], None]], T], description: str) -> T:
        """Call `use_policy` in a session of the policy that all processes leave together."""
        error_message: str | None = None
        with rank_barrier(description) as check_peers, self.backend.session():
            try:
                result = use_policy(check_peers)
            except PolicyUnreachable as error:
                if self.sync_weights is None:
                    raise  # other processes reach a policy of their own
                # Leave the session together with the other processes, then raise on all of them.
                error_message = str(error)
        if self.sync_weights is not None:
            raise_on_all_processes(error_message)
        return result


@contextmanager
def rank_barrier(description: str) -> Iterator[Callable[[], None]]:
    """A block that each process of the job runs at its own pace, and that all leave together.

    It is not a collective: processes wait through the process group's key-value store. So a process
    that takes ten minutes longer causes no NCCL timeout, and the others learn at once of one that
    failed. It is the same under every launcher.

    Args:
        description (`str`): The name of the work, for messages: "the rollouts of step 3".

    Yields:
        `Callable`: Raises [`PeerFailed`] if another process has failed; call it at intervals.

    Raises:
        [`PeerFailed`]: On every process but the failing one, which raises its own error with a note
            about where.
    """
    process_count = dist.get_world_size() if dist.is_initialized() else 1
    # A single process has no others to wait for.
    if process_count == 1:
        yield lambda: None
        return
    store = _get_default_store()
    rank = dist.get_rank()
    failure_key = f"{STORE_PREFIX}/failed"

    def check_peers() -> None:
        if store.check([failure_key]):
            raise PeerFailed(store.get(failure_key).decode())

    try:
        yield check_peers
    except PeerFailed:
        raise
    except BaseException as error:
        # After another process has failed, this error comes from a collective that it has left.
        if store.check([failure_key]):
            raise PeerFailed(store.get(failure_key).decode()) from error
        # This process is the first to fail: tell the others where and why.
        origin = (
            f"process {rank} of {process_count} ({socket.gethostname()}) failed in {description}"
        )
        store.set(failure_key, f"{origin}: {describe(error, 1000)}")
        error.add_note(f"{origin}; the other processes stop with it")
        raise

    # Wait until the others have arrived. The store counts the blocks that each process has passed,
    # because there may be several trainers in succession.
    expected_arrivals = process_count * store.add(f"{STORE_PREFIX}/{rank}", 1)
    arrivals = store.add(f"{STORE_PREFIX}/arrived", 1)
    pause = FIRST_PAUSE
    while arrivals < expected_arrivals:
        check_peers()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        arrivals = store.add(f"{STORE_PREFIX}/arrived", 0)


def raise_on_all_processes(error_message: str | None) -> None:
    """Raise [`PolicyUnreachable`] on every process if one of them passes a message."""
    first_message = gather_first_reason(error_message)
    if first_message:
        raise PolicyUnreachable(first_message)


# --- rows -> a batch ---------------------------------------------------------------------------


class BatchSource(Protocol):
    """Produces the next batch of this process."""

    def next_batch(self, rows: Sequence[dict[str, Any]], position: BatchPosition) -> Batch:
        """Return a batch of as many finished rollouts as there are `rows`.

        Raises:
            [`PolicyUnreachable`]: On every process, if the policy's server does not answer.
        """


class OnPolicySource:
    """Plays rollouts within the step that trains on them.

    Args:
        prompts ([`Prompts`]): Render the rows.
        player ([`RolloutPlayer`]): Plays the rollouts.
    """

    def __init__(self, prompts: Prompts, player: RolloutPlayer):
        self.prompts = prompts
        self.player = player

    def next_batch(self, rows: Sequence[dict[str, Any]], position: BatchPosition) -> Batch:
        """Render the rows that TRL passes, and play one rollout of each."""
        # Index of this process's first rollout in the global batch; all processes have as many.
        first_index = self.player.accelerator.process_index * len(rows)

        # Render the prompts.
        metadata = []
        rendered_rows = []
        for index, row in enumerate(rows, start=first_index):
            row_metadata = self.prompts.choose_metadata(index, position.is_training)
            messages = self.prompts.render_messages(row, row_metadata)
            rendered_rows.append({**row, "prompt": self.player.chat_format.prompt(messages)})
            metadata.append(row_metadata)

        # Start an episode of each row in the environment. This may change the rows.
        # Rollouts that are compared with each other have the same seed.
        compared = self.prompts.rollouts_per_row if position.is_training else position.group_size
        seeds = [
            position.reset_seed(index // compared)
            for index in range(first_index, first_index + len(rows))
        ]
        rendered_rows = self.player.reset_rows(rendered_rows, seeds)

        # Create the rollouts, and play all of them concurrently.
        rollouts = []
        for index, row in enumerate(rendered_rows, start=first_index):
            rollout = Rollout(
                self.player.chat_format.for_row(row).prompt_ids(row["prompt"]),
                row=dict(row),
                seed=position.rollout_seed(index),
                batch=position.sharing_key,
                group=index // position.group_size,
            )
            rollouts.append(rollout)
        self.player.play(rollouts, position.description)
        return Batch(position, rendered_rows, metadata, rollouts)


# --- a batch -> rows for TRL -------------------------------------------------------------------


@dataclass
class Batch:
    """The rollouts of this process for one batch. All of TRL's hooks read from it.

    TRL passes little between its hooks (prompts in, token ids out, rows to the reward functions),
    so the trainer keeps the current batch as one object.

    Args:
        position ([`BatchPosition`]): The position of the batch in the run.
        rows (`list[dict]`): One per rollout, with the rendered `prompt`. TRL passes them to the
            reward functions.
        metadata (`list[dict]`): What [`Prompts.choose_metadata`] returned for each rollout.
        rollouts (`list[Rollout]`): Finished rollouts.
        off_policy (`bool`, *optional*, defaults to `False`): Whether older weights sampled some
            of the tokens, so that the loss needs the importance ratio.
        metrics (`Mapping[str, float]`, *optional*): The source's metrics of the batch.

    Attributes:
        sequences (`list[TokenSequence]`): The token sequence of each of TRL's rows; set by
            [`to_trl`].
        rollout_indices (`list[int]`): The index of the rollout of each of TRL's rows,
            `PADDING_ROW` for rows without a rollout; set by [`to_trl`].
        loss_mask (`torch.Tensor`): 1 where a token is in the loss, of shape `(rows, longest
            completion)`; set by [`to_trl`].
    """

    position: BatchPosition
    rows: list[dict[str, Any]]
    metadata: list[dict[str, Any]]
    rollouts: list[Rollout]
    off_policy: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    sequences: list[TokenSequence] = field(default_factory=list, init=False)
    rollout_indices: list[int] = field(default_factory=list, init=False)
    loss_mask: torch.Tensor | None = field(default=None, init=False)

    def to_trl(
        self, eos_token_ids: Sequence[int], with_logprobs: bool, row_multiple: int | None = None
    ) -> dict[str, Any]:
        """Return the batch as TRL's `rollout_func` has to return it.

        Args:
            eos_token_ids (`Sequence[int]`): Tokens that end a sequence for TRL.
            with_logprobs (`bool`): Whether TRL gets the sampler's log-probabilities, for its
                importance ratio.
            row_multiple (`int`, *optional*): Pad the batch to the same number of rows on all
                processes, a multiple of this one. Either all processes pass it or none.

        Returns:
            `dict`: `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 for tokens in the
                loss) of each row, and `rollout` of each rollout.
        """
        # One row per token sequence.
        self.sequences = []
        self.rollout_indices = []
        for rollout_index, rollout in enumerate(self.rollouts):
            rollout_sequences = trained_sequences(rollout)
            self.sequences += rollout_sequences
            self.rollout_indices += [rollout_index] * len(rollout_sequences)

        # Rows without a token in the loss fill the batch up.
        if row_multiple is not None:
            missing_rows = padded_row_count(len(self.sequences), row_multiple) - len(self.sequences)
            self.sequences += [padding_sequence(eos_token_ids[0])] * missing_rows
            self.rollout_indices += [PADDING_ROW] * missing_rows

        # The columns of TRL's rows.
        prompt_ids = []
        completion_ids = []
        logprobs = []
        loss_masks = []
        for sequence, rollout_index in zip(self.sequences, self.rollout_indices, strict=True):
            # For a padding row this is the last rollout, whose status changes nothing there.
            rollout = self.rollouts[rollout_index]

            # A failed rollout has an advantage of 0, but that leaves the KL and entropy terms.
            loss_mask = sequence.mask
            if rollout.status == "failed":
                loss_mask = [0] * len(sequence.ids)

            # TRL needs a last token, and takes a completion without an end token for truncated. A
            # turn that was stopped at its tag has none, nor has the completion of a prompt that
            # fills the context.
            needs_end = not sequence.ids or (
                rollout.status != "truncated" and sequence.ids[-1] not in eos_token_ids
            )
            end = [eos_token_ids[0]] if needs_end else []

            # An end token that was added here was not sampled: it is outside of the loss.
            prompt_ids.append(sequence.prompt_ids)
            completion_ids.append([*sequence.ids, *end])
            sampler_logprobs = sequence.logprobs or [0.0] * len(sequence.ids)
            logprobs.append([*sampler_logprobs, *[0.0] * len(end)])
            loss_masks.append([*loss_mask, *[0] * len(end)])

        # Of shape `(rows, longest completion)`, padded on the right.
        self.loss_mask = pad_sequence([torch.tensor(mask) for mask in loss_masks], batch_first=True)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "env_mask": loss_masks,
            "logprobs": logprobs if with_logprobs else None,
            "rollout": list(self.rollouts),
        }

    def select_first_rows(self, row_values: Sequence[T]) -> list[T]:
        """Return one value per rollout, that of its first row, given one value per row."""
        first_values: dict[int, T] = {}
        for rollout_index, value in zip(self.rollout_indices, row_values, strict=True):
            first_values.setdefault(rollout_index, value)
        return [first_values[index] for index in range(len(self.rollouts))]

    def sampler_columns(self, completion_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return columns for [`logp_difference`], which TRL shuffles and splits with its own.

        Args:
            completion_ids (`torch.Tensor`): The completions as TRL padded them.

        Returns:
            `dict`: `sampler_logps`, the sampler's log-probabilities in the shape of
                `completion_ids`, NaN where there are none; and `sampled_at`, the number of weight
                updates before the batch.
        """
        # Padding and rows without log-probabilities keep NaN, which excludes them from the
        # comparison.
        sampler_logps = torch.full(completion_ids.shape, torch.nan)
        for row, sequence in zip(sampler_logps, self.sequences, strict=True):
            if sequence.logprobs is not None:
                row[: len(sequence.logprobs)] = torch.tensor(sequence.logprobs)
        return {
            "sampler_logps": sampler_logps.to(completion_ids.device),
            "sampled_at": torch.tensor(self.position.step),
        }


def trained_sequences(rollout: Rollout) -> list[TokenSequence]:
    """Return the sequences of a rollout that have a token in the loss, or one if none has."""
    # A failed rollout has no token in the loss, so one row is enough to stand for it.
    if rollout.status == "failed" or not rollout.others:
        return [rollout]
    sequences = [sequence for sequence in rollout.sequences if any(sequence.mask)]
    return sequences or [rollout]


def padded_row_count(row_count: int, multiple: int) -> int:
    """Return the number of rows that every process must have: the largest one, rounded up.

    TRL gathers lengths by row from all processes, and drops rows when it splits a batch unevenly.
    Must be called on every process.
    """
    largest = max(gather_object([row_count]))
    return -(-largest // multiple) * multiple


def padding_sequence(eos_token_id: int) -> TokenSequence:
    """Return a sequence without a token in the loss."""
    return TokenSequence([eos_token_id], ids=[eos_token_id], mask=[0], logprobs=[0.0])
