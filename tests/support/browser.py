"""A headless Chromium for tests and benchmarks, and runs to show in it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# No sandbox, because tests run as root in containers. The other flags keep it off the network.
FLAGS = [
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync"),
]


def why_not() -> str | None:
    """The reason why no browser can be started here; `None` if one can."""
    if CHROMIUM is None:
        return "no Chromium is installed (Debian: apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def opened(browser: Any, page_file: Path) -> Any:
    """A new page of a browser (or of its context) that shows the drawn report.

    Waits by locators: the page's policy forbids evaluating strings.
    """
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.locator("html[data-ready]").wait_for(state="attached")
    return page


_ROOM = """(part) => {
  scrollTo(0, 0);
  const { top, bottom } = document.querySelector(part).getBoundingClientRect();
  return { x: 0, y: top, width: innerWidth, height: bottom - top + 24 };
}"""


def pictured(page: Any, name: str, part: str) -> None:
    """Pictures of a part of the page in light and dark, where `AGENTIC_PROMPTING_SCREENSHOTS` names
    a folder.
    """
    if folder := os.environ.get("AGENTIC_PROMPTING_SCREENSHOTS"):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            path = Path(folder) / f"{name}-{page.viewport_size['width']}-{scheme}.png"
            page.screenshot(path=path, full_page=True, clip=page.evaluate(_ROOM, part))


def shows(page: Any, count: int) -> None:
    """Wait until so many trajectories fit the filters."""
    fits = re.compile(rf"^{count:,} fits?$")
    page.locator("#trajectories [role=status]").filter(has_text=fits).wait_for()


def record(number: int, rng: random.Random, words: int = 60, **changes: Any) -> dict[str, Any]:
    """A rollout's record as training writes it, with `words` words in each turn."""

    def text() -> str:
        return " ".join(
            rng.choice(("Kenya", "capital", "which", "language", "because")) for _ in range(words)
        )

    status = rng.choice(
        ("answered", "answered", "answered", "out_of_turns", "malformed", "truncated")
    )
    act = {
        "text": f"<think> {text()} </think> <interaction_prompt> {text()} </interaction_prompt>",
        "kind": "act",
    }
    end = {"text": f"<think> {text()} </think> <answer> Nairobi </answer>", "kind": "answer"}
    return {
        "run": 1,
        "step": number // 128,
        "mode": "train",
        "rewards": {"prompt_r1_reward": 1.0 if status == "answered" else -0.5},
        "question": f"question {number} : {text()[:60]}",
        "answers": ["Nairobi"],
        "task": ("hotpotqa", "musique")[number % 2],
        "status": status,
        "error": None,
        "answer": "Nairobi" if status == "answered" else None,
        "turns": [{**turn, "well_formed": True, "problem": ""} for turn in (act, act, end)],
        "observations": [{"text": text(), "error": None, "seconds": 0.5, "cached": False}] * 2,
        "tokens": {"agent": 100, "observation": 100},
        "cost_usd": 0.001,
        "seed": 2**62 + number,
        **changes,
    }


def training(folder: Path, steps: int = 24, seed: int = 0, rising: float = 0.06) -> Path:
    """A run like the sandbox's, whose agent learns to decompose questions: rollouts, log, held-out
    result.
    """
    from agentic_prompting.records import RecordFile
    from agentic_prompting.rollout import TagGrammar
    from agentic_prompting.sandbox import Oracle, make_split
    from agentic_prompting.sandbox.traces import Episode, load_world, write_trace

    rng = random.Random(seed)
    world = load_world()
    records = []
    questions, _ = make_split(0)
    for step in range(steps):
        good = min(0.95, 0.15 + rising * step)
        mix = {
            "decompose": good,
            "pass_on": 0.8 - 0.8 * good,
            "bare": 0.15 - 0.15 * good,
            "impatient": 0.05,
        }
        for question in rng.sample(questions, 3):
            for kind in rng.choices(list(mix), weights=list(mix.values()), k=8):
                trace = write_trace(kind, question, Episode(Oracle(), TagGrammar()), world, rng)
                records.append(_played(trace, step, rng))
    log = RecordFile(folder / "rollouts" / "log.jsonl")
    for step in range(1, steps + 1):
        fades = 1 / (1 + step / 6)
        noise = rng.random()
        entry = {
            "loss": 3e-4 * noise,
            "kl": 0.004 * step * (0.5 + noise),
            "grad_norm": 0.2 + fades * noise,
        }
        entry |= {"entropy": 0.8 * fades + 0.05 * noise, "learning_rate": 1e-6 * (1 - step / steps)}
        entry |= {
            "async/token_age": min(step, 10) / 10 + noise / 9,
            "async/token_age_max": float(min(step, 3)),
        }
        log.append([{"run": 1, "step": step, **entry}])
    held_out = {"exact_match_before": 0.3555, "interval_before": [0.2994, 0.4158]}
    held_out |= {"exact_match_after": 0.957, "interval_after": [0.9247, 0.9758]}
    (folder / "summary.json").write_text(
        json.dumps({"sandbox": True, **held_out}), encoding="utf-8"
    )
    return write_run(folder, records)


def _played(trace: Any, step: int, rng: random.Random) -> dict[str, Any]:
    """A trace as a rollout's record."""
    answer = re.search(r"<answer> (.*) </answer>", trace["turns"][-1])[1]
    whole = trace["turns"][-1].startswith("<think>")
    reward = (1.0 if answer == trace["answers"][0] else 0.0) if whole else -0.4
    turns = [
        {"text": text, "kind": "act", "well_formed": True, "problem": ""} for text in trace["turns"]
    ]
    turns[-1] |= {"kind": "answer"} if whole else {"well_formed": False, "problem": "no thought"}
    said = [
        {"text": t, "error": None, "seconds": rng.random(), "cached": False}
        for t in trace["observations"]
    ]
    return record(
        0,
        rng,
        1,
        step=step,
        rewards={"prompt_r1_reward": reward},
        reward=reward,
        task="sandbox",
        turns=turns,
        question=trace["question"],
        answers=trace["answers"],
        answer=answer,
        observations=said,
        status="answered" if whole else "malformed",
        cost_usd=3e-5 * len(said),
    )


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Write a run's folder with these records."""
    from agentic_prompting.rollout import RolloutLog

    log = RolloutLog(folder / "rollouts")
    for start in range(0, len(records), 512):
        log.write(records[start : start + 512])
    return folder


def evolved(path: Path, steps: int = 24) -> Any:
    """A population that grew by mutation and crossover, saved as the trainer saves it."""
    from agentic_prompting.evolution import Population, SystemPrompt

    advice = [f"Rule {name}: ask for one thing at a time." for name in "abcdefgh"]
    rng = random.Random(3)
    population = Population(SystemPrompt("Answer the question.", ("Ask first.",)), seed=1)
    for step in range(steps):
        playing = population.select(3)
        population.record(
            playing, [[0.1 * len(prompt.principles) + rng.gauss(0, 0.1)] for prompt in playing]
        )
        parent = playing[0]
        ids = tuple(dict.fromkeys(prompt.id for prompt in playing))
        principles = dict.fromkeys([*parent.principles[-4:], rng.choice(advice)])
        population.add(
            SystemPrompt(
                parent.preamble, tuple(principles), parents=(parent.id,), operator="mutation"
            )
        )
        if step % 4 == 3 and len(ids) > 1:
            union = dict.fromkeys(rule for prompt in playing for rule in prompt.principles)
            population.add(
                SystemPrompt(parent.preamble, tuple(union), parents=ids, operator="crossover")
            )
    path.write_text(json.dumps({"population": population.state_dict()}), encoding="utf-8")
    return population
