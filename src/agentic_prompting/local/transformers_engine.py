"""The policy in this process as an [`Engine`] with continuous batching: rows join and leave between two tokens.

The keys and values of all rows lie in one slab per layer. Each conversation has a row, and each token lies at the
column of its position: there is no padding on the left, and a row does not depend on its neighbours. When a turn ends,
its row is cut out and cached for the conversation's next turn, within a bound, and the last row moves to its place. A
row that joins brings its cached keys and values; the new part of its context is read in one pass together with those
of the other rows that join. The first decoding step reads the last token of the context, so joining samples nothing.

Each token is drawn with the request's own random numbers (`sampling.py`): it depends on the context and the seed alone,
up to the last bits of sums. So a pass can read guesses (`drafting.py`) along: a row keeps those guesses that are the
tokens it would have drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..rollout import BatchEngine, Engine, Job, Sample, SampleRequest
from .drafting import Draft
from .sampling import Lender, Sampling, TransformersSampler, TurnEnd, context_length, in_use
from .slab import (
    COLUMNS,
    Layers,
    Slab,
    attention_with_masks,
    bytes_of,
    can_slab,
    check_runs,
    masks_of,
)

_JOIN_EVERY = 4  # steps between two joins: reading a context takes about as long as a step
# Guesses of a row in one pass after the first, and tokens of all rows together. With fewer tokens the time of a pass is
# that of reading the weights, and guesses are cheap; with more it is that of arithmetic, and wrong guesses delay all.
_MAX_GUESSES, _MAX_PASS_TOKENS = 10, 64


@dataclass(eq=False)
class _Row:
    """A request in the batch, and the tokens that it has sampled so far."""

    job: Job[SampleRequest, Sample]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self):
        self.limit = self.job.request.max_new_tokens
        self.uniform = np.random.default_rng(self.job.request.seed).random(self.limit)
        self.draft = Draft(self.job.request.draft) if self.job.request.draft else None

    @property
    def context(self) -> list[int]:
        return self.job.request.context + self.ids

    @property
    def length(self) -> int:
        """The number of tokens that the model has read: all but the last."""
        return len(self.job.request.context) + len(self.ids) - 1

    @property
    def last(self) -> int:
        return self.ids[-1] if self.ids else self.job.request.context[-1]

    @property
    def done(self) -> bool:
        return self.finished or len(self.ids) >= self.limit

    def guess(self, most: int) -> list[int]:
        return (
            []
            if self.draft is None
            else self.draft.guess(self.ids, min(most, self.limit - len(self.ids) - 1))
        )

    def drawn(self, width: int) -> list[float]:
        """The random numbers of the next `width` tokens."""
        return [self.uniform[min(len(self.ids) + i, self.limit - 1)] for i in range(width)]

    def take(
        self, guesses: list[int], tokens: list[int], logprobs: list[float], end: TurnEnd
    ) -> int:
        """Append the guesses that equal the tokens drawn at their places, and the first drawn token after them; returns
        the number of tokens appended."""
        agreed = taken = 0
        while not self.done and agreed == taken <= len(guesses):
            self.ids.append(tokens[taken])
            self.logprobs.append(logprobs[taken])
            self.finished = end.reached(self.ids)
            agreed += taken < len(guesses) and tokens[taken] == guesses[taken]
            taken += 1
        if self.draft is not None:
            self.draft.learn(len(guesses), agreed, self.ids)
        return taken

    def sample(self) -> Sample:
        drafted = 0 if self.draft is None else self.draft.agreed
        return Sample(self.ids, self.logprobs, self.finished, drafted, self.updates)


class TransformersEngine(Engine[SampleRequest, Sample]):
    """A [`Policy`] over a transformers causal LM, with continuous batching.

    Args:
        model (`PreTrainedModel` or `Callable`): The model, or a function that returns a context manager with it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        sampling ([`Sampling`], *optional*): Temperature and the other sampling parameters.
        stop_texts (`Sequence[str]`, *optional*): A turn also ends right after one of these, so that an agent cannot
            write the observation itself.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn. Defaults to the model's generation config
            and the tokenizer's end-of-sequence.
        max_batch_size (`int`, *optional*, defaults to `256`): Rows in the batch at most; further requests wait.
        max_batch_mb (`float`, *optional*): Memory for keys and values of the rows in the batch, in MB (10^6 bytes). A
            row that does not fit waits, or is put back to wait with the tokens it has sampled. Defaults to half of the
            memory of a GPU that is free when the engine begins to run, and to no bound on a CPU.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values cached between the
            turns of a conversation, in MB; the oldest are dropped first. 0 caches none. A caller that changes the
            weights must call `forget`.
        on_callers_thread (`bool`, *optional*, defaults to `False`): As in [`Engine`].

    Attributes:
        stats (`dict[str, int]`): `steps` (of decoding), `row_steps` (summed over the rows of each step), `tokens`
            (sampled), `read` (tokens of contexts that were computed) and `reused` (those that were cached).

    Raises:
        `ValueError`: If no token ends a turn, or the engine cannot run this architecture (see [`can_slab`]).
    """

    def __init__(
        self,
        model: PreTrainedModel | Lender,
        tokenizer: Any,
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
        self._lent_model, self.sampling, self.max_batch_size = model, sampling, max_batch_size
        self.end = TurnEnd(model, tokenizer, stop_texts, end_of_turn_ids)
        self.max_batch_bytes = None if max_batch_mb is None else max_batch_mb * 1e6
        self.prefix_cache_bytes = prefix_cache_mb * 1e6
        self.rows: list[_Row] = []
        self.slab = Slab()
        self.kept: dict[
            int, tuple[list[int], Layers]
        ] = {}  # by conversation: its tokens, their keys and values
        self.kept_bytes = 0
        self.updates = (
            0  # number of weight updates, set by the trainer; a sample has it for each token
        )
        self.stats = dict.fromkeys(("steps", "row_steps", "tokens", "read", "reused"), 0)
        self._ended: deque[int] = deque()  # conversations that have no further turn
        self._put_back: list[_Row] = []  # rows in the middle of a turn that wait to be read again
        self._since_join = _JOIN_EVERY

    def forget(self) -> None:
        """Drop all keys and values, because the weights change or the memory is needed. Rows in the middle of a turn
        are read again and continue. Call this on the thread that runs the engine, or while none does."""
        self.kept.clear()
        self.kept_bytes = 0
        self._put_back += self.rows
        self.rows, self.slab = [], Slab()

    def end_conversation(self, conversation: int) -> None:
        """Drop what is kept of a conversation that has no further turn. For any thread; done before the next step."""
        self._ended.append(conversation)

    # --- the engine's side ---------------------------------------------------------------------------------------

    @property
    def at_work(self) -> int:
        return len(self.rows) + len(self._put_back)

    def drop(self) -> list[Job[SampleRequest, Sample]]:
        dropped = [row.job for row in (*self.rows, *self._put_back)]
        self.rows, self._put_back = [], []
        return dropped

    @contextmanager
    def ready(self) -> Iterator[None]:
        with in_use(self._lent_model) as model, attention_with_masks(model):
            check_runs(model)
            self._room = self.max_batch_bytes
            self.model, self._longest = model, context_length(model) or torch.iinfo(torch.long).max
            try:
                yield
            finally:
                del self.model

    def joins(self, waiting: list[Job[SampleRequest, Sample]]) -> list[Job[SampleRequest, Sample]]:
        if self.rows and self._since_join < _JOIN_EVERY:
            return []
        free = self.max_batch_size - len(self.rows) - len(self._put_back)
        if self.rows and not self._fits(len(self.rows) + 1, self._width()):
            free = 0
        return waiting[: max(free, 0)]

    def step(self, arrived: list[Job[SampleRequest, Sample]]) -> None:
        """Sample at least one token for each row."""
        self._since_join += 1
        while self._ended:
            if (kept := self.kept.pop(self._ended.popleft(), None)) is not None:
                self.kept_bytes -= bytes_of(kept[1])
        for number in reversed(range(len(self.rows))):
            if self.rows[number].job.cancelled:
                self._leave(number)
        joining = [*self._come_back(), *map(_Row, arrived)]
        if joining:
            self._join(joining)
        self._make_room()
        if self.rows:
            self._decode(most=min(_MAX_GUESSES, _MAX_PASS_TOKENS // len(self.rows) - 1))

    # --- rows that join and leave --------------------------------------------------------------------------------

    def _join(self, joining: list[_Row]) -> None:
        """Put the cached keys and values of each row in place, read the rest of its context but the last token, check
        the drafts."""
        self._since_join = 0
        entering = [
            (row, self._take_kept(row), row.draft is not None and not row.ids) for row in joining
        ]
        for drafted in (False, True):
            for resumed in (
                True,
                False,
            ):  # two passes: else a short rest is padded to the width of a whole context
                group = [
                    (row, kept)
                    for row, kept, d in entering
                    if (kept is not None, d) == (resumed, drafted)
                ]
                if group:
                    self._read(group)
        drafts = sum(drafted for _, _, drafted in entering)
        if drafts:
            self._decode(max(row.limit for row in joining), first=len(self.rows) - drafts)

    def _read(self, group: list[tuple[_Row, Layers | None]]) -> None:
        first, rows = len(self.rows), len(self.rows) + len(group)
        contexts = [row.context for row, _ in group]
        width = max(map(len, contexts))
        known = [0 if kept is None else kept[0][0].shape[1] for _, kept in group]
        for number, (_, kept) in enumerate(group, start=first):
            if kept is not None:
                self.slab.put(number, kept, rows, width)
        new = [context[have:-1] for context, have in zip(contexts, known, strict=True)]
        longest = max(map(len, new))
        if longest:
            ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new])
            self._forward(
                ids,
                torch.tensor(known).unsqueeze(1) + torch.arange(longest),
                first,
                needs_logits=False,
            )
        self.stats["reused"] += sum(known)
        self.stats["read"] += sum(map(len, contexts)) - sum(known)
        self.rows += [row for row, _ in group]

    def _take_kept(self, row: _Row) -> Layers | None:
        conversation, context = row.job.request.conversation, row.context
        if conversation is None or conversation not in self.kept:
            return None
        ids, layers = self.kept.pop(conversation)
        self.kept_bytes -= bytes_of(layers)
        return layers if len(ids) < len(context) and context[: len(ids)] == ids else None

    def _leave(self, number: int) -> None:
        """Cut a row out of the slab and cache it; the last row moves to its place."""
        row = self.rows[number]
        conversation = row.job.request.conversation
        if (
            row.done
            and conversation is not None
            and self.slab.bytes(1, row.length) <= self.prefix_cache_bytes
        ):
            self._take_kept(row)  # cached by another turn of it that ran at the same time
            layers = self.slab.cut(number, row.length)
            self.kept[conversation] = row.context[: row.length], layers
            self.kept_bytes += bytes_of(layers)
            while self.kept_bytes > self.prefix_cache_bytes:
                self.kept_bytes -= bytes_of(self.kept.pop(next(iter(self.kept)))[1])
        last = self.rows.pop()
        if last is not row:
            self.rows[number] = last
            self.slab.move(len(self.rows), number, last.length)

    def _come_back(self) -> list[_Row]:
        """The rows that were put back and fit again; at least one if the batch is empty."""
        waiting, self._put_back = [row for row in self._put_back if not row.job.cancelled], []
        rows, width = (
            len(self.rows),
            self._width() + COLUMNS,
        )  # so that it is not put back again at once
        for number, row in enumerate(waiting):
            width = max(width, len(row.context) + COLUMNS)
            if rows and not self._fits(rows + 1, width):
                self._put_back = waiting[number:]
                return waiting[:number]
            rows += 1
        return waiting

    def _make_room(self) -> None:
        """Put back rows, the last one first, until the next tokens fit into the memory."""
        while len(self.rows) > 1 and not self._fits(len(self.rows), self._width()):
            self._put_back.append(self.rows.pop())

    def _fits(self, rows: int, width: int) -> bool:
        if self._room is None:
            device = self.model.device
            if device.type != "cuda" or not self.slab.layers:
                return True
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            self._room = (torch.cuda.mem_get_info(device)[0] + unused) / 2
        return self.slab.grown_bytes(rows, width) <= self._room

    def _width(self) -> int:
        return max((row.length for row in self.rows), default=0) + 1

    # --- the next tokens -----------------------------------------------------------------------------------------

    def _decode(self, most: int, first: int = 0) -> None:
        """One pass over rows `first`, ...: sample the next token of each, and keep its right guesses, of `most`."""
        rows = self.rows[first:]
        can_guess = (
            self.sampling.repetition_penalty == 1.0
        )  # with a penalty, the scores depend on the guesses
        guesses = [row.guess(most) if can_guess else [] for row in rows]
        width = max(map(len, guesses)) + 1
        ids = torch.tensor(
            [
                [row.last, *guess, *[0] * (width - 1 - len(guess))]
                for row, guess in zip(rows, guesses, strict=True)
            ]
        )
        columns = torch.tensor([row.length for row in rows]).unsqueeze(1) + torch.arange(width)
        drawn = self._choose(rows, self._forward(ids, columns, first))
        for row, guess, tokens, logprobs in zip(rows, guesses, *drawn, strict=True):
            taken = row.take(guess, tokens, logprobs, self.end)
            row.updates += [self.updates] * taken
            self.stats["tokens"] += taken
        self.stats["steps"] += 1
        self.stats["row_steps"] += len(rows)
        for number in reversed(range(first, len(self.rows))):
            if self.rows[number].done:
                self._leave(number)
        self.finish((row.job, row.sample()) for row in rows if row.done)

    def _choose(
        self, rows: list[_Row], logits: torch.Tensor
    ) -> tuple[list[list[int]], list[list[float]]]:
        """A token for each place of each row, drawn with the row's own random numbers, and its log-probability."""
        width, contexts = logits.shape[1], None
        if self.sampling.repetition_penalty != 1.0:  # padded with the row's first token
            texts = [row.context for row in rows]
            longest = max(map(len, texts))
            contexts = torch.tensor(
                [[t[0]] * (longest - len(t)) + t for t in texts], device=logits.device
            )
        uniform = torch.tensor(
            [number for row in rows for number in row.drawn(width)], dtype=torch.double
        )
        tokens, logprobs = self.sampling.choose(
            logits.flatten(0, 1).float(),
            uniform,
            [row.job.request.greedy for row in rows for _ in range(width)],
            contexts,
        )
        both = (
            torch.stack([tokens.double(), logprobs.double()])
            .unflatten(1, (len(rows), width))
            .tolist()
        )  # one transfer
        return [[int(token) for token in row] for row in both[0]], both[1]

    def _forward(
        self, ids: torch.Tensor, columns: torch.Tensor, first: int, needs_logits: bool = True
    ) -> torch.Tensor:
        """Run the model on tokens of rows `first`, ... at their columns, and return the logits of all these tokens.

        The head gets all tokens (0), or none (an empty index). Any other number would give it a slice that is not
        contiguous. If the head needs no gradient, torch then copies it for every row of the batch.
        """
        model = self.model
        ids, columns = ids.to(model.device), columns.to(model.device)
        width = int(columns.max()) + 1
        self.slab.look(first, columns, first + len(columns), width)
        return model(
            input_ids=ids,
            attention_mask=masks_of(model, columns, width),
            position_ids=columns.clamp(max=self._longest - 1),  # padding may lie beyond
            past_key_values=self.slab,
            use_cache=True,
            logits_to_keep=0 if needs_logits else torch.arange(0, device=model.device),
        ).logits


def local_policy(
    model: PreTrainedModel | Lender,
    tokenizer: Any,
    sampling: Sampling = Sampling(),
    stop_texts: Sequence[str] = (),
    end_of_turn_ids: Sequence[int] | None = None,
    max_batch_size: int = 256,
    prefix_cache_mb: float = 1024.0,
    on_callers_thread: bool = False,
    like: PreTrainedModel | None = None,
) -> Engine[SampleRequest, Sample]:
    """The [`Policy`] for a model in this process: a [`TransformersEngine`] if it can run the model, else a
    [`BatchEngine`] over a [`TransformersSampler`].

    The arguments not listed here are those of [`TransformersEngine`].

    Args:
        like (`PreTrainedModel`, *optional*): A model of the same architecture, if `model` is a function.
    """
    if can_slab(like if like is not None else model):
        return TransformersEngine(
            model, tokenizer, sampling, stop_texts, end_of_turn_ids, max_batch_size,
            prefix_cache_mb=prefix_cache_mb, on_callers_thread=on_callers_thread,
        )  # fmt: skip
    sampler = TransformersSampler(model, tokenizer, sampling, stop_texts, end_of_turn_ids)
    return BatchEngine(sampler, max_batch_size, on_callers_thread)
