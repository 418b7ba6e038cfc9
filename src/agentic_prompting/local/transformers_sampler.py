"""The policy in this process: a transformers model as a [`Sampler`].

Each continuation has its own randomness. One uniform number per token is drawn from the request's seed and picks the
token by inverting the cumulative distribution, so a continuation does not depend on what else is in the batch or on
how often the model was called before. That is what lets the event-driven loop batch whatever is ready, and a resumed
or replayed run repeat itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..rollout import Sample, SampleRequest
from .prefix_cache import Layout, Prefix, PrefixCache, can_reuse, layers_of, read


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

    def warpers(self) -> list[LogitsProcessor]:
        """The transformers processors that shape the distribution, in transformers' order."""
        if self.temperature == 0:
            return []
        warpers: list[LogitsProcessor] = []
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


class TransformersSampler:
    """Samples turns from a transformers causal LM.

    Args:
        model (`PreTrainedModel` or `Callable`):
            The model, or a function that returns a context manager giving it (a trainer unwraps and gathers its
            weights that way).
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        sampling ([`Sampling`], *optional*):
            Temperature and the like.
        stop_texts (`Sequence[str]`, *optional*):
            A turn also ends right after one of these, so that an agent cannot go on to write the reply itself.
        end_of_turn_ids (`Sequence[int]`, *optional*):
            Tokens that end a turn. Defaults to the model's generation config and the tokenizer's end-of-sequence.
        max_batch_size (`int`, *optional*):
            Sample at most this many at once; more go in several calls. `None`: all together.
        prefix_cache_mb (`float`, *optional*, defaults to `0.0`):
            Keep keys and values of up to so many MB between the turns of a conversation, so that a turn reads only
            what is new. Whoever changes the weights must call `forget` then. Not used for models with sliding windows
            or recurrent layers.
    """

    def __init__(
        self,
        model: PreTrainedModel | Callable[[], AbstractContextManager[PreTrainedModel]],
        tokenizer: Any,
        sampling: Sampling = Sampling(),
        stop_texts: Sequence[str] = (),
        end_of_turn_ids: Sequence[int] | None = None,
        max_batch_size: int | None = None,
        prefix_cache_mb: float = 0.0,
    ):
        self.tokenizer, self.sampling, self.stop_texts = tokenizer, sampling, tuple(stop_texts)
        self.max_batch_size, self.prefixes = max_batch_size, PrefixCache(prefix_cache_mb)
        if isinstance(model, torch.nn.Module):
            self._unwrapped: Callable[[], AbstractContextManager] = partial(nullcontext, model)
            if end_of_turn_ids is None:
                end_of_turn_ids = end_of_turn_tokens(model, tokenizer)
        else:
            self._unwrapped = model
        if not end_of_turn_ids:
            raise ValueError("no end-of-turn token: set tokenizer.eos_token or pass end_of_turn_ids")
        self.end_of_turn_ids = list(end_of_turn_ids)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_of_turn_ids[0]
        self._may_stop = _tokens_that_may_stop(tokenizer, self.stop_texts)

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        size = self.max_batch_size or max(len(requests), 1)
        samples: list[Sample] = []
        with self._unwrapped() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                for start in range(0, len(requests), size):
                    samples += self._generate(model, requests[start : start + size])
            finally:
                model.train(was_training)
        return samples

    def forget(self) -> None:
        """Drop what was kept between turns: the weights change, or the conversations are over."""
        self.prefixes.clear()

    def _generate(self, model: PreTrainedModel, requests: Sequence[SampleRequest]) -> list[Sample]:
        reuses = self.prefixes.max_bytes > 0 and can_reuse(model)
        known = self._known(model, requests) if reuses else [None] * len(requests)
        layout = Layout.of(requests, known, model.device)
        width = layout.ids.shape[1]
        end = TurnEnd(
            requests,
            width,
            self.end_of_turn_ids,
            self.stop_texts,
            self._may_stop,
            self.tokenizer,
        )
        processors = LogitsProcessorList()
        if self.sampling.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(self.sampling.repetition_penalty))
        processors += self.sampling.warpers()
        if self.sampling.temperature > 0:
            processors.append(SeededChoice(requests, width))
        output = model.generate(
            input_ids=layout.ids,
            attention_mask=layout.mask,
            generation_config=self._config(max(request.max_new_tokens for request in requests)),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([end]),
            # The weights are whole in this process: nothing to keep in step for. Else transformers would have all
            # processes of a sharded model generate as long as the longest, and hang where one has finished.
            synced_gpus=False,
            **({"past_key_values": layout.cache} if layout.cache is not None else {}),
        )
        samples = [
            Sample(ids[:length], finished=finished)
            for ids, (length, finished) in zip(output.sequences[:, width:].tolist(), end.ends(), strict=True)
        ]
        if reuses:
            layers = layers_of(output.past_key_values)
            for row, (request, sample) in enumerate(zip(requests, samples, strict=True)):
                if self.prefixes.wants(request):
                    self.prefixes.keep(request, layout.prefix_of(row, request, sample.ids, layers))
        return samples

    def _known(self, model: PreTrainedModel, requests: Sequence[SampleRequest]) -> list[Prefix | None]:
        """What is kept of each request's conversation. Where only some have something kept, the others' contexts are
        read first, by themselves: else every row would be as wide as the longest of those."""
        known = [self.prefixes.take(request) for request in requests]
        fresh = [row for row, prefix in enumerate(known) if prefix is None and len(requests[row].context) > 1]
        if any(prefix is not None for prefix in known) and fresh:
            for row, prefix in zip(fresh, read([requests[row].context[:-1] for row in fresh], model), strict=True):
                known[row] = prefix
        return known

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        # `do_sample=False`: the choice is made by SeededChoice, which leaves one token possible.
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.pad_id,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.end_of_turn_ids,
            disable_compile=True,
            return_dict_in_generate=True,
        )


class SeededChoice(LogitsProcessor):
    """Draws each row's token with that row's own random numbers, by inverting the cumulative distribution.

    Leaves the drawn token at 0 and everything else at -inf, for the greedy search behind it to pick.
    """

    def __init__(self, requests: Sequence[SampleRequest], prompt_length: int):
        self.prompt_length = prompt_length
        most = max(request.max_new_tokens for request in requests)
        # NumPy's generators, because one per row is cheap, and the same on every device.
        self.uniform = np.stack([np.random.default_rng(request.seed).random(most) for request in requests])
        self.greedy = torch.tensor([[request.greedy] for request in requests])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = torch.from_numpy(self.uniform[:, input_ids.shape[1] - self.prompt_length]).to(scores.device)
        # Double precision: over 150k tokens a float32 cumulative sum is off by more than a rare token's probability.
        cumulative = scores.double().softmax(-1).cumsum(-1)
        target = drawn.unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
        tokens = torch.where(self.greedy.to(scores.device), scores.argmax(-1, keepdim=True), tokens)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


class TurnEnd(StoppingCriteria):
    """Ends each row at its end-of-turn token, its stop text, its own token limit or when it was left; remembers where.

    Remembering is the point: reading the length off the padding afterwards goes wrong where the padding token is also
    a real one.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        prompt_length: int,
        end_ids: Sequence[int],
        stop_texts: Sequence[str],
        may_stop: torch.Tensor | None,
        tokenizer: Any,
    ):
        self.limits, self.prompt_length = torch.tensor([request.max_new_tokens for request in requests]), prompt_length
        self.left = [(row, request.left) for row, request in enumerate(requests) if request.left is not None]
        self.end_ids, self.stop_texts = torch.tensor(list(end_ids)), stop_texts
        self.may_stop, self.tokenizer = may_stop, tokenizer
        self.length = torch.zeros(len(requests), dtype=torch.long)  # where a row ended; 0: not yet
        self.finished = torch.zeros(len(requests), dtype=torch.bool)  # by itself, that is
        self.ended = torch.zeros(len(requests), dtype=torch.bool)
        # Enough tokens to hold the longest stop text, however it is split: at worst, into single bytes.
        self.tail = max((len(text.encode()) for text in stop_texts), default=0) + 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        length = input_ids.shape[1] - self.prompt_length
        last = input_ids[:, -1].cpu()
        finished = torch.isin(last, self.end_ids)
        if self.may_stop is not None:
            # A model may have more rows than the tokenizer has tokens; the last entry stands for all of those.
            candidates = self.may_stop[last.clamp(max=len(self.may_stop) - 1)]
            for row in (candidates & ~finished & ~self.ended).nonzero().flatten().tolist():
                finished[row] = self._at_stop_text(input_ids[row, -min(self.tail, length) :].tolist())
        left = [row for row, was_left in self.left if was_left()]
        over = finished | (self.limits <= length)
        over[left] = True
        newly = over & ~self.ended
        self.length[newly] = length
        self.finished |= finished & newly
        self.ended |= over
        return self.ended.to(input_ids.device)

    def ends(self) -> list[tuple[int, bool]]:
        """Per row: its number of tokens, and whether it came to its natural end."""
        return list(zip(self.length.tolist(), self.finished.tolist(), strict=True))

    def _at_stop_text(self, tail: list[int]) -> bool:
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        # The last token must complete the stop text, but may carry more after it (">\n" is one token in many
        # vocabularies).
        before = self.tokenizer.decode(tail[:-1], skip_special_tokens=False) if len(tail) > 1 else ""
        return any(text.count(stop) > before.count(stop) for stop in self.stop_texts)


def _tokens_that_may_stop(tokenizer: Any, stop_texts: Sequence[str]) -> torch.Tensor | None:
    """Which tokens can complete a stop text: those that hold its last character. Saves decoding at every step."""
    if not stop_texts:
        return None
    last_characters = {text[-1] for text in stop_texts}
    if not all(character.isascii() for character in last_characters):
        last_characters.add("\ufffd")  # its last byte may be a token, which decodes to this by itself
    pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=False)
    return torch.tensor([*(any(c in piece for c in last_characters) for piece in pieces), False])


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
