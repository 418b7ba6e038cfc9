"""The tiny policy as a closed model: a [`ChatModel`] that makes whole visits, its weights out of reach.

What [`evolve`] is for: somebody else's agent, of which only the system prompt can be changed. One call is one visit,
the reply its transcript; [`Transcript`] finds the answer in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...agent import PromptAgent
from ...llm import Message, Reply, ServerFailed, Usage
from ...rollout import Rollout, TagGrammar, Turn, play, rollout_seed
from ...trainers.reflecting import transcript


@dataclass(frozen=True)
class Transcript(TagGrammar):
    """Reads the last turn of a transcript: the one that answers."""

    def parse(self, text: str) -> Turn:
        return super().parse(text.rpartition("\n")[2])


class Visitor:
    """An agent with its environment as a [`ChatModel`]. What is sampled depends on the conversation's `repeat` and
    `seed` alone.

    Args:
        agent ([`PromptAgent`]): The agent. Its own template is not used: the conversation is the prompt.
        seed (`int`, *optional*, defaults to `0`): Of what is sampled.
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
            return Reply(error=ServerFailed(f"the visit raised {error!r}"))
        usage = Usage(len(rollout.prompt_ids), len(rollout.ids))
        return Reply(transcript(rollout), error=rollout.error, usage=usage)
