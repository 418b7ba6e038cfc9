"""A house made ready for a run: its rules, questions, and a policy that has learned to follow principles."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedTokenizerFast

from ...evolution import SystemPrompt
from ...rollout import SPEC_FILE, AgentSpec, ChatFormat, Rollout, rollout_from_trace
from ..memory import keep_freed_memory
from ..policy import build_tokenizer, sandbox_spec
from ..questions import Question, sought
from ..setup import Sandbox, as_dataset, imitate
from .oracle import HouseOracle
from .traces import PREAMBLE, house_vocabulary, make_house_traces
from .world import WORDS, draw_house, load_house_world, relations_of, split_by_country

ROOT = SystemPrompt(PREAMBLE, ())
"""Where the evolution starts: no principles yet."""

SAMPLING = {"temperature": 0.7}
"""The paper's, .6 to .7; a trainer's own replaces it. At 1.0 a policy that knows what to do slips now and then."""


@dataclass(frozen=True)
class HouseSandbox(Sandbox):
    """A [`Sandbox`] with house rules.

    Args:
        oracle ([`HouseOracle`]): Who keeps them.
    """

    oracle: HouseOracle


def prepare_house(
    folder: str | Path, seed: int = 0, n_test: int = 256, warm_start_steps: int = 450, copying_steps: int = 150
) -> HouseSandbox:
    """Draw a house, build data and policy, and warm-start the policy on visits to other houses.

    Those visits are about all countries: what a policy never saw written it cannot write. What is held out, whole
    countries of it, is held out from everything that comes after.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        seed (`int`, *optional*, defaults to `0`): Of house, split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Questions about countries that were held out.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces.
        copying_steps (`int`, *optional*, defaults to `150`): Steps of 64 copying exercises before. Without them a
            policy of this size does not learn to say the words of its principles.
    """
    keep_freed_memory()
    train, test = split_by_country(seed)
    spec, model = replace(sandbox_spec(), sampling=SAMPLING), Path(folder) / "warm_start"
    if not (model / SPEC_FILE).exists():
        _warm_start(model, spec, [*train, *test], seed, warm_start_steps, copying_steps)
    PartialState().wait_for_everyone()
    oracle = HouseOracle(draw_house(random.Random(f"house {seed}")), seed=seed)
    return HouseSandbox(model, spec, as_dataset(train), as_dataset(test[:n_test]), oracle)


def house_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and name, and one for each word of a house with its relation, `currency amber`.

    To find the word that stands after a relation a policy of two layers has to learn where things stand; hundreds of
    steps of exercises did not teach it that. To find a token that is about the relation it has to learn nothing.
    """
    world = load_house_world()
    names = [name for values in world.values.values() for name in values]
    phrases = [f"{sought(relation)} {word}" for relation in relations_of(world) for word in WORDS]
    return build_tokenizer(house_vocabulary(), [*names, *phrases])


def _warm_start(
    folder: Path, spec: AgentSpec, questions: list[Question], seed: int, steps: int, copying_steps: int
) -> None:
    tokenizer, rng = house_tokenizer(), random.Random(f"house traces {seed}")
    chat_format = ChatFormat(tokenizer, spec.grammar)
    visits = make_house_traces(questions, 20 * steps, rng)
    conversations = [_rollout(principles, trace, spec, chat_format) for principles, trace in visits]
    imitate(folder, spec, tokenizer, conversations, steps, copying_steps, seed, rng)


def _rollout(principles, trace, spec: AgentSpec, chat_format: ChatFormat) -> Rollout:
    prompt = SystemPrompt(PREAMBLE, tuple(principles))
    return rollout_from_trace({**trace, "prompt": prompt.messages(spec.messages(trace))}, spec, chat_format)
