"""Turns of an agent in Prompt-R1's tags, and rollouts made of them."""

from agentic_prompting.llm import ServerFailed
from agentic_prompting.rollout import Observation, Rollout, Sample, TagGrammar, parse_turn

ASK = (
    "<think>Which river is it?</think><interaction_prompt>Which river runs through "
    "Cairo?</interaction_prompt>"
)
END = "<think>The reply is clear.</think><answer>the Nile</answer>"
WRONG = "<think>The reply is clear.</think><answer>Danube</answer>"
BARE = "<answer>the Nile</answer>"
NILE = ["Nile"]


def episode(*texts: str, status: str = "answered", grammar: TagGrammar = TagGrammar()) -> Rollout:
    rollout = Rollout([1])
    for text in texts:
        rollout.add_turn(Sample([2]), parse_turn(text, grammar))
    rollout.status = status
    return rollout


def failed_episode() -> Rollout:
    rollout = episode(ASK, status="running")
    rollout.fail(Observation(error=ServerFailed("the server was down", "oracle", 3, 503)))
    return rollout
