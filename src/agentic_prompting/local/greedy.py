"""Greedy decoding in which a guess at the output saves passes and never changes it.

A *draft* is what the output might be: in ProRefine, the output under the previous prompt. It is fed to the model at
once. Where the model's own likeliest tokens agree with it they are kept, the first that disagrees is replaced, and the
rest of the draft serves as a store of guesses: where the last tokens written occur in it, what follows there is guessed
next (prompt-lookup decoding, with the old output as the text to look up in), and where they do not, that something was
put in or left out and the draft goes on behind it. Every kept token was the likeliest one given all before it, so the
output is that of plain greedy decoding, token for token, in exact arithmetic and in float32 practice.

Rows of a batch proceed at their own pace: a pass takes each row's guesses, however many, and nobody waits. Rows may
join between passes, and leave when they are done. transformers' own assisted decoding takes one sequence at a time,
which is why this file exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values

# How many of the last tokens are looked up in the draft, longest first.
_LONGEST_MATCH, _SHORTEST_MATCH = 3, 2
# How far on in the draft a token counts as the same one, with something left out before it.
_NEAR = 4
# Guesses of a row in one pass after the first, and tokens of all rows together. Below about this many tokens a pass is
# bound by reading the weights and guesses cost little; above it by arithmetic, and wrong ones cost everybody.
_MAX_GUESSES, _MAX_PASS_TOKENS = 10, 64


@dataclass
class GreedyRow:
    """One sequence being decoded.

    Args:
        context (`list[int]`): The prompt's tokens, at least one.
        limit (`int`): At most this many new tokens, >= 1.
        draft (`list[int]`, *optional*): A guess at the output. Not changed once decoding has begun.
        keep_cache (`bool`, *optional*, defaults to `False`): Keep keys and values when done, to go on later.

    Attributes:
        ids (`list[int]`): The output so far; ends with the end-of-sequence token once there is one.
        finished (`bool`): Whether the end-of-sequence token was reached (`False`: cut off by `limit`).
        passes (`int`): Forward passes this row took part in.
        drafted (`int`): Output tokens that came from guesses.
        cache (`list[tuple[Tensor, Tensor]]`, *optional*): Per layer keys and values (heads x tokens x size) of all but
            the last token, once done with `keep_cache`.
    """

    context: list[int]
    limit: int
    draft: list[int] = field(default_factory=list)
    keep_cache: bool = False
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    passes: int = 0
    drafted: int = 0
    cache: Cache | None = field(default=None, repr=False)
    _places: dict[tuple[int, ...], list[int]] | None = field(default=None, init=False, repr=False)
    _at: int = field(default=0, init=False, repr=False)  # where in the draft the last guess began
    _next: int = field(default=0, init=False, repr=False)  # where in it the output would go on
    _failed: int = field(default=0, init=False, repr=False)  # guesses in a row of which nothing was right
    _quiet_until: int = field(default=0, init=False, repr=False)

    @property
    def done(self) -> bool:
        return self.finished or len(self.ids) >= self.limit

    def take(self, guesses: list[int], best: list[int], ends: frozenset[int]) -> int:
        """Keep the guesses that agree with the model's `best` tokens, and the first best token after them.

        Returns the number of guesses that are in the output now (their keys and values may stay cached).
        """
        self.passes += 1
        agreed = 0
        for token in best[: len(guesses) + 1]:
            if self.done:
                break
            self.ids.append(token)
            self.finished = token in ends
            if agreed == len(guesses) or token != guesses[agreed]:
                break
            agreed += 1
        self.drafted += agreed
        if guesses:
            self._failed = 0 if agreed else self._failed + 1
            self._quiet_until = len(self.ids) + (2 ** (self._failed - 1) - 1 if agreed == 0 else 0)
            self._next = self._at + agreed
        # The last token is the model's own. Found a little further on: what is between was left out. Else it is new.
        near = self.draft[self._next : self._next + _NEAR]
        self._next += near.index(self.ids[-1]) + 1 if self.ids[-1] in near else 0
        return agreed

    def guess(self, most: int) -> list[int]:
        """What may come next, at most `most` tokens of the draft.

        What follows the output's last tokens there, at the occurrence closest to where the output would go on; without
        one, what stands at that place. Wrong guesses are followed by ever longer silence.
        """
        room = min(most, self.limit - len(self.ids) - 1)
        if room <= 0 or len(self.ids) < self._quiet_until:
            return []
        if self._places is None:
            self._places = _places_of(self.draft)
        self._at = self._next
        for length in range(min(_LONGEST_MATCH, len(self.ids)), _SHORTEST_MATCH - 1, -1):
            found = self._places.get(tuple(self.ids[-length:]))
            if found:
                self._at = min(found, key=lambda place: abs(place - self._next))
                break
        return self.draft[self._at : self._at + room]


def _places_of(draft: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Where in `draft` each run of tokens that may be looked up is followed by something: the positions after it.

    Made once for a draft. Searching through it in each pass cost a tenth of the pass of a small model.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for length in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1):
        for end in range(length, len(draft)):
            places.setdefault(tuple(draft[end - length : end]), []).append(end)
    return places


class GreedyBatch:
    """A batch of rows on one model. `add` rows, `step` until there are none.

    Args:
        model (`PreTrainedModel`): A causal LM with ordinary attention (see [`can_draft`]).
        end_ids (`Sequence[int]`): End-of-sequence tokens.
        look_up (`bool`, *optional*, defaults to `True`): Use drafts beyond their first disagreement.

    Attributes:
        rows (`list[GreedyRow]`): Those being decoded.
        passes (`int`): Forward passes so far.
    """

    def __init__(self, model: PreTrainedModel, end_ids: Sequence[int], look_up: bool = True):
        self.model, self.ends, self.look_up = model, frozenset(end_ids), look_up
        self.rows: list[GreedyRow] = []
        self.passes = 0
        # Keys and values of all layers, right-aligned: every row's last cached token is the last column, and rows with
        # fewer have padding on the left. So distances in the cache are distances in the text, which sliding windows
        # rely on.
        self._cache: Cache = []
        self._lengths: list[int] = []  # cached tokens per row

    @torch.no_grad()
    def add(self, rows: Sequence[GreedyRow]) -> list[GreedyRow]:
        """Read the contexts, verify the drafts in the same pass, and let the rows join. Returns those already done."""
        guesses = [row.draft[: row.limit] for row in rows]
        texts = [row.context + guess for row, guess in zip(rows, guesses, strict=True)]
        lengths = [len(text) for text in texts]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=self.model.device)
        output = self._forward(ids, lengths, [0] * len(rows), DynamicCache(), keep=max(map(len, guesses)) + 1)
        kept = []
        for row, guess, best in zip(rows, guesses, output.logits.argmax(-1).tolist(), strict=True):
            agreed = row.take(guess, best[len(best) - len(guess) - 1 :], self.ends)
            kept.append(len(row.context) + agreed)
        new = _right_aligned(_tensors(output.past_key_values), [width] * len(rows), kept, lengths)
        self._join(list(rows), new, kept)
        return self._drop_done()

    @torch.no_grad()
    def resume(self, row: GreedyRow) -> None:
        """Let a row go on that was done with `keep_cache` and whose limit has been raised since. Costs no pass.

        Raises:
            `ValueError`: If the row has no cache, or is done.
        """
        if row.cache is None or row.done:
            raise ValueError("only a row with a cache and room for more tokens can go on")
        self._join([row], [(k.unsqueeze(0), v.unsqueeze(0)) for k, v in row.cache], [row.cache[0][0].shape[-2]])
        row.cache = None

    @torch.no_grad()
    def step(self) -> list[GreedyRow]:
        """One pass: every row's next token, and as many of its guesses as are right. Returns the rows that are done."""
        most = min(_MAX_GUESSES, _MAX_PASS_TOKENS // len(self.rows) - 1) if self.look_up else 0
        guesses = [row.guess(most) for row in self.rows]
        width = max(map(len, guesses)) + 1
        # Left-aligned: what pads a row with fewer guesses comes after them, where no token of the row can see it.
        chunk = [
            [row.ids[-1], *guess, *[0] * (width - 1 - len(guess))]
            for row, guess in zip(self.rows, guesses, strict=True)
        ]
        ids = torch.tensor(chunk, device=self.model.device)
        past = self._cache[0][0].shape[-2]
        output = self._forward(ids, [width] * len(self.rows), self._lengths, _as_cache(self._cache), keep=width)
        ends, kept = [], []
        for row, guess, best, length in zip(
            self.rows, guesses, output.logits.argmax(-1).tolist(), self._lengths, strict=True
        ):
            new = 1 + row.take(guess, best, self.ends)
            ends.append(past + new)
            kept.append(length + new)
        self._cache = _right_aligned(_tensors(output.past_key_values), ends, kept, kept)
        self._lengths = kept
        return self._drop_done()

    def _forward(self, ids: torch.Tensor, new: list[int], cached: list[int], cache: DynamicCache, keep: int) -> Any:
        """One pass over `ids` (rows x width), of which the last `new[i]` columns are row i's own and what is before
        them is padding. `cached[i]` tokens of row i are in the cache already."""
        self.passes += 1
        width, past = ids.shape[1], cache.get_seq_length()
        columns = torch.arange(past + width).unsqueeze(0)
        first = torch.tensor([past + width - n - c for n, c in zip(new, cached, strict=True)]).unsqueeze(1)
        mask = (columns >= first).long()
        positions = (columns - first).clamp(min=0)[:, past:]
        return self.model(
            input_ids=ids,
            attention_mask=mask.to(ids.device),
            position_ids=positions.to(ids.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )

    def _join(self, rows: list[GreedyRow], new: Cache, lengths: list[int]) -> None:
        if self.rows:
            width = max(self._cache[0][0].shape[-2], new[0][0].shape[-2])
            self._cache = [
                (torch.cat([_widen(k, width), _widen(nk, width)]), torch.cat([_widen(v, width), _widen(nv, width)]))
                for (k, v), (nk, nv) in zip(self._cache, new, strict=True)
            ]
        else:
            self._cache = new
        self.rows, self._lengths = self.rows + rows, self._lengths + lengths

    def _drop_done(self) -> list[GreedyRow]:
        staying = [i for i, row in enumerate(self.rows) if not row.done]
        done = [row for row in self.rows if row.done]
        for i, row in enumerate(self.rows):
            if row.done and row.keep_cache:
                row.cache = self._cache_of(i)
        if done:
            # Columns that only the leaving rows used go too.
            width = max((self._lengths[i] for i in staying), default=0)
            self._cache = [(k[staying][:, :, -width:], v[staying][:, :, -width:]) for k, v in self._cache]
            self.rows, self._lengths = [self.rows[i] for i in staying], [self._lengths[i] for i in staying]
        return done

    def _cache_of(self, i: int) -> Cache:
        """A copy of row i's keys and values, up to the token before its last: that one is read when it goes on."""
        row, length = self.rows[i], self._lengths[i]
        keep = len(row.context) + len(row.ids) - 1
        return [(k[i, :, -length:][:, :keep].clone(), v[i, :, -length:][:, :keep].clone()) for k, v in self._cache]


def greedy(
    model: PreTrainedModel, rows: Sequence[GreedyRow], end_ids: Sequence[int], look_up: bool = True
) -> GreedyBatch:
    """Decode `rows` together, in place. Returns the batch, for its count of passes."""
    batch = GreedyBatch(model, end_ids, look_up)
    batch.add(rows)
    while batch.rows:
        batch.step()
    return batch


def can_draft(model: PreTrainedModel) -> bool:
    """Whether the model's state is a cache of keys and values that tokens can be taken out of again. Recurrent layers
    (Mamba and the like) fold tokens into a state that cannot be undone."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return not model._is_stateful and kinds <= {"full_attention", "sliding_attention"}


def _right_aligned(cache: Cache, ends: list[int], kept: list[int], lengths: list[int]) -> Cache:
    """The cache with each row's tokens at the right edge.

    Args:
        cache: Per layer keys and values, rows x heads x columns x size.
        ends: Per row, the column behind its last token (of all `lengths[i]` tokens it has in the cache).
        kept: Per row, how many of its first tokens stay.
        lengths: Per row, how many tokens it has in the cache.
    """
    behind = [end - (length - keep) for end, keep, length in zip(ends, kept, lengths, strict=True)]
    width = max(kept)
    if len(set(behind)) == 1:  # all rows end at the same column: a cut, no copy of each row
        return [(k[:, :, behind[0] - width : behind[0]], v[:, :, behind[0] - width : behind[0]]) for k, v in cache]
    # Column t of the result comes from column t - width + behind[i]; padding may come from anywhere, it is masked.
    source = torch.arange(width).unsqueeze(0) - width + torch.tensor(behind).unsqueeze(1)
    source = source.clamp(min=0).to(cache[0][0].device)
    return [(_take_columns(k, source), _take_columns(v, source)) for k, v in cache]


def _take_columns(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    index = source[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)


def _widen(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[-2], 0))


def _tensors(cache: DynamicCache) -> Cache:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _as_cache(tensors: Cache) -> DynamicCache:
    # Without a config all layers keep everything: a cache that forgets what is outside of a window cannot give tokens
    # back. The mask still hides it.
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(tensors):
        cache.update(keys, values, layer)
    return cache
