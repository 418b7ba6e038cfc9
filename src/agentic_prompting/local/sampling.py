"""How a token is drawn, and where a turn ends: the same for every way of running a transformers model here.

Each continuation has its own randomness. One uniform number per token is drawn from the request's seed and picks the
token by inverting the cumulative distribution, so a continuation does not depend on what else is in the batch or on how
often the model was called before. That is what lets rows join and leave as they like, and a resumed or replayed run
repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults change nothing: plain sampling from the model.

    Args:
        temperature (`float`, *optional*, defaults to `1.0`): 0 takes the likeliest token.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus; 1 is off.
        top_k (`int`, *optional*, defaults to `0`): Only the k likeliest; 0 is off.
        min_p (`float`, *optional*): Least probability relative to the likeliest; `None` is off.
        repetition_penalty (`float`, *optional*, defaults to `1.0`): As in transformers; 1 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @cached_property
    def processors(self) -> LogitsProcessorList:
        """The transformers processors that shape the distribution, in transformers' order."""
        processors = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature == 0:
            return processors
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors

    def choose(
        self, scores: torch.Tensor, uniform: torch.Tensor, greedy: Sequence[bool] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token per row, and its log-probability under the distribution it was drawn from.

        Args:
            scores (`Tensor`): Rows x vocabulary, shaped by `processors`.
            uniform (`Tensor`): A number in [0, 1) per row.
            greedy (`Sequence[bool]`, *optional*): Per row, whether to take the likeliest token instead.
        """
        # Double precision: over 150k tokens a float32 cumulative sum is off by more than a rare token's probability.
        probabilities = scores.double().softmax(-1)
        if self.temperature == 0:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            cumulative = probabilities.cumsum(-1)
            target = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
            if any(greedy):
                likeliest = scores.argmax(-1, keepdim=True)
                tokens = torch.where(torch.tensor(greedy, device=scores.device).unsqueeze(1), likeliest, tokens)
        return tokens.squeeze(1), probabilities.gather(1, tokens).log().squeeze(1)


class TurnEnd:
    """Where a turn ends: at an end-of-turn token, or right after a stop text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        end_ids (`Sequence[int]`): Tokens that end a turn.
        stop_texts (`Sequence[str]`, *optional*): Texts that do.

    Raises:
        `ValueError`: If no token does: a turn would always go on to its limit.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], stop_texts: Sequence[str] = ()):
        if not end_ids:
            raise ValueError("no end-of-turn token: set tokenizer.eos_token or pass end_of_turn_ids")
        self.tokenizer, self.end_ids, self.stop_texts = tokenizer, tuple(end_ids), tuple(stop_texts)
        self._may_stop = _tokens_that_may_stop(tokenizer, self.stop_texts)
        # Enough tokens to hold the longest stop text, however it is split: at worst, into single bytes.
        self._tail = max((len(text.encode()) for text in self.stop_texts), default=0) + 1

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the last of a turn's tokens ends it."""
        return ids[-1] in self.end_ids or (ids[-1] in self._may_stop and self._at_stop_text(ids[-self._tail :]))

    def _at_stop_text(self, tail: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        # The last token must complete the stop text, but may carry more after it (">\n" is one token in many
        # vocabularies).
        before = self.tokenizer.decode(tail[:-1], skip_special_tokens=False) if len(tail) > 1 else ""
        return any(text.count(stop) > before.count(stop) for stop in self.stop_texts)


def _tokens_that_may_stop(tokenizer: Any, stop_texts: Sequence[str]) -> frozenset[int]:
    """Which tokens can complete a stop text: those that hold its last character. Saves decoding at every step."""
    if not stop_texts:
        return frozenset()
    last_characters = {text[-1] for text in stop_texts}
    if not all(character.isascii() for character in last_characters):
        last_characters.add("\ufffd")  # its last byte may be a token, which decodes to this by itself
    pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=False)
    return frozenset(token for token, piece in enumerate(pieces) if any(c in piece for c in last_characters))


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that a model can read, prompt and response together; `None` where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def end_of_turn_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Every token id that ends a turn: the model's whole list (an end-of-turn token is often only there), and the
    tokenizer's end-of-sequence."""
    declared = model.generation_config.eos_token_id
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    return ids
