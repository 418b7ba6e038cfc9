"""The sandbox and the guarded one made ready for a run: data, oracle and a warm-started policy.

What the sandbox shows, it shows of the sandbox: a policy of 390,000 parameters in a world of 150 countries. The code it
runs through is the real one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class Sandbox:
    """The parts of a run in the sandbox.

    Args:
        model (`Path`): Folder of the warm-started policy.
        spec ([`AgentSpec`]): How it is asked.
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
) -> Sandbox:
    """Build data and policy, and warm-start the policy on traces of mixed quality.

    Whole countries are held out: no question, fact or name of one is in a training question or a trace. The names are
    in copying exercises, which state nothing, for what a policy never saw written it cannot write.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        seed (`int`, *optional*, defaults to `0`): Decides split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces, after half as many of
            64 copying exercises.
        by (`str`, *optional*, defaults to `"country"`): The kind of split; see [`make_split`].
    """
    no_telemetry()
    train, test = make_split(seed, n_test, by=by)
    recipe = sandbox_recipe(train, seed, warm_start_steps)
    return Sandbox(warm_started(folder, recipe), recipe.spec, as_dataset(train), as_dataset(test))


def sandbox_recipe(train: Sequence[Question], seed: int, warm_start_steps: int = 450) -> Recipe:
    """The warm start of [`prepare_sandbox`] on these questions."""
    seen = world_of(train)

    def traces(n: int, rng: random.Random) -> tuple[list[Trace], list[Trace]]:
        made = make_traces(train, n, DEFAULT_MIX, Oracle(seen, seed=seed), rng, world=seen)
        return made, made[: n // 2]

    copying_steps = max(warm_start_steps // 2, 1)
    return Recipe(
        sandbox_spec(),
        world_tokenizer(),
        load_world(),
        traces,
        warm_start_steps,
        copying_steps,
        seed,
        seed,
    )


def no_telemetry() -> None:
    """Keep TRL's trainers from sending a ping to the hub when they are made, in this process and those it starts."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    constants.HF_HUB_DISABLE_TELEMETRY = True  # what has been read of it already


def as_dataset(questions: list[Question]) -> Dataset:
    """Questions as a data set."""
    return Dataset.from_list(as_rows(questions))


# The guarded world: rules, questions, and a policy that has learned to follow principles -----------------------------

ROOT = SystemPrompt(PREAMBLE, ())
"""Where the evolution starts: no principles yet."""

SAMPLING = {"temperature": 0.7}
"""The paper's, .6 to .7; a trainer's own replaces it. At 1.0 a policy that knows what to do slips now and then."""


WORLDS = ("rules", "habits", "misleading", "many")


@dataclass(frozen=True)
class GuardedSandbox(Sandbox):
    """A [`Sandbox`] with guarded facts.

    Args:
        oracle ([`GuardedOracle`]): The oracle that guards them.
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
) -> GuardedSandbox:
    """Draw rules, build data and policy, and warm-start the policy on episodes under other rules.

    Whole countries are held out, from those episodes as well.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        seed (`int`, *optional*, defaults to `0`): Decides rules, split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Questions about countries that were held out.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces.
        copying_steps (`int`, *optional*, defaults to `150`): Steps of 64 copying exercises before. Without them a
            policy of this size does not learn to say the words of its principles.
        world (`str`, *optional*, defaults to `"rules"`): The skills to learn. `"rules"`: words that a sentence can
            state, and splitting questions. `"habits"`: no fact is guarded, and the policy heeds no principle about how
            to proceed, so that only practice helps. `"misleading"`: the first prompt gives words that are out of date,
            and half of the reflector's advice is wrong. `"many"`: eight words instead of four, for every relation that
            a question may end on.

    Raises:
        `ValueError`: There is no such world.
    """
    no_telemetry()
    if world not in WORLDS:
        raise ValueError(f"world must be one of {', '.join(WORLDS)}, got {world!r}")
    train, test = split_by_country(seed)
    recipe = guarded_recipe(seed, warm_start_steps, copying_steps, world)
    drawn = random.Random(f"house {seed}")
    ends = len(load_guarded_world().last_relations) if world == "many" else ENDS_GUARDED
    rules, root = draw_rules(drawn, ends=ends), ROOT
    if world == "misleading":
        others = drawn.sample([word for word in WORDS if word not in rules.values()], len(rules))
        root = SystemPrompt(PREAMBLE, tuple(map(say, map(sought, rules), others)))
    return GuardedSandbox(
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
    """The warm start of [`prepare_guarded`]; all worlds but `"habits"` share one."""
    train, _ = split_by_country(seed)
    spec, seen = replace(sandbox_spec(), sampling=SAMPLING), world_of(train, load_guarded_world())

    def under(principles: Sequence[str], trace: Trace) -> dict[str, Any]:
        return {
            **trace,
            "prompt": SystemPrompt(PREAMBLE, tuple(principles)).messages(spec.messages(trace)),
        }

    def traces(n: int, rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        made = make_guarded_traces(train, n, rng, heeds=world != "habits")
        # Copying exercises without principles: a question without a relation would not show which word belongs to it.
        plain = make_traces(train, n // 2, MIXES[None], Oracle(seen, seed=seed), rng, world=seen)
        return [under(*one) for one in made], [under((), trace) for trace in plain]

    drawn_by = f"house traces {seed}"  # a seed keeps its name, or figures change
    tokenizer = guarded_tokenizer()
    return Recipe(
        spec,
        tokenizer,
        load_guarded_world(),
        traces,
        warm_start_steps,
        copying_steps,
        seed,
        drawn_by,
    )


def guarded_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and name, and one for each guarding word with its relation, `currency amber`.

    To find the word that stands after a relation a policy of two layers has to learn where things stand; hundreds of
    steps of exercises did not teach it that. To find a token that is about the relation it has to learn nothing.
    """
    world = load_guarded_world()
    names = [name for values in world.values.values() for name in values]
    phrases = [f"{sought(relation)} {word}" for relation in relations_of(world) for word in WORDS]
    return build_tokenizer(guarded_vocabulary(), [*names, *phrases])


@dataclass(frozen=True)
class Transcript(TagGrammar):
    """Reads the last turn of a transcript: the one that answers."""

    def parse(self, text: str) -> Turn:
        return super().parse(text.rpartition("\n")[2])


class AgentChat:
    """An agent with its environment as a [`ChatModel`]: an agent of which [`evolve`] can change only the
    system prompt. One call is a whole episode; the reply is its transcript, in which [`Transcript`] finds the answer.
    The samples depend only on the conversation, its `repeat` and `seed`.

    Args:
        agent ([`PromptAgent`]): The agent. Its own template is not used: the conversation is the prompt.
        seed (`int`, *optional*, defaults to `0`): Decides what is sampled.
    """

    def __init__(self, agent: PromptAgent, seed: int = 0):
        self.agent, self.seed = agent, seed

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        agent = self.agent
        conversation = repr([(message["role"], message["content"]) for message in messages])
        seed = rollout_seed(self.seed, conversation, repeat or 0)
        rollout = Rollout(agent.chat_format.prompt_ids(messages), seed=seed)
        try:
            await play(
                rollout, agent.policy, agent.environment, agent.chat_format, agent.spec.limits
            )
        except Exception as error:  # out of memory, say: this call fails, the next one may not
            return Reply(error=ServerFailed(f"the episode raised {error!r}"))
        usage = Usage(len(rollout.prompt_ids), len(rollout.ids))
        return Reply(transcript(rollout), error=rollout.error, usage=usage)


# The policies of the package ------------------------------------------------------------------------------------------

DEMO_SEED = 42
"""The demonstrations' seed: transformers' default."""


def demo_recipes() -> list[Recipe]:
    """The warm starts of the demonstrations, in the order of `SHIPPED`."""
    return [sandbox_recipe(make_split(DEMO_SEED, 256)[0], DEMO_SEED), guarded_recipe(DEMO_SEED)]


def main() -> None:
    """Make the policies of the package anew, those whose recipe has changed."""
    for file, recipe in zip(SHIPPED, demo_recipes(), strict=True):
        if load_shipped(recipe, [file]) is None:
            with TemporaryDirectory() as folder:
                ship(make_policy(recipe, Path(folder)), recipe, file)
        print(f"{file}: recipe {recipe.fingerprint}, {file.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
