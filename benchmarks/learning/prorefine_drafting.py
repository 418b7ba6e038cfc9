"""Part (a) of `prorefine.py`: ProRefine's loop with and without lossless drafting.

The models and the cases are in `prorefine_reciter.py`.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentic_prompting.llm import Message, Reply, ScriptedChat
from agentic_prompting.local import TransformersChat
from agentic_prompting.refine import ProRefiner, RefinementResult
from benchmarks.learning.prorefine_reciter import (
    FIRST_PROMPT,
    SCENARIOS,
    Case,
    context_ids,
    make_case,
)

TOKENS_PER_STEP = 10
"""k."""
TIE = 1e-4
"""Two logits closer than this may change their order with the shape of a forward pass."""


@dataclass(frozen=True)
class Run:
    """The results of some cases that were refined together.

    Args:
        results (`list[RefinementResult]`): One for each case.
        passes (`float`): The mean number of forward passes that a case needed for itself.
        wall (`float`), cpu (`float`): Seconds for all of them; CPU time counts this process alone,
            so other work on the machine disturbs it less.
        done_after (`dict[str, int]`): For each question, the batch's passes until its last prompt
            was requested.
    """

    results: list[RefinementResult]
    passes: float
    wall: float
    cpu: float
    done_after: dict[str, int]


class PromptsInOrder:
    """An optimizer that ignores the feedback and gives each case its next prompt.

    The critic of these runs names the question, which tells the cases apart.

    Attributes:
        passes (`dict[str, int]`): The chat's passes at the last call for each question.
    """

    def __init__(self, cases: Sequence[Case], chat: TransformersChat):
        self.chat = chat
        self.passes = dict[str, int]()
        self._next: dict[str, Iterator[str]] = {case.question: iter(case.prompts) for case in cases}

    async def __call__(self, messages: Sequence[Message], **_: Any) -> Reply:
        question = messages[-1]["content"].rsplit("\n", 1)[-1]
        self.passes[question] = self.chat.passes
        return Reply(text=f"<IMPROVED_PROMPT>{next(self._next[question])}</IMPROVED_PROMPT>")


def critic(messages: Sequence[Message]) -> str:
    return messages[-1]["content"].split("\n")[1]


def play(
    model: PreTrainedModel,
    tokens: PreTrainedTokenizerFast,
    cases: Sequence[Case],
    draft: bool = True,
    batch: int = 128,
) -> Run:
    """Refine all cases, at most `batch` at once, final answers included."""
    steps = len(cases[0].prompts)
    with TransformersChat(model, tokens, draft=draft, max_batch_size=batch) as chat:
        optimizer = PromptsInOrder(cases, chat)
        refiner = ProRefiner(
            chat,
            ScriptedChat(critic),
            optimizer,
            tokens_per_step=TOKENS_PER_STEP,
            max_steps=steps,
            final_max_tokens=steps * TOKENS_PER_STEP,
        )
        wall = time.perf_counter()
        cpu = time.process_time()
        results = refiner.refine_all(
            FIRST_PROMPT, [case.question for case in cases], batch, progress=False
        )
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
    return Run(results, chat.row_passes / len(cases), wall, cpu, optimizer.passes)


def outputs(result: RefinementResult) -> list[str]:
    return [*(step.output or "" for step in result.steps), result.answer]


def kept_share(results: Sequence[RefinementResult]) -> float:
    """The share of an output that the next output repeats in order, the most that a draft can save;
    mean over steps.
    """
    shares = []
    for result in results:
        texts = [text.split() for text in outputs(result)]
        for earlier, later in pairwise(texts):
            blocks = SequenceMatcher(None, earlier, later, autojunk=False).get_matching_blocks()
            shares.append(sum(block.size for block in blocks) / max(1, len(earlier)))
    return sum(shares) / max(1, len(shares))


def differences(
    model: PreTrainedModel,
    tokens: PreTrainedTokenizerFast,
    plain: Sequence[RefinementResult],
    drafted: Sequence[RefinementResult],
) -> dict[str, int]:
    """The counts of cases that are equal in every step, and of ties and mismatches among the
    others.
    """
    counts = {"cases": len(plain), "identical": 0, "ties": 0, "mismatches": 0}
    for ours, theirs in zip(drafted, plain, strict=True):
        if outputs(ours) == outputs(theirs):
            counts["identical"] += 1
        else:
            gap = _first_gap(model, tokens, ours, theirs)
            counts["ties" if gap < TIE else "mismatches"] += 1
    return counts


@torch.no_grad()
def _first_gap(
    model: PreTrainedModel,
    tokens: PreTrainedTokenizerFast,
    ours: RefinementResult,
    theirs: RefinementResult,
) -> float:
    """The distance of the two best logits at the first token in which two refinements differ."""
    prompts = [*(step.prompt for step in theirs.steps), theirs.prompt]
    for prompt, a, b in zip(prompts, outputs(ours), outputs(theirs), strict=True):
        if a != b:
            our_ids = tokens(a, add_special_tokens=False)["input_ids"]
            their_ids = tokens(b, add_special_tokens=False)["input_ids"]
            same = _common_length(our_ids, their_ids)
            ids = context_ids(tokens, prompt, theirs.query) + their_ids[:same]
            best = model(input_ids=torch.tensor([ids])).logits[0, -1].float().topk(2).values
            return float(best[0] - best[1])
    return float("inf")


def _common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The number of tokens at the beginning that two outputs share."""
    for length, (our_id, their_id) in enumerate(zip(ours, theirs, strict=False)):
        if our_id != their_id:
            return length
    return min(len(ours), len(theirs))


def speed(plain: Run, drafted: Run) -> dict[str, float]:
    """The ratios plain / drafted, and the share of an output that the next one repeats."""
    return {
        "speedup_passes": round(plain.passes / drafted.passes, 2),
        "speedup_wall": round(plain.wall / drafted.wall, 2),
        "speedup_cpu": round(plain.cpu / drafted.cpu, 2),
        "kept_share": round(kept_share(drafted.results), 3),
    }


def mixed_batch(
    model: PreTrainedModel, tokens: PreTrainedTokenizerFast, steps: int
) -> dict[str, Any]:
    """One case of each scenario in one batch, to see whether a case that needs few passes waits for
    the others.

    Returns the passes of the whole batch until each scenario was done, beside the passes that it
    takes alone.
    """
    cases = {
        scenario: make_case(scenario, steps, random.Random(scenario)) for scenario in SCENARIOS
    }
    together = play(model, tokens, list(cases.values()))
    passes_until_done = {}
    passes_alone = {}
    for scenario, case in cases.items():
        passes_until_done[scenario] = together.done_after[case.question]
        passes_alone[scenario] = play(model, tokens, [case]).done_after[case.question]
    return {
        "steps": steps,
        "passes_until_done": passes_until_done,
        "passes_alone": passes_alone,
    }


def lower_precision(
    model: PreTrainedModel, tokens: PreTrainedTokenizerFast, cases: Sequence[Case]
) -> dict[str, Any]:
    """The number of cases that differ in bfloat16: drafted from plain, and plain in a batch from
    plain alone.

    The second difference comes from the choice of a batch size, without any drafting.
    """
    half = copy.deepcopy(model).to(torch.bfloat16)
    plain, drafted = (play(half, tokens, cases, draft=draft).results for draft in (False, True))
    alone = play(half, tokens, cases, draft=False, batch=1).results
    return {
        "cases": len(cases),
        "steps": len(cases[0].prompts),
        "drafted_differs_from_plain": _count_differing(drafted, plain),
        "plain_batch_differs_from_plain_alone": _count_differing(plain, alone),
    }


def _count_differing(
    results: Sequence[RefinementResult], other_results: Sequence[RefinementResult]
) -> int:
    pairs = zip(results, other_results, strict=True)
    return sum(outputs(result) != outputs(other_result) for result, other_result in pairs)
