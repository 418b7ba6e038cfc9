"""Draws the rooms and the imports between them, read from the source: `docs/images/rooms.svg`.

    python docs/tools/draw_rooms.py            # write the picture again
    python docs/tools/draw_rooms.py --check    # exit status 1 if the picture differs from the source

`tests/support/rooms.py` reads the imports and has the order of the rooms;
`tests/whole/test_architecture.py` checks both.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.rooms import ABOVE_THE_TORCH_LINE, MODULES, PACKAGE, ROOMS, imports_of, room  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "rooms.svg"
WIDTH, ROW, BOX, HEIGHT = 1000, 92, 136, 44
# The place of a room from left to right; its floor follows from its imports.
COLUMN = {
    "records": 1.8,
    "versions": 3,
    "llm": 1.8,
    "rollout": 1.8,
    "environments": 0,
    "programs": 0.85,
    "rewards": 1.8,
    "refine": 1.8,
    "evolution": 3,
    "data": 4,
    "evaluation": 3.1,
    "harnesses": 0.2,
    "local": 1.1,
    "serve": 2,
    "report": 3.1,
    "interop": 4,
    "agent": 1.1,
    "trainers": 2.4,
    "sandbox": 1.1,
    "planning": 0,
    "cli": 2,
}
SAYS = {
    "records": "crash-safe files",
    "versions": "code and weights",
    "llm": "large LLMs",
    "rollout": "episodes, tokens",
    "environments": "answer the agent",
    "programs": "agents as they are",
    "harnesses": "command-line agents",
    "rewards": "scores",
    "evolution": "E-SPL's prompts",
    "refine": "ProRefine",
    "data": "data sets",
    "evaluation": "metrics, intervals",
    "local": "models in process",
    "interop": "adapters",
    "trainers": "TRL",
    "agent": "PromptAgent",
    "sandbox": "scripted world",
    "planning": "memory, time, cost",
    "report": "HTML report",
    "serve": "HTTP service",
    "cli": "command line",
}


def read_imports() -> dict[str, set[str]]:
    """For each room the other rooms that it imports from."""
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for path in MODULES:
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == PACKAGE and parts[1:2] and parts[1] in ROOMS and parts[1] != room(path):
                found[room(path)].add(parts[1])
    return found


def without_detours(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same arrows without those that follow from longer paths (the transitive reduction)."""
    reach: dict[str, set[str]] = {}
    for name in ROOMS:  # in order: what a room imports comes before it
        reach[name] = needs[name].union(*(reach[other] for other in needs[name]))
    return {
        name: {one for one in needs[name] if not any(one in reach[o] for o in needs[name])}
        for name in ROOMS
    }


def floors(needs: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the top one first: each below all that it imports, torch rooms below all
    others.
    """
    level: dict[str, int] = {}
    for name in ROOMS:
        lowest = (
            0
            if name in ABOVE_THE_TORCH_LINE
            else 1 + max(level[one] for one in ABOVE_THE_TORCH_LINE)
        )
        level[name] = max([lowest, *(level[other] + 1 for other in needs[name])])
    return [
        [name for name in ROOMS if level[name] == floor] for floor in range(max(level.values()) + 1)
    ]


def draw() -> str:
    """The picture as SVG."""
    needs = read_imports()
    rows = floors(needs)
    place = {}
    for y, row in enumerate(rows):
        for name in row:
            place[name] = (20 + COLUMN.get(name, 4) * (WIDTH - 40 - BOX) / 4, 24 + y * ROW)
    parts = [
        _arrow(place[name], place[other])
        for name, used in without_detours(needs).items()
        for other in sorted(used)
    ]
    parts += [_box(name, *place[name]) for name in ROOMS]
    torch = 24 + sum(row[0] in ABOVE_THE_TORCH_LINE for row in rows) * ROW - (ROW - HEIGHT) / 2
    parts.append(
        f'<line x1="8" x2="{WIDTH - 8}" y1="{torch:g}" y2="{torch:g}" stroke="#b4532a" stroke-dasharray="6 5"/>'
        f'<text x="{WIDTH - 8}" y="{torch - 6:g}" class="s" style="text-anchor:end" fill="#b4532a">torch below</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {24 + len(rows) * ROW}" role="img" '
        'aria-label="The rooms of the package; an arrow leads from a room to one that it imports">\n'
        "<style>text{font:600 14px system-ui,sans-serif;text-anchor:middle}.s{font:12px system-ui,sans-serif}</style>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _box(name: str, x: float, y: float) -> str:
    fill, edge = ("#e8edfb", "#3f51b5") if name in ABOVE_THE_TORCH_LINE else ("#fbeee8", "#b4532a")
    middle = x + BOX / 2
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{edge}"/>'
        f'<text x="{middle:.0f}" y="{y + 19:.0f}" fill="#222">{name}</text>'
        f'<text x="{middle:.0f}" y="{y + 35:.0f}" class="s" fill="#555">{escape(SAYS.get(name, ""))}</text>'
    )


def _arrow(below: tuple[float, float], above: tuple[float, float]) -> str:
    """A curve from the upper edge of one box to the lower edge of another."""
    x1, y1, x2, y2 = below[0] + BOX / 2, below[1], above[0] + BOX / 2, above[1] + HEIGHT
    bend = min(60.0, (y1 - y2) * 0.6)
    head = f"M{x2 - 4:.0f} {y2 + 8:.0f}L{x2:.0f} {y2 + 1:.0f}L{x2 + 4:.0f} {y2 + 8:.0f}"
    curve = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 - bend:.0f} {x2:.0f} {y2 + bend:.0f} {x2:.0f} {y2 + 2:.0f}"
    return f'<path d="{curve}{head}" fill="none" stroke="#8a8f98" stroke-width="1.3"/>'


if __name__ == "__main__":
    drawn = draw()
    if "--check" in sys.argv:
        sys.exit(
            0
            if PICTURE.read_text(encoding="utf-8") == drawn
            else "docs/images/rooms.svg is old: draw it again"
        )
    PICTURE.write_text(drawn, encoding="utf-8")
