"""What `headroom` says of the sandbox's worlds, and what is true there. **Sandbox**: nothing about real models.

    python -m benchmarks.learning.headroom_worlds --json     # 20 draws of rules a world, about 15 minutes of one core
    python -m benchmarks.learning.headroom_worlds --seeds 2

E-SPL's sandbox: an agent behind a chat model, of which only the system prompt can change. In `rules` some facts are
given only to requests that carry a word, which a prompt can state; in `unguarded` no fact is guarded, and the prompts
state words and nothing else, so that none can help; in `misleading` the start prompt gives words that are out of date.
`habits`, by name, has an agent that heeds no way to proceed; prompts move it all the same. A draw has rules and prompts
of its own; the agent is one for each world. The eleven challengers are what a reflector that is often wrong might
write: each states some words, right or wrong, and most of them a way to proceed.

`truth` is the gain of the chosen prompt over all 840 questions, each answered once under both prompts. Of the
demo of Prompt-R1 the signal of the untrained agent is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting.evaluation import PromptedSystem, score_records
from agentic_prompting.evaluation.headroom import headroom
from agentic_prompting.evaluation.metrics import find_metrics
from agentic_prompting.evolution import SystemPrompt
from agentic_prompting.rollout import fill_template
from benchmarks.lab import log, quiet

WORLDS = ("rules", "unguarded", "misleading")
SEEDS, CHALLENGERS, REPEATS = 20, 11, 1
RIGHT = {
    "rules": 0.9,
    "unguarded": 0.9,
    "misleading": 0.5,
    "habits": 0.9,
}  # how often a challenger's word is right


def challengers(world: str, rules: Mapping[str, str], rng: random.Random) -> list[str]:
    """Prompts that a reflector might write: words for some of the guarded relations, and how to proceed."""
    from agentic_prompting.sandbox.guarded import HASTY, PREAMBLE, STEPWISE, WHOLE, WORDS, say
    from agentic_prompting.sandbox.world import sought

    prompts = []
    for _ in range(CHALLENGERS):
        principles = []
        for relation, word in rules.items():
            if rng.random() < 0.5:
                is_right = rng.random() < RIGHT[world]
                principles.append(say(sought(relation), word if is_right else rng.choice(WORDS)))
        if world != "unguarded":
            principles += rng.choices([[STEPWISE], [WHOLE], [HASTY], []], [0.5, 0.15, 0.1, 0.25])[0]
        prompts.append(SystemPrompt(PREAMBLE, tuple(principles)).text)
    return prompts


def measure_world(world: str, seeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """The verdict and the truth for each draw of rules."""
    from agentic_prompting import LLMEnvironment, PromptAgent
    from agentic_prompting.sandbox.guarded import PREAMBLE, WORDS, GuardedOracle, draw_rules, say
    from agentic_prompting.sandbox.setup import DEMO_SEED, AgentChat, prepare_guarded
    from agentic_prompting.sandbox.world import sought

    is_guarded = world not in ("unguarded", "habits")
    sandbox = prepare_guarded(folder, DEMO_SEED, world="rules" if world == "unguarded" else world)
    template = sandbox.spec.prompt_template
    rows = [{**row, "question": fill_template(template, row["question"])} for row in sandbox.train]
    agent = PromptAgent.from_pretrained(sandbox.model, max_batch_size=256)
    draws = []
    for seed in seeds:
        rng = random.Random(f"headroom {world} {seed}")
        rules = draw_rules(rng)
        start = SystemPrompt(PREAMBLE)
        if world == "misleading":
            outdated = rng.sample(
                [word for word in WORDS if word not in rules.values()], len(rules)
            )
            principles = [
                say(sought(relation), word) for relation, word in zip(rules, outdated, strict=True)
            ]
            start = SystemPrompt(PREAMBLE, tuple(principles))
        agent.environment = LLMEnvironment(GuardedOracle(rules if is_guarded else {}, seed=seed))
        chat = AgentChat(agent, seed=seed)

        began = time.process_time()
        prompts = [start.text, *challengers(world, rules, rng)]
        found = headroom(rows, policy=chat, prompts=prompts, top_up_calls=800, seed=seed)
        seconds = time.process_time() - began
        assert found.prompts is not None
        chosen = found.texts[found.prompts.chosen]
        truth = mean_score(chat, chosen, rows) - mean_score(chat, start.text, rows)
        gain = found.prompts.gain
        draws.append(
            {
                "world": world,
                "seed": seed,
                "verdict": found.prompts.verdict,
                "gain": [gain.mean, gain.low, gain.high],
                "truth": truth,
                "topped_up": found.prompts.topped_up,
                "calls": sum(found.calls.values()),
                "seconds": round(seconds, 1),
            }
        )
        log(f"{world} {seed}: {found.prompts.sentence()}; truth {truth:+.3f}; {seconds:.0f} s")
    return draws


def mean_score(chat: Any, prompt: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean score under a prompt over all rows, several answers to each."""
    system = PromptedSystem(chat, prompt, max_in_flight=256)
    scores: list[float] = []
    for repeat in range(REPEATS):
        answers = system(rows, seed=1000 + repeat)
        records = [
            {"answer": answer.text, "answers": row["answers"]}
            for answer, row in zip(answers, rows, strict=True)
        ]
        (of_repeat,) = score_records(records, find_metrics(["exact_match"])).values()
        scores += [score for score in of_repeat if score is not None]
    return sum(scores) / len(scores)


def measure_demo(folder: Path) -> dict[str, Any]:
    """The signal of the untrained agent of Prompt-R1's demo, in exact match."""
    from agentic_prompting import LLMEnvironment, PromptAgent
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import DEMO_SEED, prepare_sandbox

    sandbox = prepare_sandbox(folder, DEMO_SEED)
    agent = PromptAgent.from_pretrained(
        sandbox.model, LLMEnvironment(Oracle(seed=DEMO_SEED)), max_batch_size=256
    )
    return headroom(list(sandbox.test), agent=agent, group_size=8, calls=2048).to_json()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of rules a world")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=tuple(RIGHT))
    arguments = parser.parse_args()
    quiet()
    draws = []
    with tempfile.TemporaryDirectory() as folder:
        for world in arguments.worlds:
            draws += measure_world(world, range(arguments.seeds), Path(folder) / world)
        demo = measure_demo(Path(folder) / "demo")
    summary = {
        world: summarise([draw for draw in draws if draw["world"] == world])
        for world in arguments.worlds
    }
    result = {"summary": summary, "draws": draws, "demo": demo}
    print(
        json.dumps(result)
        if arguments.json
        else json.dumps({"summary": summary, "demo": demo}, indent=2)
    )


def summarise(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Verdicts of a world, counted, and how often the interval holds the truth."""
    held = [draw["gain"][1] <= draw["truth"] <= draw["gain"][2] for draw in draws]
    truths = [draw["truth"] for draw in draws]
    return {
        "draws": len(draws),
        "verdicts": dict(Counter(draw["verdict"] for draw in draws)),
        "interval holds the truth": sum(held),
        "truth": [min(truths), sum(truths) / len(truths), max(truths)],
        "calls": max(draw["calls"] for draw in draws),
        "seconds": max(draw["seconds"] for draw in draws),
    }


if __name__ == "__main__":
    main()
