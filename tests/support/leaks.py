"""The facts that a sandbox shows a policy about its held-out countries, apart from names in copying
exercises.
"""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

# The facts that belong to one country alone.
OWN_FACTS = ("name", "capital", "airport", "domain", "letters")


def leaks(name: str, seed: int, warm_start_steps: int = 450) -> list[str]:
    """Names of held-out countries in training questions, warm-start traces and principles; those
    asked about, too.

    Args:
        name (`str`): `prompt-r1` or a guarded world. seed (`int`): The seed of the split.
            warm_start_steps (`int`,
        *optional*, defaults to `450`): The steps of the warm start, which set the number of traces.
    """
    from agentic_prompting.sandbox import load_guarded_world, load_world, parse_question, setup

    traces: list[dict] = []

    def warm_started(folder, recipe):
        for each_kind in recipe.traces(20 * recipe.steps, random.Random(recipe.drawn_by)):
            traces.extend(each_kind)

    with patch.object(setup, "warm_started", warm_started), TemporaryDirectory() as folder:
        if name == "prompt-r1":
            sandbox = setup.prepare_sandbox(folder, seed, warm_start_steps=warm_start_steps)
            world = load_world()
            tokenizer = setup.world_tokenizer()
        else:
            sandbox = setup.prepare_guarded(
                Path(folder), seed, warm_start_steps=warm_start_steps, world=name
            )
            world = load_guarded_world()
            tokenizer = setup.guarded_tokenizer()
    texts = list(sandbox.train["question"])
    if name != "prompt-r1":
        texts += sandbox.root.principles
    for trace in traces:
        texts += [trace["question"], *trace["answers"], *trace["turns"], *trace["observations"]]
        texts += [message["content"] for message in trace.get("prompt", ())]
    texts = sorted(set(texts))  # most of them stand in many traces
    # A name is one token: in `Port of Spain` there is no Spain.
    tokens = set(tokenizer.tokenize("\n".join(texts)))

    def countries(rows):
        return {parse_question(question, world).country for question in rows["question"]}

    held_out = countries(sandbox.test)
    trained_on = countries(sandbox.train)
    assert len(held_out) >= 20, "nothing was looked at"
    assert len(traces) == 30 * warm_start_steps, "nothing was looked at"
    assert {country.capital for country in trained_on} <= tokens, "nothing was looked at"
    # MAD is the code of a currency, too: facts that are shared are no leak.
    shared = {""}
    for country in trained_on:
        shared.update(vars(country).values())
    facts = set()
    for country in held_out:
        facts.update(getattr(country, field) for field in OWN_FACTS)
    return sorted((tokens & (facts - shared)) | {country.name for country in trained_on & held_out})
