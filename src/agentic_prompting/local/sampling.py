"""Draws tokens and finds the end of a turn, for a transformers model in this process.

Also contains the simplest way to run such a model, a whole batch through `generate`.

Each turn has its own random numbers: the request's seed gives one uniform number per token, which
picks the token by inverting the cumulative distribution. A turn therefore does not depend on the
other rows of the batch or on earlier calls. So rows can join and leave at any token, and a resumed
run samples the same tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..rollout import Sample, SampleRequest

ModelProvider = Callable[[], AbstractContextManager[PreTrainedModel]]
"""A function that returns a context manager with a model.

A trainer unwraps the model and gathers its weights in it."""


_BLOCK_SIZE = 256  # tokens of the vocabulary in a block of the cumulative distribution


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters. The defaults sample from the model's own distribution.

    Args:
        temperature (`float`, *optional*, defaults to `1.0`): A larger value flattens the
            distribution; 0 takes the likeliest token.
        top_p (`float`, *optional*, defaults to `1.0`): Sample from the likeliest tokens whose
            probabilities sum to `top_p`; 1 turns it off.
        top_k (`int`, *optional*, defaults to `0`): Sample from the k likeliest tokens; 0 turns it
            off.
        min_p (`float`, *optional*): Drop tokens less probable than this share of the likeliest
            token's probability; `None` turns it off.
        repetition_penalty (`float`, *optional*, defaults to `1.0`): As in transformers; 1 turns it
            off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @cached_property
    def shaping(self) -> LogitsProcessorList:
        """Processors that make some tokens less likely or impossible, in transformers' order."""
        processors = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        # Truncation does not change the likeliest token.
        if self.temperature == 0:
            return processors
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors

    def choose(
        self,
        logits: torch.Tensor,
        uniform: torch.Tensor,
        greedy: Sequence[bool] = (),
        contexts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token per row; also returns its log-probability.

        The log-probability is that of the model's own distribution at this temperature. `top_k`,
        `top_p`, `min_p` and the repetition penalty shape the distribution that a token is drawn
        from, but not its log-probability. A trainer computes log-probabilities without them, so
        this way the importance ratio of a token is 1 under equal weights.

        Args:
            logits (`Tensor`): Rows x vocabulary, in float32.
            uniform (`Tensor`): A number in [0, 1) per row.
            greedy (`Sequence[bool]`, *optional*): Per row, whether to take the likeliest token
                instead.
            contexts (`Tensor`, *optional*): The tokens of each row so far, which a repetition
                penalty counts.
        """
        # Pick a token from the shaped scores.
        scores = logits if self.temperature in (0, 1) else logits / self.temperature
        shaped = self.shaping(contexts, scores)
        if self.temperature == 0:
            tokens = shaped.argmax(-1)
        else:
            tokens = _invert_cumulative(shaped, uniform)
            if any(greedy):
                is_greedy = torch.tensor(greedy, device=scores.device)
                tokens = torch.where(is_greedy, shaped.argmax(-1), tokens)

        # Its log-probability is that of the scores before shaping.
        logprobs = scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(-1)
        return tokens, logprobs


def _invert_cumulative(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token per row by inverting the cumulative distribution at a number in [0, 1).

    Over 150k tokens a float32 cumulative sum is off by more than a rare token's probability, and a
    double one over all of them takes longer than the rest of the draw. So the sums are double, over
    blocks of the vocabulary first, and then within the block that holds the token.
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    padding = -weights.shape[-1] % _BLOCK_SIZE
    blocks = torch.nn.functional.pad(weights, (0, padding)).unflatten(-1, (-1, _BLOCK_SIZE))

    # The block of each row's token, and where the target lies within the block.
    block_ends = blocks.sum(-1, dtype=torch.double).cumsum(-1)
    target = uniform.to(block_ends).unsqueeze(1) * block_ends[:, -1:]
    block = _first_beyond(block_ends, target)
    block_starts = torch.nn.functional.pad(block_ends, (1, 0))
    target = target - block_starts.gather(1, block)

    # The token within the block.
    in_block = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)]
    token = _first_beyond(in_block.double().cumsum(-1), target)
    return (block * _BLOCK_SIZE + token).squeeze(1)


def _first_beyond(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the index of the first sum of each row that is larger than the target.

    Rounding may have carried the target to the last sum, beyond which there is none.
    """
    below_last = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cumulative, torch.minimum(target, below_last), right=True)


class TurnEnd:
    """Recognises the end of a turn: an end-of-turn token, or the end of a stop text.

    Args:
        model (`PreTrainedModel` or `Callable`): The source of `end_ids` unless they are set.
        tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.
        stop_texts (`Sequence[str]`, *optional*): Texts that end a turn.
        end_ids (`Sequence[int]`, *optional*): Tokens that end a turn.

    Raises:
        `ValueError`: No token ends a turn: each turn would have `max_new_tokens` tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelProvider,
        tokenizer: PreTrainedTokenizerBase,
        stop_texts: Sequence[str] = (),
        end_ids: Sequence[int] | None = None,
    ):
        if end_ids is None and isinstance(model, torch.nn.Module):
            end_ids = end_of_turn_tokens(model, tokenizer)
        if not end_ids:
            raise ValueError(
                "no end-of-turn token: set tokenizer.eos_token or pass end_of_turn_ids"
            )
        self.tokenizer = tokenizer
        self.end_ids = tuple(end_ids)
        self.stop_texts = tuple(stop_texts)
        self._stop_candidates = _find_stop_candidates(tokenizer, self.stop_texts)
        # Enough tokens for the longest stop text, even if each of its bytes is a token.
        self._tail_length = max((len(text.encode()) for text in self.stop_texts), default=0) + 1

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the last token of a turn ends it."""
        if ids[-1] in self.end_ids:
            return True
        if ids[-1] not in self._stop_candidates:
            return False

        # The last token must complete the stop text, but may carry more after it (">\n" is one
        # token in many vocabularies).
        tail = ids[-self._tail_length :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        text_before = ""
        if len(tail) > 1:
            text_before = self.tokenizer.decode(tail[:-1], skip_special_tokens=False)
        return any(text.count(stop) > text_before.count(stop) for stop in self.stop_texts)


def _find_stop_candidates(
    tokenizer: PreTrainedTokenizerBase, stop_texts: Sequence[str]
) -> frozenset[int]:
    """Return the tokens that can complete a stop text: those that contain its last character.

    Other tokens need no decoding.
    """
    if not stop_texts:
        return frozenset()
    last_characters = {text[-1] for text in stop_texts}
    # The last byte of such a character may be a token, which decodes to the replacement character
    # alone.
    if not all(character.isascii() for character in last_characters):
        last_characters.add("\ufffd")
    single_tokens = [[token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(single_tokens, skip_special_tokens=False)
    return frozenset(
        token for token, text in enumerate(texts) if not last_characters.isdisjoint(text)
    )


def context_length(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model can read, prompt and response together.

    `None` if its configuration has no limit.
    """
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def end_of_turn_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every token id that ends a turn.

    These are the model's whole list (an end-of-turn token is often only there), and the tokenizer's
    end-of-sequence.
    """
    model_ids = model.generation_config.eos_token_id
    if model_ids is None:
        ids = []
    elif isinstance(model_ids, int):
        ids = [model_ids]
    else:
        ids = list(model_ids)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    return ids


@contextmanager
def borrow_model(model: PreTrainedModel | ModelProvider) -> Iterator[PreTrainedModel]:
    """Get the model in eval mode, without gradients and router logits; restore it afterwards."""
    provided_model = nullcontext(model) if isinstance(model, torch.nn.Module) else model()
    with provided_model as borrowed, torch.no_grad():
        was_training = borrowed.training
        config = borrowed.config.get_text_config()  # type: ignore[union-attr, operator]
        router_logits = getattr(config, "output_router_logits", None)
        borrowed.eval()
        # A mixture of experts would compute its auxiliary loss, which reads the mask as (rows,
        # tokens).
        if router_logits:
            config.output_router_logits = False
        try:
            yield borrowed
        finally:
            borrowed.train(was_training)
            if router_logits:
                config.output_router_logits = router_logits


class TransformersSampler:
    """A batch [`Sampler`] over `generate`, for models that [`TransformersEngine`] cannot run.

    [`BatchEngine`] makes a policy of it. A batch takes as long as its longest turn. The tokens of
    each row are the same as with [`TransformersEngine`], and so are the arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelProvider,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling = Sampling(),
        stop_texts: Sequence[str] = (),
        end_of_turn_ids: Sequence[int] | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.end = TurnEnd(model, tokenizer, stop_texts, end_of_turn_ids)
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None:
            self.pad_id = self.end.end_ids[0]

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        # A row is padded with its own first token, so that a repetition penalty counts only tokens
        # of the row.
        prompt_length = max(len(request.context) for request in requests)
        padded_contexts = []
        masks = []
        for request in requests:
            padding = prompt_length - len(request.context)
            padded_contexts.append([request.context[0]] * padding + request.context)
            masks.append([0] * padding + [1] * len(request.context))

        limits = [request.max_new_tokens for request in requests]
        row_ends = _RowEnds(self.end, limits, prompt_length)
        choice = _SeededChoice(self.sampling, requests, prompt_length)
        with borrow_model(self.model) as model:
            # The number 1, transformers' default, is a slice that is not contiguous. For a head
            # that needs no gradient torch then copies the head for every row of the batch.
            keep_last = {}
            if model._supports_logits_to_keep():
                keep_last["logits_to_keep"] = torch.tensor([-1], device=model.device)
            output = model.generate(
                input_ids=torch.tensor(padded_contexts, device=model.device),
                attention_mask=torch.tensor(masks, device=model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    do_sample=False,  # _SeededChoice leaves one token possible
                    pad_token_id=self.pad_id,
                    eos_token_id=list(self.end.end_ids),
                    bos_token_id=self.tokenizer.bos_token_id,
                    disable_compile=True,
                ),
                logits_processor=LogitsProcessorList([choice]),
                stopping_criteria=StoppingCriteriaList([row_ends]),
                # The weights are whole in this process. By default transformers would let all
                # processes of a sharded model generate as long as the longest, and hang after one
                # of them has finished.
                synced_gpus=False,
                **keep_last,
            )

        # Cut each row at its own end.
        samples = []
        logprobs = torch.stack(choice.logprobs, 1).tolist()
        for row, limit in enumerate(limits):
            is_finished = row_ends.lengths[row] > 0
            length = row_ends.lengths[row] if is_finished else limit
            tokens = output[row, prompt_length : prompt_length + length].tolist()
            samples.append(Sample(tokens, logprobs[row][:length], finished=is_finished))
        return samples


class _SeededChoice(LogitsProcessor):
    """Leaves each row only the token that its own random numbers draw.

    transformers' greedy search then picks this token. The log-probabilities of the tokens are kept.
    """

    def __init__(self, sampling: Sampling, requests: Sequence[SampleRequest], prompt_length: int):
        self.sampling = sampling
        self.prompt_length = prompt_length
        max_length = max(request.max_new_tokens for request in requests)
        # NumPy's generators, because one per row is cheap, and the same on every device.
        self.uniform = np.stack(
            [np.random.default_rng(request.seed).random(max_length) for request in requests]
        )
        self.greedy = [request.greedy for request in requests]
        self.logprobs: list[torch.Tensor] = []  # one tensor per step, one number per row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt_length
        uniform = torch.from_numpy(self.uniform[:, step]).to(scores.device)
        tokens, logprobs = self.sampling.choose(scores, uniform, self.greedy, input_ids)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)


class _RowEnds(StoppingCriteria):
    """Ends each row at its own end or limit, and records its length.

    The length cannot be read from the padding afterwards, because the padding token may also be
    sampled.

    Attributes:
        lengths (`list[int]`): The tokens of each finished row; 0 for a row that has not finished or
            met its limit.
    """

    def __init__(self, end: TurnEnd, limits: Sequence[int], prompt_length: int):
        self.end = end
        self.limits = list(limits)
        self.prompt_length = prompt_length
        self.lengths = [0] * len(self.limits)
        self._has_ended = [False] * len(self.limits)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if self._has_ended[row]:
                continue
            if self.end.reached(ids):
                self.lengths[row] = len(ids)
                self._has_ended[row] = True
            elif len(ids) >= self.limits[row]:
                self._has_ended[row] = True
        return torch.tensor(self._has_ended, device=input_ids.device)
