"""The report's HTML: our own page, style and script in one file, and the run's data as inert blocks.

Two independent reasons why nothing that a model wrote can run: data is packed (see `packing.py`) and shown with
`textContent` only, and the page's content security policy allows our own script by its hash, no other, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evolution.lineage import Lineage, Node
from ..evolution.plotting import LINES
from .curves import PANELS, panels_in
from .diffs import word_diff
from .packing import chunk_blocks, data_block

STORIES = 20
"""How many prompts' evidence is unpacked at once."""

_PAGE = Path(__file__).parent / "page"
# In the order in which they need each other.
_PARTS = ("base", "charts", "browser", "trajectories", "stories", "tree", "refinements", "main")


def render_page(title: str, blocks: str) -> str:
    """The whole page around its data blocks."""
    style = (_PAGE / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _PARTS)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    page = (_PAGE / "page.html").read_text(encoding="utf-8")
    # What is not ours comes last and is never searched for a place to fill in.
    head, _, foot = page.partition("{{data}}")
    head = head.replace("{{policy}}", policy).replace("{{style}}", style).replace("{{title}}", html.escape(title))
    return head + blocks + foot.replace("{{script}}", script)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def history_block(history: Mapping[str, Sequence[Any]]) -> str:
    """The curves: per mode the entries, and the panels to draw."""
    panels = [
        {"name": panel.name, "title": panel.title, "keys": panel.keys}
        for panel in PANELS
        if any(panel in panels_in(log) for log in history.values())
    ]
    return data_block("history", {"panels": panels, "modes": history, "dashes": [dashes for _, dashes in LINES]})


def lineage_block(lineage: Lineage) -> str:
    """The tree: one entry per prompt, with the diff to each of its parents. What led to it is in other blocks."""
    texts = [node.member.prompt.text for node in lineage.nodes]
    nodes = [_shown(node, texts) for node in lineage.nodes]
    refused = [[one[name] for name in ("step", "operator", "reason", "parents")] for one in lineage.refused]
    told = any(node.story for node in lineage.nodes) or bool(lineage.refused)
    index = {"nodes": nodes, "window": lineage.window, "chunk": STORIES if told else None, "refused": refused}
    stories = [node.story for node in lineage.nodes] if told else []
    return data_block("lineage", index) + chunk_blocks("stories", stories, STORIES)


def _shown(node: Node, texts: Sequence[str]) -> dict[str, Any]:
    prompt, rating = node.member.prompt, node.member.rating
    return {
        "operator": prompt.operator,
        "born": prompt.born_at,
        "parents": list(prompt.parents),
        "mu": rating.mu,
        "sigma": rating.sigma,
        "games": node.member.games,
        "scores": node.member.problem_scores,
        "lane": node.lane,
        "alive": node.in_window,
        "best": node.best,
        "counts": node.counts,
        "heldOut": node.member.held_out,
        "text": prompt.text,
        "diffs": [word_diff(texts[parent], prompt.text) for parent in prompt.parents],
    }
