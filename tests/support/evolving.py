"""A small evolution with scripted models: questions, a policy, a reference LLM, and a run of
`evolve`.
"""

import json
import random
import re
from itertools import product

from agentic_prompting.evolution import (
    EvolveConfig,
    SystemPrompt,
    evolve,
)
from agentic_prompting.llm import Reply, ScriptedChat, Usage
from agentic_prompting.rewards import exact_match_reward

WORDS = {"river": "amber", "city": "birch", "peak": "cedar"}
ROOT = SystemPrompt("Answer in <answer></answer>.", ())
ROWS = [
    {"question": f"Which {kind} is number {n}?", "answers": [f"{kind} {n}"]}
    for n, kind in product(range(4), WORDS)
]
SETTINGS = EvolveConfig(
    steps=12,
    problems_per_step=6,
    num_generations=4,
    p_crossover=0.5,
    reflect_on="imperfect",
)


class Policy:
    """A model that answers right if its prompt has the word for this kind of question, and one time
    in five without it.

    A refusal names the word. The reply depends only on the conversation and the number of the
    sample.
    """

    def __init__(self, fail=None):
        self.calls = 0
        self.fail = fail or (lambda number: None)
        self.seen = set()

    async def __call__(self, messages, *, repeat=None, session=None, **sampling):
        error = self.fail(self.calls)
        self.calls += 1
        prompt = messages[0]["content"]
        question = messages[-1]["content"]
        kind, number = re.search(r"Which (\w+) is number (\d+)", question).groups()
        self.seen.add((prompt, question, repeat))
        if error:
            return Reply(error=error)
        is_lucky = random.Random(f"{prompt}{kind}{number}{repeat}").random() < 0.2
        if is_lucky or WORDS[kind] in prompt:
            text = f"<answer>{kind} {number}</answer>"
        else:
            text = f"say {WORDS[kind]} <answer>no</answer>"
        return Reply(text, usage=Usage(3, 2, 0.01))


def reflect(messages):
    """A reference LLM's script that learns the word from a refusal, and merges equal advice."""
    request = messages[0]["content"]
    words = re.findall(r"say (\w+)", request)
    if request.startswith("Task: retell"):
        return f"1. It was told: say {words[0]}." if words else "1. It was right."
    if request.startswith("Task: draw") and words:
        return json.dumps([{"op": "add", "text": f"Always mention {words[0]}."}])
    if request.startswith("Task: let"):
        advice = set(re.findall(r"Always mention \w+\.", request))
        return json.dumps([{"op": "add", "text": text} for text in advice])
    return "[]"


def run(policy=None, config=SETTINGS, **options):
    return evolve(
        policy or Policy(), ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, config, **options
    )
