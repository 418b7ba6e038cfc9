"""The policy in this process as an [`Engine`] with continuous batching.

Rows join and leave between two tokens.

The keys and values of all rows lie in one slab per layer. Each conversation has a row, and each
token lies at the column of its position: there is no padding on the left, and a row does not depend
on its neighbours. When a turn ends, its row is cut out and cached for the conversation's next turn,
within a bound, and the last row moves to its place. A row that joins brings its cached keys and
values; the new part of its context is read in one pass together with those of the other rows that
join. The first decoding step reads the last token of the context, so joining samples nothing.

Each token is drawn with the request's own random numbers (`sampling.py`): it depends on the context
and the seed alone, up to the last bits of sums. So a pass can also read guesses (`drafting.py`): a
row keeps those guesses that are the tokens it would have drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..rollout import BatchEngine, Engine, PendingRequest, Sample, SampleRequest
from .drafting import TokenDraft
from .sampling import (
    ModelProvider,
    Sampling,
    TransformersSampler,
    TurnEnd,
    borrow_model,
    context_length,
)
from .slab import (
    COLUMN_STEP,
    Layers,
    Slab,
    attention_with_masks,
    bytes_of,
    can_slab,
    check_runs,
    masks_of,
)

SampleJob: TypeAlias = PendingRequest[SampleRequest, Sample]

_STEPS_BETWEEN_JOINS = 4  # reading a context takes about as long as a step
_MAX_GUESSES = 10  # of a row in one pass
# Tokens of all rows in one pass, each row's first and its guesses. With fewer tokens the time of a
# pass is that of reading the weights, and guesses are cheap; with more it is that of arithmetic,
# and wrong guesses delay all.
_MAX_PASS_TOKENS = 64


@dataclass(eq=False)
class _Row:
    """A request in the batch, and the tokens that it has sampled so far."""

    job: SampleJob
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self):
        self.limit = self.job.request.max_new_tokens
        # One number for each token by its position, drawn together, so that a token does not
        # depend on the passes in which the row is read.
        self.uniform = np.random.default_rng(self.job.request.seed).random(self.limit)
        self.draft = TokenDraft(self.job.request.draft) if self.job.request.draft else None

    @property
    def context(self) -> list[int]:
        return self.job.request.context + self.ids

    @property
    def length(self) -> int:
        """The number of tokens that the model has read: all but the last."""
        return len(self.job.request.context) + len(self.ids) - 1

    @property
    def last_token(self) -> int:
        return self.ids[-1] if self.ids else self.job.request.context[-1]

    @property
    def is_done(self) -> bool:
        return self.finished or len(self.ids) >= self.limit

    def guess(self, max_guesses: int) -> list[int]:
        """Return at most `max_guesses` guesses; after them the model chooses one more token."""
        if self.draft is None:
            return []
        return self.draft.guess(self.ids, min(max_guesses, self.limit - len(self.ids) - 1))

    def next_uniform(self, count: int) -> list[float]:
        """Return the random numbers of the next `count` tokens."""
        # A row is padded to the widest guess of the batch. Padding beyond its last token gets any
        # number, because its tokens are not used.
        first = len(self.ids)
        return [self.uniform[min(index, self.limit - 1)] for index in range(first, first + count)]

    def take(
        self, guesses: list[int], tokens: list[int], logprobs: list[float], end: TurnEnd
    ) -> int:
        """Append the right guesses and the first drawn token after them.

        A guess is right if it equals the token that was drawn in its place.

        Returns:
            `int`: The number of appended tokens.
        """
        length_before = len(self.ids)
        right_guesses = 0
        # One token for each guess, and one after the last guess.
        for position in range(len(guesses) + 1):
            if self.is_done:
                break
            token = tokens[position]
            self.ids.append(token)
            self.logprobs.append(logprobs[position])
            self.finished = end.reached(self.ids)

            # The tokens after a wrong guess were drawn in a wrong context.
            if position == len(guesses) or token != guesses[position]:
                break
            right_guesses += 1

        if self.draft is not None:
            self.draft.learn(len(guesses), right_guesses, self.ids)
        return len(self.ids) - length_before

    def to_sample(self) -> Sample:
        drafted = 0 if self.draft is None else self.draft.accepted
        return Sample(self.ids, self.logprobs, self.finished, drafted, self.updates)


class _CachedTurn(NamedTuple):
    """The tokens of a conversation that the model has read, and their keys and values."""

    ids: list[int]
    layers: Layers


class _JoiningRow(NamedTuple):
    """A row that joins the batch, with its cached keys and values if there are any."""

    row: _Row
    layers: Layers | None
    checks_draft: bool

    def reading_order(self) -> tuple[bool, bool]:
        """Return the sort key of the rows that join: drafts last, and cached rows first."""
        return self.checks_draft, self.layers is None

    @property
    def cached_length(self) -> int:
        if self.layers is None:
            return 0
        keys, _ = self.layers[0]
        return keys.shape[1]


class TransformersEngine(Engine[SampleRequest, Sample]):
    """A [`Policy`] over a transformers causal LM, with continuous batching.

    Args:
        model (`PreTrainedModel` or `Callable`): The model, or a function that returns a context
            manager with it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        sampling ([`Sampling`], *optional*): Temperature and the other sampling parameters.
        stop_texts (`Sequence[str]`, *optional*): A turn also ends right after one of these, so that
            an agent cannot write the observation itself.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn. Defaults to the
            model's generation config and the tokenizer's end-of-sequence.
        max_batch_size (`int`, *optional*, defaults to `256`): At most this many rows in the batch;
            further requests wait.
        max_batch_mb (`float`, *optional*): Memory for keys and values of the rows in the batch, in
            MB (10^6 bytes). A row that does not fit waits, or is put back to wait with the tokens
            it has sampled. Defaults to half of the memory of a GPU that is free when the engine
            begins to run, and to no bound on a CPU.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values
            cached between the turns of a conversation, in MB; the oldest are dropped first. 0
            caches none. A caller that changes the weights must call `forget`.
        on_callers_thread (`bool`, *optional*, defaults to `False`): As in [`Engine`].

    Attributes:
        stats (`dict[str, int]`): `steps` (of decoding), `row_steps` (summed over the rows of each
            step), `tokens` (sampled), `read` (tokens of contexts that were computed) and `reused`
            (those that were cached).

    Raises:
        `ValueError`: No token ends a turn, or the engine cannot run this architecture (see
            [`can_slab`]).
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelProvider,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling = Sampling(),
        stop_texts: Sequence[str] = (),
        end_of_turn_ids: Sequence[int] | None = None,
        max_batch_size: int = 256,
        max_batch_mb: float | None = None,
        prefix_cache_mb: float = 1024.0,
        on_callers_thread: bool = False,
    ):
        super().__init__(on_callers_thread)
        if isinstance(model, torch.nn.Module):
            check_runs(model)
        self._model_source = model
        self.sampling = sampling
        self.max_batch_size = max_batch_size
        self.end = TurnEnd(model, tokenizer, stop_texts, end_of_turn_ids)
        self.max_batch_bytes = None if max_batch_mb is None else max_batch_mb * 1e6
        self.prefix_cache_bytes = prefix_cache_mb * 1e6
        self.rows: list[_Row] = []
        self.slab = Slab()
        self.prefix_cache: dict[int, _CachedTurn] = {}  # by conversation, the oldest first
        self.cached_bytes = 0
        # Number of weight updates, set by the trainer; a sample has it for each token.
        self.updates = 0
        self.stats = dict.fromkeys(("steps", "row_steps", "tokens", "read", "reused"), 0)
        self._ended_conversations: deque[int] = deque()
        self._preempted: list[_Row] = []  # rows in the middle of a turn that wait to be read again
        self._steps_since_join = _STEPS_BETWEEN_JOINS

    def forget(self) -> None:
        """Drop all keys and values, because the weights change or the memory is needed.

        Rows in the middle of a turn are read again and continue. Call this on the thread that runs
        the engine, or while none does.
        """
        self.prefix_cache.clear()
        self.cached_bytes = 0
        self._preempted += self.rows
        self.rows = []
        self.slab = Slab()

    def end_conversation(self, conversation: int) -> None:
        """Drop the cached turns of a conversation that has no further turn.

        May be called on any thread; takes effect before the next step.
        """
        self._ended_conversations.append(conversation)

    # ---- the engine's side ----

    @property
    def active_count(self) -> int:
        return len(self.rows) + len(self._preempted)

    def drop(self) -> list[SampleJob]:
        dropped = [row.job for row in (*self.rows, *self._preempted)]
        self.rows = []
        self._preempted = []
        return dropped

    @contextmanager
    def ready(self) -> Iterator[None]:
        with borrow_model(self._model_source) as model, attention_with_masks(model):
            check_runs(model)
            self.model = model
            self._slab_limit = self.max_batch_bytes
            self._max_length = context_length(model) or torch.iinfo(torch.long).max
            try:
                yield
            finally:
                del self.model

    def select_joining(self, waiting: list[SampleJob]) -> list[SampleJob]:
        if self.rows and self._steps_since_join < _STEPS_BETWEEN_JOINS:
            return []
        if self.rows and not self._fits(len(self.rows) + 1, self._width()):
            return []
        free_rows = self.max_batch_size - len(self.rows) - len(self._preempted)
        return waiting[: max(free_rows, 0)]

    def step(self, arrived: list[SampleJob]) -> None:
        """Sample at least one token for each row."""
        self._steps_since_join += 1

        # Drop ended conversations and cancelled requests.
        while self._ended_conversations:
            cached = self.prefix_cache.pop(self._ended_conversations.popleft(), None)
            if cached is not None:
                self.cached_bytes -= bytes_of(cached.layers)
        for number in reversed(range(len(self.rows))):
            if self.rows[number].job.cancelled:
                self._remove_row(number)

        # Let rows join, the preempted ones before new ones.
        joining = [*self._readmit_rows(), *map(_Row, arrived)]
        if joining:
            self._join(joining)
        self._preempt_rows()

        if self.rows:
            self._decode(max_guesses=min(_MAX_GUESSES, _MAX_PASS_TOKENS // len(self.rows) - 1))

    # ---- rows that join and leave ----

    def _join(self, rows: list[_Row]) -> None:
        """Read the contexts of rows that join, except the last token, and check their drafts."""
        self._steps_since_join = 0
        joining = [
            _JoiningRow(row, self._pop_cached(row), row.draft is not None and not row.ids)
            for row in rows
        ]

        # Rows with a draft come last. Cached and other rows are read in two passes: otherwise a
        # short rest would be padded to the width of a whole context.
        joining.sort(key=_JoiningRow.reading_order)
        for _, group in groupby(joining, key=_JoiningRow.reading_order):
            self._read(list(group))

        # Check the whole drafts in one pass.
        drafts = sum(joining_row.checks_draft for joining_row in joining)
        if drafts:
            max_guesses = max(row.limit for row in rows)
            self._decode(max_guesses, first_row=len(self.rows) - drafts)

    def _read(self, group: list[_JoiningRow]) -> None:
        """Append rows to the batch: write their cached keys and values, and compute the rest."""
        first_row = len(self.rows)
        contexts = [joining_row.row.context for joining_row in group]
        cached_lengths = [joining_row.cached_length for joining_row in group]
        width = max(map(len, contexts))
        for number, joining_row in enumerate(group, start=first_row):
            if joining_row.layers is not None:
                self.slab.write_row(
                    number, joining_row.layers, rows=first_row + len(group), width=width
                )

        # Compute the tokens after the cached ones, padded to the same length.
        new_tokens = [
            context[cached_length:-1]
            for context, cached_length in zip(contexts, cached_lengths, strict=True)
        ]
        max_new = max(map(len, new_tokens))
        if max_new:
            ids = torch.tensor([tokens + [0] * (max_new - len(tokens)) for tokens in new_tokens])
            columns = torch.tensor(cached_lengths).unsqueeze(1) + torch.arange(max_new)
            self._forward(ids, columns, first_row, needs_logits=False)
        self.stats["reused"] += sum(cached_lengths)
        self.stats["read"] += sum(map(len, contexts)) - sum(cached_lengths)
        self.rows += [joining_row.row for joining_row in group]

    def _pop_cached(self, row: _Row) -> Layers | None:
        """Take the cached keys and values of a row's conversation, if its context begins with them."""
        conversation = row.job.request.conversation
        if conversation is None or conversation not in self.prefix_cache:
            return None
        cached = self.prefix_cache.pop(conversation)
        self.cached_bytes -= bytes_of(cached.layers)
        context = row.context
        cached_length = len(cached.ids)
        if cached_length < len(context) and context[:cached_length] == cached.ids:
            return cached.layers
        return None

    def _remove_row(self, number: int) -> None:
        """Remove a row, and cache it if its turn is complete; the last row moves to its place."""
        row = self.rows[number]
        if row.is_done:
            self._cache_row(number)
        last_row = self.rows.pop()
        if last_row is not row:
            self.rows[number] = last_row
            self.slab.move_row(len(self.rows), number, last_row.length)

    def _cache_row(self, number: int) -> None:
        """Cache the keys and values of a row for its conversation's next turn, within the bound."""
        row = self.rows[number]
        conversation = row.job.request.conversation
        if conversation is None:
            return
        if self.slab.bytes(1, row.length) > self.prefix_cache_bytes:
            return
        self._pop_cached(row)  # of another turn of the conversation that ran at the same time
        cached = _CachedTurn(row.context[: row.length], self.slab.copy_row(number, row.length))
        self.prefix_cache[conversation] = cached
        self.cached_bytes += bytes_of(cached.layers)
        while self.cached_bytes > self.prefix_cache_bytes:
            oldest = self.prefix_cache.pop(next(iter(self.prefix_cache)))
            self.cached_bytes -= bytes_of(oldest.layers)

    def _readmit_rows(self) -> list[_Row]:
        """Return the preempted rows that fit again; at least one if the batch is empty."""
        waiting = [row for row in self._preempted if not row.job.cancelled]
        self._preempted = []
        rows = len(self.rows)
        # With a margin, so that no row is preempted again at once.
        width = self._width() + COLUMN_STEP
        for number, row in enumerate(waiting):
            width = max(width, len(row.context) + COLUMN_STEP)
            if rows and not self._fits(rows + 1, width):
                self._preempted = waiting[number:]
                return waiting[:number]
            rows += 1
        return waiting

    def _preempt_rows(self) -> None:
        """Take rows out of the batch, the last one first, until the next tokens fit into the
        memory.

        They keep the tokens that they have sampled, and wait to be read again.
        """
        while len(self.rows) > 1 and not self._fits(len(self.rows), self._width()):
            self._preempted.append(self.rows.pop())

    def _fits(self, rows: int, width: int) -> bool:
        """Return whether a slab of this size stays within its memory limit."""
        if self._slab_limit is None:
            self._slab_limit = self._measure_slab_limit()
        return self._slab_limit is None or self.slab.grown_bytes(rows, width) <= self._slab_limit

    def _measure_slab_limit(self) -> float | None:
        """Return half of the free memory of a GPU, in bytes; `None` for a CPU.

        Also `None` before the first pass, until when the size of a row is unknown.
        """
        device = self.model.device
        if device.type != "cuda" or not self.slab.layers:
            return None
        # Memory that torch has reserved and does not use is free as well.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return (free + unused) / 2

    def _width(self) -> int:
        return max((row.length for row in self.rows), default=0) + 1

    # ---- the next tokens ----

    def _decode(self, max_guesses: int, first_row: int = 0) -> None:
        """Sample the next token of rows `first_row`, ... and keep their right guesses."""
        rows = self.rows[first_row:]

        # With a repetition penalty, the scores depend on the guesses.
        if self.sampling.repetition_penalty == 1.0:
            guesses = [row.guess(max_guesses) for row in rows]
        else:
            guesses = [[] for _ in rows]

        # Read the last token and the guesses of each row, padded to the same length.
        width = max(map(len, guesses)) + 1
        inputs = []
        for row, guess in zip(rows, guesses, strict=True):
            padding = [0] * (width - 1 - len(guess))
            inputs.append([row.last_token, *guess, *padding])
        lengths = torch.tensor([row.length for row in rows])
        columns = lengths.unsqueeze(1) + torch.arange(width)
        logits = self._forward(torch.tensor(inputs), columns, first_row)

        tokens, logprobs = self._choose(rows, logits)
        for row, guess, row_tokens, row_logprobs in zip(
            rows, guesses, tokens, logprobs, strict=True
        ):
            appended = row.take(guess, row_tokens, row_logprobs, self.end)
            row.updates += [self.updates] * appended
            self.stats["tokens"] += appended
        self.stats["steps"] += 1
        self.stats["row_steps"] += len(rows)

        # Rows that are done leave, the last one first, because a row moves to each free place.
        for number in reversed(range(first_row, len(self.rows))):
            if self.rows[number].is_done:
                self._remove_row(number)
        self.finish((row.job, row.to_sample()) for row in rows if row.is_done)

    def _choose(
        self, rows: list[_Row], logits: torch.Tensor
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw a token for each place of each row with the row's own random numbers.

        Returns the tokens and their log-probabilities.
        """
        width = logits.shape[1]

        # The tokens that a repetition penalty counts; a row is padded with its first token.
        contexts = None
        if self.sampling.repetition_penalty != 1.0:
            row_contexts = [row.context for row in rows]
            max_length = max(map(len, row_contexts))
            padded = [
                [context[0]] * (max_length - len(context)) + context for context in row_contexts
            ]
            contexts = torch.tensor(padded, device=logits.device)

        uniform: list[float] = []
        greedy: list[bool] = []
        for row in rows:
            uniform += row.next_uniform(width)
            greedy += [row.job.request.greedy] * width
        tokens, logprobs = self.sampling.choose(
            logits.flatten(0, 1).float(),
            torch.tensor(uniform, dtype=torch.double),
            greedy,
            contexts,
        )

        # One transfer from the device for both. Ids are exact in float64.
        transferred = torch.stack([tokens.double(), logprobs.double()])
        token_rows, logprob_rows = transferred.unflatten(1, (len(rows), width)).tolist()
        return [list(map(int, token_row)) for token_row in token_rows], logprob_rows

    def _forward(
        self, ids: torch.Tensor, columns: torch.Tensor, first_row: int, needs_logits: bool = True
    ) -> torch.Tensor:
        """Run the model on tokens of rows `first_row`, ... and return their logits.

        Args:
            ids (`Tensor`): The tokens, of shape (rows, tokens).
            columns (`Tensor`): Their columns, of the same shape.
            first_row (`int`): The first of the rows.
            needs_logits (`bool`, *optional*, defaults to `True`): Whether to compute the logits of
                all these tokens, or of none.
        """
        model = self.model
        ids = ids.to(model.device)
        columns = columns.to(model.device)
        width = int(columns.max()) + 1
        self.slab.prepare(first_row, columns, rows=first_row + len(columns), width=width)
        # 0 stands for all tokens, an empty index for none. Any other number would give the head a
        # slice that is not contiguous. If the head needs no gradient, torch then copies it for
        # every row of the batch.
        logits_to_keep = 0 if needs_logits else torch.arange(0, device=model.device)
        return model(
            input_ids=ids,
            attention_mask=masks_of(model, columns, width),
            position_ids=columns.clamp(max=self._max_length - 1),  # padding may lie beyond
            past_key_values=self.slab,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits


def local_policy(
    model: PreTrainedModel | ModelProvider,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling = Sampling(),
    stop_texts: Sequence[str] = (),
    end_of_turn_ids: Sequence[int] | None = None,
    max_batch_size: int = 256,
    prefix_cache_mb: float = 1024.0,
    on_callers_thread: bool = False,
    architecture_of: PreTrainedModel | None = None,
) -> Engine[SampleRequest, Sample]:
    """Create the [`Policy`] for a model in this process.

    It is a [`TransformersEngine`] if that can run the model, else a [`BatchEngine`] over a
    [`TransformersSampler`]. The arguments not listed here are those of [`TransformersEngine`].

    Args:
        architecture_of (`PreTrainedModel`, *optional*): A model of the same architecture, needed if
            `model` is a function.
    """
    if can_slab(model if architecture_of is None else architecture_of):
        return TransformersEngine(
            model,
            tokenizer,
            sampling,
            stop_texts,
            end_of_turn_ids,
            max_batch_size,
            prefix_cache_mb=prefix_cache_mb,
            on_callers_thread=on_callers_thread,
        )
    sampler = TransformersSampler(model, tokenizer, sampling, stop_texts, end_of_turn_ids)
    return BatchEngine(sampler, max_batch_size, on_callers_thread)
