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

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# No sandbox: tests run as root in containers. The others keep it from talking to anybody.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def why_not() -> str | None:
    """Why no browser can be started here; `None` if one can."""
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
    """A new page of a browser (or of its context) with the report in it, drawn.

    Waits by locators: the page's policy forbids evaluating strings.
    """
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.locator("html[data-ready]").wait_for(state="attached")
    return page


def pictured(page: Any, name: str) -> None:
    """Screenshots in light and dark, where `AGENTIC_PROMPTING_SCREENSHOTS` names a folder for them."""
    if folder := os.environ.get("AGENTIC_PROMPTING_SCREENSHOTS"):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            path = Path(folder) / f"{name}-{page.viewport_size['width']}-{scheme}.png"
            page.screenshot(path=path, full_page=True)


def shows(page: Any, count: int) -> None:
    """Wait until so many trajectories fit the filters."""
    fits = re.compile(rf"^{count:,} fits?$")
    page.locator("#trajectories [role=status]").filter(has_text=fits).wait_for()


def record(number: int, rng: random.Random, words: int = 60, **changes: Any) -> dict[str, Any]:
    """A recorded trajectory as training leaves it, with `words` words in each turn."""

    def text() -> str:
        return " ".join(rng.choice(("Kenya", "capital", "which", "language", "because")) for _ in range(words))

    status = rng.choice(("answered", "answered", "answered", "out_of_turns", "malformed", "truncated"))
    act = {"text": f"<think> {text()} </think> <interaction_prompt> {text()} </interaction_prompt>", "kind": "act"}
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


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    """A run's folder with these records."""
    from agentic_prompting.rollout import RolloutLog

    log = RolloutLog(folder / "rollouts")
    for start in range(0, len(records), 512):
        log.write(records[start : start + 512])
    return folder


def evolved(path: Path, steps: int = 24) -> Any:
    """A population that grew by mutation and crossover, saved as the trainer saves it."""
    from agentic_prompting.evolution import Population, SystemPrompt

    advice = [f"Rule {name}: ask for one thing at a time." for name in "abcdefgh"]
    rng, population = random.Random(3), Population(SystemPrompt("Answer the question.", ("Ask first.",)), seed=1)
    for step in range(steps):
        playing = population.select(3)
        population.record(playing, [[0.1 * len(prompt.principles) + rng.gauss(0, 0.1)] for prompt in playing])
        parent, ids = playing[0], tuple(dict.fromkeys(prompt.id for prompt in playing))
        principles = dict.fromkeys([*parent.principles[-4:], rng.choice(advice)])
        population.add(SystemPrompt(parent.preamble, tuple(principles), parents=(parent.id,), operator="mutation"))
        if step % 4 == 3 and len(ids) > 1:
            union = dict.fromkeys(rule for prompt in playing for rule in prompt.principles)
            population.add(SystemPrompt(parent.preamble, tuple(union), parents=ids, operator="crossover"))
    path.write_text(json.dumps({"population": population.state_dict()}), encoding="utf-8")
    return population
