"""Rollouts and recorded calls for tests of `LLMEnvironment`."""

from agentic_prompting.llm import (
    ScriptedChat,
)
from agentic_prompting.rollout import (
    parse_turn,
)


def turn_of(request, thought="a secret thought"):
    return parse_turn(
        f"<think> {thought} </think> <interaction_prompt> {request} </interaction_prompt>"
    )


class Recording(ScriptedChat):
    """Also keeps how each call was told apart from others."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.identities = []

    async def __call__(self, messages, *, repeat=None, session=None, **sampling):
        self.identities.append((repeat, session))
        return await super().__call__(messages, repeat=repeat, session=session, **sampling)
