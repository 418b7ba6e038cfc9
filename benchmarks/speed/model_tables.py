"""The tables of the speed figures on a real model.

Importing this module needs no torch, as `recompute.py` wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from benchmarks.lab import markdown


def engine_table(settings: Sequence[dict[str, Any]]) -> str:
    """The settings as a Markdown table."""
    titles = ["way", "precision", "rows", "engine, tokens/s", "`generate`", "engine / `generate`"]
    titles += ["matrix products alone", "share of that limit", "llama.cpp, its file"]
    lines = []
    for row in settings:
        llama_cpp = row["llama_cpp_tokens_per_s"]
        cells = [row["way"], row["precision"], row["rows"], row["engine_tokens_per_s"]]
        cells += [row["generate_tokens_per_s"], f"{row['ratio']:.2f}", row["limit_tokens_per_s"]]
        cells += [f"{row['of_limit']:.2f}", "" if llama_cpp is None else llama_cpp]
        lines.append(cells)
    return markdown(titles, lines)


def parts_table(parts: dict[str, dict[str, float]]) -> str:
    """The shares of the largest runs as a Markdown table."""
    groups = list(dict.fromkeys(chain.from_iterable(parts.values())))
    lines = []
    for setting, shares in parts.items():
        cells = [f"{shares.get(group, 0.0):.2f}" for group in groups]
        lines.append([setting, *cells])
    return markdown(["setting", *groups], lines)


def updates_table(updates: Sequence[dict[str, Any]]) -> str:
    """The updates as a Markdown table."""
    titles = ["way", "precision", "head at every position, s", "at the scored ones, s", "ratio"]
    titles.append("difference of the losses")
    lines = []
    for row in updates:
        seconds = [f"{row[name]:.2f}" for name in ("every_position_s", "scored_positions_s")]
        cells = [row["way"], row["precision"], *seconds, f"{row['ratio']:.2f}"]
        lines.append([*cells, f"{row['loss_difference']:.0e}"])
    return markdown(titles, lines)
