"""The policy in this process as an [`Engine`]: rows join and leave the batch between two tokens.

Keys and values of the rows at work stand in one slab per layer, a row per conversation, each token at the column of its
position: no padding on the left, and a row's neighbours change nothing for it. A row that ends is cut out and kept for
its conversation's next turn, within a bound; the last row takes its place. A row that joins brings what is kept of it,
and what is new of its context is read in one pass together with that of the others that join. The last token of a
context is fed with the first decoding step, so that joining samples nothing.

Each token is chosen with the request's own random numbers (see `sampling.py`): what a row samples depends on its
context and its seed, up to the last bits of sums. So guesses (`drafting.py`) can be fed along: a row takes as many
tokens from a pass as its guesses agree with what it would have drawn.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..rollout import BatchEngine, Engine, Job, Sample, SampleRequest
from .drafting import Draft
from .sampling import Lender, Sampling, TransformersSampler, TurnEnd, context_length, in_use

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values per layer; of one row: heads x tokens x size."""

_ROWS, _COLUMNS = 16, 64  # a slab grows by so many, so that it does not grow at every token
_JOIN_EVERY = 4  # steps between two joins: reading a context costs about as much as a step
# Guesses of a row in one pass after the first, and tokens of all rows together. Below about this many tokens a pass is
# bound by reading the weights and guesses cost little; above it by arithmetic, and wrong ones cost everybody.
_MAX_GUESSES, _MAX_PASS_TOKENS = 10, 64


@dataclass(eq=False)
class _Row:
    """A request at work, and what it has sampled so far."""

    job: Job[SampleRequest, Sample]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self):
        self.limit = self.job.request.max_new_tokens
        self.uniform = np.random.default_rng(self.job.request.seed).random(self.limit)
        self.draft = Draft(self.job.request.draft)

    @property
    def context(self) -> list[int]:
        return self.job.request.context + self.ids

    @property
    def length(self) -> int:
        """Tokens that the model has read: all but the last."""
        return len(self.job.request.context) + len(self.ids) - 1

    @property
    def last(self) -> int:
        return self.ids[-1] if self.ids else self.job.request.context[-1]

    @property
    def done(self) -> bool:
        return self.finished or len(self.ids) >= self.limit

    def guess(self, most: int) -> list[int]:
        return self.draft.guess(self.ids, min(most, self.limit - len(self.ids) - 1)) if self.draft.ids else []

    def drawn(self, width: int) -> list[float]:
        """The random numbers of the next tokens."""
        return [self.uniform[min(len(self.ids) + i, self.limit - 1)] for i in range(width)]

    def take(self, guesses: list[int], tokens: list[int], logprobs: list[float], end: TurnEnd) -> int:
        """Keep the guesses that agree with the tokens drawn at their places, and the first drawn token after them.
        Returns how many tokens that are."""
        agreed = taken = 0
        while not self.done and agreed == taken <= len(guesses):
            self.ids.append(tokens[taken])
            self.logprobs.append(logprobs[taken])
            self.finished = end.reached(self.ids)
            agreed += taken < len(guesses) and tokens[taken] == guesses[taken]
            taken += 1
        if self.draft.ids:
            self.draft.learn(len(guesses), agreed, self.ids)
        return taken

    def sample(self) -> Sample:
        return Sample(self.ids, self.logprobs, self.finished, self.draft.agreed, self.updates)


class _Slab(Cache):
    """Keys and values of all rows at work, as the model's cache. `look` says what the next pass reads and writes."""

    def __init__(self) -> None:
        self.layers: Any = []  # of [keys, values], each rows x heads x columns x size

    def look(self, first: int, columns: torch.Tensor, rows: int, width: int) -> None:
        """Let the next pass write the tokens of rows `first`, ... at `columns` (rows x tokens) and read up to
        `width`."""
        self.rows = slice(first, first + len(columns))
        self.at = torch.arange(first, first + len(columns), device=columns.device).unsqueeze(1), columns
        self.needed = rows, width

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == len(self.layers):
            self.layers.append([keys.new_zeros(0, keys.shape[1], 0, t.shape[3]) for t in (keys, values)])
        layer, (rows, width) = self.layers[layer_idx], self.needed
        for side, new in enumerate((keys, values)):
            layer[side] = _at_least(layer[side], rows, width)
            layer[side][self.at[0], :, self.at[1]] = new.transpose(1, 2)
        return tuple(block[self.rows, :, :width] for block in layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.needed[1]

    def cut(self, row: int, length: int) -> Layers:
        """A copy of the first tokens of a row."""
        return [(keys[row, :, :length].clone(), values[row, :, :length].clone()) for keys, values in self.layers]

    def put(self, row: int, kept: Layers, rows: int, width: int) -> None:
        """Write what `cut` gave."""
        if not self.layers:
            self.layers = [[t.new_zeros(0, t.shape[0], 0, t.shape[2]) for t in layer] for layer in kept]
        for layer, blocks in zip(self.layers, kept, strict=True):
            for side, block in enumerate(blocks):
                layer[side] = _at_least(layer[side], rows, width)
                layer[side][row, :, : block.shape[1]] = block

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for block in layer:
                block[target, :, :length] = block[source, :, :length]

    def bytes(self, rows: int, width: int) -> float:
        """What so many rows and columns take; 0 before the first pass."""
        per_token = sum(
            block.shape[1] * block.shape[3] * block.element_size() for layer in self.layers for block in layer
        )
        return per_token * rows * width


def _at_least(block: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if rows <= block.shape[0] and columns <= block.shape[2]:
        return block
    rows, columns = max(block.shape[0], _up(rows, _ROWS)), max(block.shape[2], _up(columns, _COLUMNS))
    grown = block.new_zeros(rows, block.shape[1], columns, block.shape[3])
    grown[: block.shape[0], :, : block.shape[2]] = block
    return grown


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


class TransformersEngine(Engine[SampleRequest, Sample]):
    """A [`Policy`] over a transformers causal LM, with continuous batching.

    Args:
        model (`PreTrainedModel` or `Callable`): The model, or a function that returns a context manager giving it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        sampling ([`Sampling`], *optional*): Temperature and the like.
        stop_texts (`Sequence[str]`, *optional*): A turn also ends right after one of these, so that an agent cannot go
            on to write the reply itself.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn. Defaults to the model's generation config
            and the tokenizer's end-of-sequence.
        max_batch_size (`int`, *optional*, defaults to `256`): Rows at work at most; others wait.
        max_batch_mb (`float`, *optional*): Memory for keys and values of the rows at work, in MB (10^6 bytes). A row
            that would go beyond waits, or is put back to wait with what it has sampled. By default half of what is free
            on a GPU, without bound on a CPU.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values kept between the turns
            of conversations that are not at work, in MB; the one kept first goes first. 0 keeps none. Whoever changes
            the weights must call `forget`.
        on_callers_thread (`bool`, *optional*, defaults to `False`): As in [`Engine`].

    Attributes:
        stats (`dict[str, int]`): `steps` (of decoding), `row_steps` (the same counted for each row alone), `tokens`
            (sampled), `read` and `reused` (tokens of contexts computed, and not computed because they were kept).

    Raises:
        `ValueError`: If no token ends a turn.
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
        self._lent_model, self.sampling, self.max_batch_size = model, sampling, max_batch_size
        self.end = TurnEnd(model, tokenizer, stop_texts, end_of_turn_ids)
        self.max_batch_bytes = None if max_batch_mb is None else max_batch_mb * 1e6
        self.prefix_cache_bytes = prefix_cache_mb * 1e6
        self.rows: list[_Row] = []
        self.slab = _Slab()
        self.kept: dict[int, tuple[list[int], Layers]] = {}  # by conversation: tokens, and their keys and values
        self.kept_bytes = 0
        self.updates = 0  # of the weights so far, which a sample says of each token; for whoever changes them to set
        self.stats = dict.fromkeys(("steps", "row_steps", "tokens", "read", "reused"), 0)
        self._ended: deque[int] = deque()  # conversations of which nothing has to be kept any more
        self._put_back: list[_Row] = []  # rows in mid-turn that wait to be read again
        self._since_join = _JOIN_EVERY

    def forget(self) -> None:
        """Drop all keys and values: the weights change, or the memory is needed. Rows in mid-turn are read again and go
        on. To be called by the thread that works, or while none does."""
        self.kept.clear()
        self.kept_bytes = 0
        self._put_back += self.rows
        self.rows, self.slab = [], _Slab()

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
        with in_use(self._lent_model) as model, _attention_with_masks(model):
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
        """One token for each row."""
        self._since_join += 1
        while self._ended:
            if (kept := self.kept.pop(self._ended.popleft(), None)) is not None:
                self.kept_bytes -= _bytes(kept[1])
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
        """Bring what is kept of each row, and read the rest of its context but the last token. Then the drafts."""
        self._since_join = 0
        entering = [(row, self._take_kept(row), bool(row.draft.ids) and not row.ids) for row in joining]
        for drafted in (False, True):
            for resumed in (True, False):  # apart: else a short rest would be read at the width of a whole context
                group = [(row, kept) for row, kept, d in entering if (kept is not None, d) == (resumed, drafted)]
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
            self._forward(ids, torch.tensor(known).unsqueeze(1) + torch.arange(longest), first, keep=1)
        self.stats["reused"] += sum(known)
        self.stats["read"] += sum(map(len, contexts)) - sum(known)
        self.rows += [row for row, _ in group]

    def _take_kept(self, row: _Row) -> Layers | None:
        conversation, context = row.job.request.conversation, row.context
        if conversation is None or conversation not in self.kept:
            return None
        ids, layers = self.kept.pop(conversation)
        self.kept_bytes -= _bytes(layers)
        return layers if len(ids) < len(context) and context[: len(ids)] == ids else None

    def _leave(self, number: int) -> None:
        """Cut a row out; the last one takes its place."""
        row = self.rows[number]
        conversation = row.job.request.conversation
        if row.done and conversation is not None and self.slab.bytes(1, row.length) <= self.prefix_cache_bytes:
            self._take_kept(row)  # what another turn of it, asked for at the same time, has left
            layers = self.slab.cut(number, row.length)
            self.kept[conversation] = row.context[: row.length], layers
            self.kept_bytes += _bytes(layers)
            while self.kept_bytes > self.prefix_cache_bytes:
                self.kept_bytes -= _bytes(self.kept.pop(next(iter(self.kept)))[1])
        last = self.rows.pop()
        if last is not row:
            self.rows[number] = last
            self.slab.move(len(self.rows), number, last.length)

    def _come_back(self) -> list[_Row]:
        """Those of the rows put back that have a place again; at least one where nobody is at work."""
        waiting, self._put_back = [row for row in self._put_back if not row.job.cancelled], []
        rows, width = len(self.rows), self._width() + _COLUMNS  # so that it does not have to go again at once
        for number, row in enumerate(waiting):
            width = max(width, len(row.context) + _COLUMNS)
            if rows and not self._fits(rows + 1, width):
                self._put_back = waiting[number:]
                return waiting[:number]
            rows += 1
        return waiting

    def _make_room(self) -> None:
        """Put the row that joined last back to wait, as long as the next tokens do not fit into the memory."""
        while len(self.rows) > 1 and not self._fits(len(self.rows), self._width()):
            self._put_back.append(self.rows.pop())

    def _fits(self, rows: int, width: int) -> bool:
        if self.max_batch_bytes is None:
            if self.model.device.type != "cuda" or not self.slab.layers:
                return True
            self.max_batch_bytes = torch.cuda.mem_get_info(self.model.device)[0] / 2
        return self.slab.bytes(_up(rows, _ROWS), _up(width, _COLUMNS)) <= self.max_batch_bytes

    def _width(self) -> int:
        return max((row.length for row in self.rows), default=0) + 1

    # --- the next tokens -----------------------------------------------------------------------------------------

    def _decode(self, most: int, first: int = 0) -> None:
        """One pass over rows `first`, ...: each one's next token, and of `most` guesses as many as are right."""
        rows = self.rows[first:]
        can_guess = self.sampling.repetition_penalty == 1.0  # else each place has a context of its own
        guesses = [row.guess(most) if can_guess else [] for row in rows]
        width = max(map(len, guesses)) + 1
        ids = torch.tensor(
            [[row.last, *guess, *[0] * (width - 1 - len(guess))] for row, guess in zip(rows, guesses, strict=True)]
        )
        columns = torch.tensor([row.length for row in rows]).unsqueeze(1) + torch.arange(width)
        drawn = self._choose(rows, self._forward(ids, columns, first, keep=width))
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

    def _choose(self, rows: list[_Row], logits: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """A token for each place of each row, by the row's own random numbers, and their log-probabilities under what
        they were drawn from."""
        width, contexts = logits.shape[1], None
        if self.sampling.repetition_penalty != 1.0:  # which alone looks at them; padding counts as the first token
            texts = [row.context for row in rows]
            longest = max(map(len, texts))
            contexts = torch.tensor([[t[0]] * (longest - len(t)) + t for t in texts], device=logits.device)
        uniform = torch.tensor([number for row in rows for number in row.drawn(width)], dtype=torch.double)
        tokens, logprobs = self.sampling.choose(
            self.sampling.processors(contexts, logits.flatten(0, 1).float()),
            uniform,
            [row.job.request.greedy for row in rows for _ in range(width)],
        )
        both = torch.stack([tokens.double(), logprobs.double()]).unflatten(1, (len(rows), width)).tolist()  # one wait
        return [[int(token) for token in row] for row in both[0]], both[1]

    def _forward(self, ids: torch.Tensor, columns: torch.Tensor, first: int, keep: int) -> torch.Tensor:
        """Read tokens of rows `first`, ... at their columns. The logits of the last `keep` places."""
        model = self.model
        ids, columns = ids.to(model.device), columns.to(model.device)
        width = int(columns.max()) + 1
        self.slab.look(first, columns, first + len(columns), width)
        return model(
            input_ids=ids,
            attention_mask=_masks(model, columns, width),
            position_ids=columns.clamp(max=self._longest - 1),  # padding may stand beyond
            past_key_values=self.slab,
            use_cache=True,
            logits_to_keep=keep,
        ).logits


def _masks(model: PreTrainedModel, columns: torch.Tensor, width: int) -> Any:
    """What each token attends to: its own column and those before it. What stands behind is not written yet, or padding
    that will be overwritten. A mask for each kind of layer, where a model has several."""
    config = model.config.get_text_config()
    at = torch.arange(width, device=columns.device)
    full = (at <= columns.unsqueeze(-1)).unsqueeze(1)  # rows x 1 x tokens x columns
    masks = dict.fromkeys(_kinds(model), full)
    if "sliding_attention" in masks:
        masks["sliding_attention"] = full & (at > columns.unsqueeze(-1) - config.sliding_window).unsqueeze(1)
    if config._attn_implementation == "eager":  # which adds its mask
        masks = {
            kind: torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
            for kind, mask in masks.items()
        }
    return masks if getattr(config, "layer_types", None) and len(masks) > 1 else next(iter(masks.values()))


def _kinds(model: PreTrainedModel) -> set[str]:
    """The kinds of its layers; a model that names none has one kind."""
    config = model.config.get_text_config()
    one = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [one])


@contextmanager
def _attention_with_masks(model: PreTrainedModel) -> Iterator[None]:
    """Kernels without a mask of one's own (flash attention) cannot read rows side by side in a slab."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before not in ("sdpa", "eager"):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


def can_slab(model: PreTrainedModel) -> bool:
    """Whether [`TransformersEngine`] can run a model: all its state is keys and values, of layers that attend to
    everything or to a window, and it is told positions."""
    told = "position_ids" in inspect.signature(model.forward).parameters
    return not model._is_stateful and _kinds(model) <= {"full_attention", "sliding_attention"} and told


def _bytes(layers: Layers) -> int:
    return sum(tensor.nbytes for layer in layers for tensor in layer)


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
    """The [`Policy`] for a model in this process: a [`TransformersEngine`] where it can run it, else batches.

    The arguments that are not named are those of [`TransformersEngine`].

    Args:
        like (`PreTrainedModel`, *optional*): What kind of model it is, where `model` is a function.
    """
    if can_slab(like if like is not None else model):
        return TransformersEngine(
            model, tokenizer, sampling, stop_texts, end_of_turn_ids, max_batch_size,
            prefix_cache_mb=prefix_cache_mb, on_callers_thread=on_callers_thread,
        )  # fmt: skip
    sampler = TransformersSampler(model, tokenizer, sampling, stop_texts, end_of_turn_ids)
    return BatchEngine(sampler, max_batch_size, on_callers_thread)
