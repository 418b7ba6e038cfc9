"""The facts that a sandbox shows a policy about its held-out countries, apart from names in copying exercises."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

OWN = (
    "name",
    "capital",
    "airport",
    "domain",
    "letters",
)  # the facts that belong to one country alone


def leaks(name: str, seed: int, warm_start_steps: int = 450) -> list[str]:
    """Names of held-out countries in training questions, warm-start traces and principles; those asked about, too.

    Args:
        name (`str`): `prompt-r1` or a guarded world. seed (`int`): The seed of the split. warm_start_steps (`int`,
        *optional*, defaults to `450`): The steps of the warm start, which set the number of traces.
    """
    from agentic_prompting.sandbox import load_guarded_world, load_world, parse_question, setup

    shown: list[dict] = []

    def warm_started(folder, recipe):
        for trace in recipe.traces(20 * recipe.steps, random.Random(recipe.drawn_by)):
            shown.extend(trace)

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
    texts = [*sandbox.train["question"], *(sandbox.root.principles if name != "prompt-r1" else ())]
    for trace in shown:
        texts += [trace["question"], *trace["answers"], *trace["turns"], *trace["observations"]]
        texts += [message["content"] for message in trace.get("prompt", ())]
    texts = sorted(set(texts))  # most of them stand in many traces
    seen = set(
        tokenizer.tokenize("\n".join(texts))
    )  # a name is one token: in `Port of Spain` there is no Spain
    held, trained_on = (
        {parse_question(question, world).country for question in rows["question"]}
        for rows in (sandbox.test, sandbox.train)
    )
    capitals = {country.capital for country in trained_on}
    assert len(held) >= 20 and len(shown) == 30 * warm_start_steps and capitals <= seen, (
        "nothing was looked at"
    )
    shared = {
        value for country in trained_on for value in vars(country).values()
    }  # MAD is a dirham, too
    names = {getattr(country, field) for country in held for field in OWN} - shared - {""}
    return sorted((seen & names) | {country.name for country in trained_on & held})
