"""A whole batch through transformers' `generate`: for models whose state is more than keys and values.

Recurrent layers (Mamba and the like) keep no tokens that a row could join or leave with, so their turns are sampled
batch by batch, each as long as its longest; [`BatchEngine`] makes a policy of it. Every other model runs in
[`TransformersEngine`].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..rollout import Sample, SampleRequest
from .sampling import Sampling, TurnEnd, end_of_turn_tokens


class TransformersSampler:
    """Samples turns from a transformers causal LM, a batch at a time. Each row's tokens are those of
    [`TransformersEngine`], and the arguments are, too.
    """

    def __init__(
        self,
        model: PreTrainedModel | Callable[[], AbstractContextManager[PreTrainedModel]],
        tokenizer: Any,
        sampling: Sampling = Sampling(),
        stop_texts: Sequence[str] = (),
        end_of_turn_ids: Sequence[int] | None = None,
    ):
        if isinstance(model, torch.nn.Module):
            self._model: Callable[[], AbstractContextManager[PreTrainedModel]] = partial(nullcontext, model)
            end_of_turn_ids = end_of_turn_tokens(model, tokenizer) if end_of_turn_ids is None else end_of_turn_ids
        else:
            self._model = model
        self.tokenizer, self.sampling = tokenizer, sampling
        self.end = TurnEnd(tokenizer, end_of_turn_ids or (), stop_texts)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end.end_ids[0]

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        with self._model() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                return self._generate(model, requests)
            finally:
                model.train(was_training)

    def _generate(self, model: PreTrainedModel, requests: Sequence[SampleRequest]) -> list[Sample]:
        width = max(len(request.context) for request in requests)
        # What stands in a padded column is the row's own first token, so that a repetition penalty counts nothing that
        # the row does not hold.
        ids = torch.tensor([[r.context[0]] * (width - len(r.context)) + r.context for r in requests])
        mask = torch.tensor([[0] * (width - len(r.context)) + [1] * len(r.context) for r in requests])
        ends = _RowEnds(self.end, [request.max_new_tokens for request in requests], width)
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=GenerationConfig(
                max_new_tokens=max(ends.limits),
                do_sample=False,  # the choice is _SeededChoice's, which leaves one token possible
                pad_token_id=self.pad_id,
                eos_token_id=list(self.end.end_ids),
                bos_token_id=self.tokenizer.bos_token_id,
                disable_compile=True,
            ),
            logits_processor=[*self.sampling.processors, _SeededChoice(self.sampling, requests, width)],
            stopping_criteria=StoppingCriteriaList([ends]),
            # The weights are whole in this process: nothing to keep in step for. Else transformers would have all
            # processes of a sharded model generate as long as the longest, and hang where one has finished.
            synced_gpus=False,
        )
        return [
            Sample(row[: length or request.max_new_tokens], finished=bool(length))
            for request, row, length in zip(requests, output[:, width:].tolist(), ends.lengths, strict=True)
        ]


class _SeededChoice(LogitsProcessor):
    """Leaves each row the token that its own random numbers draw, for the greedy search behind it to pick."""

    def __init__(self, sampling: Sampling, requests: Sequence[SampleRequest], prompt_length: int):
        self.sampling, self.prompt_length = sampling, prompt_length
        most = max(request.max_new_tokens for request in requests)
        # NumPy's generators, because one per row is cheap, and the same on every device.
        self.uniform = np.stack([np.random.default_rng(request.seed).random(most) for request in requests])
        self.greedy = [request.greedy for request in requests]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = torch.from_numpy(self.uniform[:, input_ids.shape[1] - self.prompt_length])
        tokens, _ = self.sampling.choose(scores, drawn.to(scores.device), self.greedy)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)


class _RowEnds(StoppingCriteria):
    """Ends each row at its own end or limit, and remembers where. Reading the length off the padding afterwards would
    go wrong where the padding token is also a real one."""

    def __init__(self, end: TurnEnd, limits: Sequence[int], prompt_length: int):
        self.end, self.limits, self.prompt_length = end, list(limits), prompt_length
        self.lengths = [0] * len(self.limits)  # where a row finished; 0: not, or by its limit
        self.ended = [False] * len(self.limits)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if not self.ended[row] and self.end.reached(ids):
                self.lengths[row] = len(ids)
            self.ended[row] = self.ended[row] or bool(self.lengths[row]) or len(ids) >= self.limits[row]
        return torch.tensor(self.ended, device=input_ids.device)
