"""Mutation and crossover with a scripted reference LLM."""

import asyncio
import json
import re

from agentic_prompting.evolution import (
    Attempt,
    ProblemResult,
    PromptResult,
    SystemPrompt,
    operators,
)
from agentic_prompting.llm import ScriptedChat

PROMPT = SystemPrompt("Solve.", ("Check small cases.", "Name the unknowns."), id=3)


def mutate(*args, **options):
    return asyncio.run(operators.mutate(*args, **options))


def crossover(*args, **options):
    return asyncio.run(operators.crossover(*args, **options))


def problem(name, *rewards):
    return ProblemResult(
        f"question {name}",
        f"truth {name}",
        tuple(Attempt(f"try {name}{n}", r) for n, r in enumerate(rewards)),
    )


MIXED = PromptResult(
    PROMPT,
    (
        problem("a", 1.0, 0.0),
        problem("b", 1.0, 1.0),
        problem("c", 0.0, None, 1.0),
        problem("d", 0.0, 0.0),
    ),
)


def task(messages):
    return re.match(r"Task: (\w+)", messages[0]["content"])[1]


def edits(*items):
    return f"Reasons.\n```json\n{json.dumps(items)}\n```"


def reference(critique=None, plan=None, cross=None, **options):
    """A reference LLM that replies by stage; `critique` may be a function of the prompt."""
    critique = critique or edits({"op": "add", "text": "Verify the result."})

    def script(messages):
        request = messages[0]["content"]
        match task(messages):
            case "retell":
                return "<think>hm</think>It guessed " + re.search(r"try \w+", request)[0]
            case "draw":
                return critique(request) if callable(critique) else critique
            case "turn":
                return plan or "[]"
            case "let":
                return cross or edits({"op": "add", "text": "From B."})
        raise KeyError(task(messages))

    return ScriptedChat(script, **options)
