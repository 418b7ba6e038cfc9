"""The guarded world made ready for a run: its rules, questions, and a policy that has learned to follow principles.

Also that policy as a closed model ([`AgentChat`]), which is what [`evolve`] is for: somebody else's agent, of which
only the system prompt can be changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ...agent import PromptAgent
from ...evolution import SystemPrompt
from ...llm import Message, Reply, ServerFailed, Usage
from ...rollout import Rollout, TagGrammar, Turn, play, rollout_seed
from ...trainers.reflecting import transcript
from ..policy import build_tokenizer, sandbox_spec
from ..setup import Sandbox, as_dataset, warm_started
from ..world import sought
from .traces import PREAMBLE, guarded_vocabulary, make_guarded_traces
from .world import WORDS, GuardedOracle, draw_rules, load_guarded_world, relations_of, split_by_country

ROOT = SystemPrompt(PREAMBLE, ())
"""Where the evolution starts: no principles yet."""

SAMPLING = {"temperature": 0.7}
"""The paper's, .6 to .7; a trainer's own replaces it. At 1.0 a policy that knows what to do slips now and then."""


@dataclass(frozen=True)
class GuardedSandbox(Sandbox):
    """A [`Sandbox`] with guarded facts.

    Args:
        oracle ([`GuardedOracle`]): The oracle that guards them.
    """

    oracle: GuardedOracle


def prepare_guarded(
    folder: str | Path, seed: int = 0, n_test: int = 256, warm_start_steps: int = 450, copying_steps: int = 150
) -> GuardedSandbox:
    """Draw rules, build data and policy, and warm-start the policy on episodes under other rules.

    Those episodes are about all countries: what a policy never saw written it cannot write. What is held out, whole
    countries of it, is held out from everything that comes after.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        seed (`int`, *optional*, defaults to `0`): Decides rules, split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Questions about countries that were held out.
        warm_start_steps (`int`, *optional*, defaults to `450`): Supervised steps of 32 traces.
        copying_steps (`int`, *optional*, defaults to `150`): Steps of 64 copying exercises before. Without them a
            policy of this size does not learn to say the words of its principles.
    """
    train, test = split_by_country(seed)
    spec, rng = replace(sandbox_spec(), sampling=SAMPLING), random.Random(f"house traces {seed}")

    def traces() -> list[dict[str, Any]]:
        return [
            {**trace, "prompt": SystemPrompt(PREAMBLE, tuple(principles)).messages(spec.messages(trace))}
            for principles, trace in make_guarded_traces([*train, *test], 20 * warm_start_steps, rng)
        ]

    model = warm_started(folder, spec, guarded_tokenizer(), traces, warm_start_steps, copying_steps, seed, rng)
    oracle = GuardedOracle(draw_rules(random.Random(f"house {seed}")), seed=seed)
    return GuardedSandbox(model, spec, as_dataset(train), as_dataset(test[:n_test]), oracle)


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
    """An agent with its environment as a [`ChatModel`]: one call is a whole episode, the reply its transcript, in which
    [`Transcript`] finds the answer. What is sampled depends on the conversation, its `repeat` and `seed` alone.

    Args:
        agent ([`PromptAgent`]): The agent. Its own template is not used: the conversation is the prompt.
        seed (`int`, *optional*, defaults to `0`): Decides what is sampled.
    """

    def __init__(self, agent: PromptAgent, seed: int = 0):
        self.agent, self.seed = agent, seed

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        agent = self.agent
        told = repr([(message["role"], message["content"]) for message in messages])
        rollout = Rollout(agent.chat_format.prompt_ids(messages), seed=rollout_seed(self.seed, told, repeat or 0))
        try:
            await play(rollout, agent.policy, agent.environment, agent.chat_format, agent.spec.limits)
        except Exception as error:  # out of memory, say: this call fails, the next one may not
            return Reply(error=ServerFailed(f"the episode raised {error!r}"))
        usage = Usage(len(rollout.prompt_ids), len(rollout.ids))
        return Reply(transcript(rollout), error=rollout.error, usage=usage)
