"""Prepares a run in the sandbox or the guarded world: data, oracle and a warm-started policy.

Results hold for the sandbox only: a policy of 390,000 parameters in a world of 150 countries. The
code that runs is the real one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from datasets import Dataset
from huggingface_hub import constants
from transformers import PreTrainedTokenizerFast

from ..agent import PromptAgent
from ..evolution import SystemPrompt
from ..llm import Message, Reply, ServerFailed, Usage
from ..rollout import AgentSpec, Rollout, TagGrammar, Turn, play, rollout_seed, transcript
from .guarded import (
    ENDS_GUARDED,
    MIXES,
    PREAMBLE,
    WORDS,
    GuardedOracle,
    draw_rules,
    guarded_vocabulary,
    load_guarded_world,
    make_guarded_traces,
    relations_of,
    say,
    split_by_country,
)
from .policy import build_tokenizer, sandbox_spec, world_tokenizer
from .recipe import SHIPPED, Recipe, load_shipped, make_policy, ship, warm_started
from .traces import DEFAULT_MIX, Trace, make_traces
from .world import Oracle, Question, as_rows, load_world, make_split, sought, world_of


@dataclass(frozen=True)
class SandboxRun:
    """The parts of a run in the sandbox.

    Args:
        model (`Path`): Folder of the warm-started policy.
        spec ([`AgentSpec`]): The policy's prompt, grammar and limits.
        train (`Dataset`): Questions to train on: `question`, `answers`, ...
        test (`Dataset`): Held-out questions, disjoint from `train`.
    """

    model: Path
    spec: AgentSpec
    train: Dataset
    test: Dataset


def prepare_sandbox(
    folder: str | Path,
    seed: int = 0,
    n_test: int = 256,
    warm_start_steps: int = 450,
    by: Literal["country", "question"] = "country",
) -> SandboxRun:
    """Build data and policy, and warm-start the policy on traces of mixed quality.

    Whole countries are held out: no question, fact or name of a held-out country is in a training
    question or a trace. Their names occur in copying exercises, which state no fact, because a
    policy cannot write a word it never saw.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is
            used again.
        seed (`int`, *optional*, defaults to `0`): Decides split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces,
            after half as many of 64 copying exercises.
        by (`str`, *optional*, defaults to `"country"`): The kind of split; see [`make_split`].
    """
    no_telemetry()
    # The warm start sees the training questions only.
    train, test = make_split(seed, n_test, by=by)
    recipe = sandbox_recipe(train, seed, warm_start_steps)
    return SandboxRun(
        model=warm_started(folder, recipe),
        spec=recipe.spec,
        train=as_dataset(train),
        test=as_dataset(test),
    )


def sandbox_recipe(train: Sequence[Question], seed: int, warm_start_steps: int = 450) -> Recipe:
    """Return the warm start of [`prepare_sandbox`] on these questions."""
    train_world = world_of(train)

    def draw_traces(n: int, rng: random.Random) -> tuple[list[Trace], list[Trace]]:
        # An oracle of the training countries, so that no guess names a held-out one.
        oracle = Oracle(train_world, seed=seed)
        traces = make_traces(train, n, DEFAULT_MIX, oracle, rng, world=train_world)
        # Half of them are used again as copying exercises, with random words for names.
        return traces, traces[: n // 2]

    return Recipe(
        spec=sandbox_spec(),
        tokenizer=world_tokenizer(),
        world=load_world(),
        traces=draw_traces,
        steps=warm_start_steps,
        copying_steps=max(warm_start_steps // 2, 1),
        seed=seed,
        drawn_by=seed,
    )


def no_telemetry() -> None:
    """Keep TRL's trainers from pinging the Hub when they are constructed, here and in child
    processes.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # huggingface_hub has read the variable already.
    constants.HF_HUB_DISABLE_TELEMETRY = True


def as_dataset(questions: list[Question]) -> Dataset:
    """Convert questions to a data set."""
    return Dataset.from_list(as_rows(questions))


# ---- the guarded world: rules, questions, and a policy that has learned to follow principles ----

ROOT = SystemPrompt(PREAMBLE, ())
"""The first prompt of the evolution, without principles."""

SAMPLING = {"temperature": 0.7}
"""The paper samples at 0.6 to 0.7; a trainer's own settings replace this.

At 1.0 even a good policy slips now and then.
"""

WORLDS = ("rules", "habits", "misleading", "many")


@dataclass(frozen=True)
class GuardedRun(SandboxRun):
    """The parts of a run in the guarded world; see [`SandboxRun`] for the others.

    Args:
        oracle ([`GuardedOracle`]): The oracle that guards the facts.
        root ([`SystemPrompt`]): The first prompt of the evolution.
        mistakes (`float`): The share of wrong advice of this world's [`GuardedReflector`].
    """

    oracle: GuardedOracle
    root: SystemPrompt
    mistakes: float


def prepare_guarded(
    folder: str | Path,
    seed: int = 0,
    n_test: int = 256,
    warm_start_steps: int = 450,
    copying_steps: int = 150,
    world: str = "rules",
) -> GuardedRun:
    """Draw rules, build data and policy, and warm-start the policy on episodes under other rules.

    Whole countries are held out, from those episodes as well.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is
            used again.
        seed (`int`, *optional*, defaults to `0`): Decides rules, split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Questions about countries that were held out.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces.
        copying_steps (`int`, *optional*, defaults to `150`): Steps of 64 copying exercises before.
            Without them a policy of this size does not learn to say the words of its principles.
        world (`str`, *optional*, defaults to `"rules"`): The skills to learn. `"rules"`: words that
            a sentence can state, and splitting questions. `"habits"`: no fact is guarded, and the
            policy heeds no principle about how to proceed, so only practice helps.
            `"misleading"`: the first prompt gives words that are out of date, and half of the
            reflector's advice is wrong. `"many"`: eight words instead of four, for every relation
            that a question may end on.

    Raises:
        `ValueError`: There is no such world.
    """
    no_telemetry()
    if world not in WORLDS:
        raise ValueError(f"world must be one of {', '.join(WORLDS)}, got {world!r}")

    # Questions, and the warm start on the training countries.
    train, test = split_by_country(seed)
    recipe = guarded_recipe(seed, warm_start_steps, copying_steps, world)

    # The rules, which are others than those of the warm start's episodes.
    rng = random.Random(f"house {seed}")
    ends = ENDS_GUARDED
    if world == "many":
        ends = len(load_guarded_world().last_relations)
    rules = draw_rules(rng, ends=ends)

    # The first prompt: empty, or with a wrong word for every guarded relation.
    root = ROOT
    if world == "misleading":
        unused_words = [word for word in WORDS if word not in rules.values()]
        wrong_words = rng.sample(unused_words, len(rules))
        principles = [
            say(sought(relation), word) for relation, word in zip(rules, wrong_words, strict=True)
        ]
        root = SystemPrompt(PREAMBLE, tuple(principles))

    return GuardedRun(
        model=warm_started(folder, recipe),
        spec=recipe.spec,
        train=as_dataset(train),
        test=as_dataset(test[:n_test]),
        oracle=GuardedOracle({} if world == "habits" else rules, seed=seed),
        root=root,
        mistakes=0.5 if world == "misleading" else 0.1,
    )


def guarded_recipe(
    seed: int, warm_start_steps: int = 450, copying_steps: int = 150, world: str = "rules"
) -> Recipe:
    """Return the warm start of [`prepare_guarded`]; all worlds but `"habits"` share one."""
    train, _ = split_by_country(seed)
    train_world = world_of(train, load_guarded_world())
    spec = replace(sandbox_spec(), sampling=SAMPLING)

    def with_prompt(trace: Trace, principles: Sequence[str]) -> dict[str, Any]:
        # A trace as it reads under these principles.
        system_prompt = SystemPrompt(PREAMBLE, tuple(principles))
        return {**trace, "prompt": system_prompt.messages(spec.messages(trace))}

    def draw_traces(
        n: int, rng: random.Random
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        guarded_traces = make_guarded_traces(train, n, rng, heeds=world != "habits")
        imitated = [with_prompt(trace, principles) for principles, trace in guarded_traces]

        # Copying exercises without principles: a question without a relation would not show which
        # word belongs to it.
        oracle = Oracle(train_world, seed=seed)
        plain_traces = make_traces(train, n // 2, MIXES[None], oracle, rng, world=train_world)
        return imitated, [with_prompt(trace, ()) for trace in plain_traces]

    return Recipe(
        spec=spec,
        tokenizer=guarded_tokenizer(),
        world=load_guarded_world(),
        traces=draw_traces,
        steps=warm_start_steps,
        copying_steps=copying_steps,
        seed=seed,
        drawn_by=f"house traces {seed}",  # a seed keeps its name, or figures change
    )


def guarded_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word and name, and one for each guarding word with its
    relation, such as `currency amber`.

    With separate tokens, a policy of two layers has to learn positions to find the word after a
    relation; hundreds of steps of exercises did not teach it that. A token that contains the
    relation needs nothing of the kind.
    """
    world = load_guarded_world()
    names = list(chain.from_iterable(world.values.values()))
    # Every relation with every word that may guard it.
    for relation in relations_of(world):
        names += [f"{sought(relation)} {word}" for word in WORDS]
    return build_tokenizer(guarded_vocabulary(), names)


@dataclass(frozen=True)
class Transcript(TagGrammar):
    """Reads the last turn of a transcript: the one that answers."""

    def parse(self, text: str) -> Turn:
        last_line = text.rpartition("\n")[2]
        return super().parse(last_line)


class AgentChat:
    """Wraps an agent and its environment as a [`ChatModel`], so that [`evolve`] can change its
    system prompt.

    One call is a whole episode; the reply is its transcript, in which [`Transcript`] finds the
    answer. The samples depend only on the conversation, its `repeat` and `seed`.

    Args:
        agent ([`PromptAgent`]): The agent. Its own template is not used: the conversation is the
            prompt.
        seed (`int`, *optional*, defaults to `0`): The seed of all sampling.
    """

    def __init__(self, agent: PromptAgent, seed: int = 0):
        self.agent = agent
        self.seed = seed

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        agent = self.agent

        # The seed follows from the conversation, so a call can be repeated.
        conversation = repr([(message["role"], message["content"]) for message in messages])
        seed = rollout_seed(self.seed, conversation, repeat or 0)
        rollout = Rollout(agent.chat_format.prompt_ids(messages), seed=seed)
        try:
            await play(
                rollout, agent.policy, agent.environment, agent.chat_format, agent.spec.limits
            )
        except Exception as error:
            # Out of memory, for example: this call fails, the next one may not.
            return Reply(error=ServerFailed(f"the episode raised {error!r}"))

        # The whole episode counts as the completion.
        usage = Usage(len(rollout.prompt_ids), len(rollout.ids))
        return Reply(transcript(rollout), error=rollout.error, usage=usage)


# ---- the policies of the package ----

DEMO_SEED = 42
"""The demonstrations' seed: transformers' default."""


def demo_recipes() -> list[Recipe]:
    """Return the warm starts of the demonstrations, in the order of `SHIPPED`."""
    return [sandbox_recipe(make_split(DEMO_SEED, 256)[0], DEMO_SEED), guarded_recipe(DEMO_SEED)]


def main() -> None:
    """Train the shipped policies whose recipe has changed, and ship them."""
    for file, recipe in zip(SHIPPED, demo_recipes(), strict=True):
        # Policies that fit their recipe stay as they are.
        if load_shipped(recipe, [file]) is None:
            with TemporaryDirectory() as folder:
                ship(make_policy(recipe, Path(folder)), recipe, file)
        print(f"{file}: recipe {recipe.fingerprint}, {file.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
