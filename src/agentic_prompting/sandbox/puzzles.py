"""Word-sorting and object-counting questions made by rule, in the wording of BIG-Bench Hard: ProRefine's sandbox.

The answers are known by construction and scored by the same functions as those of the real sets. Whoever reads a
question back (`read_puzzle`) sees the question's text only: the scripted models of `puzzle_models.py` are shown no more
than real ones are. No torch here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..rewards import REASONING_SCORERS

SORTING, COUNTING = "bbh_word_sorting", "bbh_object_counting"
"""The kinds of puzzle, named like the real sets: their scorers and starting prompts apply."""

_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_KINDS = {
    "fruits": "apple banana mango papaya plum lemon fig melon kiwi",
    "vegetables": "carrot onion turnip leek cabbage parsnip radish yam",
    "animals": "goat rabbit hen duck cow frog snail pig",
    "musical instruments": "flute violin drum piano trumpet clarinet accordion banjo",
    "pieces of furniture": "table chair couch bed stool wardrobe bench desk",
}
THINGS = {thing: kind for kind, things in _KINDS.items() for thing in things.split()}
"""Everything that is counted, with its kind."""

# Families of words that share their first letters: what an alphabetical order goes wrong on.
_STEMS = ["bar", "can", "der", "fla", "gra", "hol", "mar", "pen", "ros", "sta", "tra", "wil"]
_ENDINGS = ["d", "ge", "k", "ley", "m", "ness", "on", "ry", "st", "ter", "ther", "ton"]


@dataclass(frozen=True)
class Puzzle:
    """What a question says, read from its text.

    Args:
        kind (`str`): `"bbh_word_sorting"` or `"bbh_object_counting"`.
        items (`tuple[tuple[str, int], ...]`): The words, or the things with how many there are; words count 1.
        wanted (`str`, *optional*, defaults to `""`): The kind of things asked for; empty for words.
    """

    kind: str
    items: tuple[tuple[str, int], ...]
    wanted: str = ""

    @property
    def answer(self) -> str:
        """The right answer, in the form of the real set's."""
        if self.kind == SORTING:
            return " ".join(sorted(word for word, _ in self.items))
        return str(sum(count for thing, count in self.items if THINGS[thing] == self.wanted))

    @property
    def question(self) -> str:
        """The question, in the words of the real set."""
        if self.kind == SORTING:
            return "Sort the following words alphabetically: List: " + " ".join(word for word, _ in self.items)
        named = [
            f"{_article(thing)} {thing}" if n == 1 else f"{_NUMBERS[n - 1]} {_plural(thing)}" for thing, n in self.items
        ]
        return f"I have {', '.join(named[:-1])}, and {named[-1]}. How many {self.wanted} do I have?"


def make_puzzles(n: int, seed: int = 0, kinds: Sequence[str] = (SORTING, COUNTING)) -> list[dict[str, Any]]:
    """Puzzles as rows in the schema of `load_task`, the kinds in turn; no question twice.

    Args:
        n (`int`): How many.
        seed (`int`, *optional*, defaults to `0`): The same seed gives the same rows, and more of them with a larger n.
        kinds (`Sequence[str]`, *optional*): Which kinds.

    Returns:
        `list[dict]`: `question`, `answers`, `id` and `task`, the kind.
    """
    rng = random.Random(f"puzzles {seed}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < n:
        kind = kinds[len(rows) % len(kinds)]
        puzzle = _words(rng) if kind == SORTING else _things(rng)
        row = {"question": puzzle.question, "answers": [puzzle.answer], "id": f"{seed}-{len(rows)}", "task": kind}
        rows.setdefault(puzzle.question, row)
    return list(rows.values())


def read_puzzle(question: str) -> Puzzle | None:
    """The puzzle in a question's text; `None` if there is none."""
    if found := re.search(r"alphabetically: List: (.+)", question):
        return Puzzle(SORTING, tuple((word, 1) for word in found[1].split()))
    if found := re.search(r"I have (.+)\. How many ([\w ]+) do I have\?", question):
        items = [_read_item(item) for item in re.split(r", (?:and )?", found[1])]
        if found[2] in _KINDS and all(thing in THINGS and count for thing, count in items):
            return Puzzle(COUNTING, tuple(items), found[2])
    return None


def score_puzzle(prediction: str, answers: Sequence[str]) -> float:
    """The score of the real set that an accepted answer belongs to: numbers are counts, words a sorted list."""
    kind = COUNTING if all(answer.isdigit() for answer in answers) else SORTING
    return REASONING_SCORERS[kind](prediction, answers)


def _words(rng: random.Random) -> Puzzle:
    family = rng.choice(_STEMS)
    every = [stem + ending for stem in _STEMS for ending in _ENDINGS]
    words = set(rng.sample([family + ending for ending in _ENDINGS], rng.randint(2, 3)))
    size = rng.randint(5, 14)
    while len(words) < size:
        words.add(rng.choice(every))
    mixed = sorted(words)
    rng.shuffle(mixed)
    return Puzzle(SORTING, tuple((word, 1) for word in mixed))


def _things(rng: random.Random) -> Puzzle:
    wanted = rng.choice(list(_KINDS))
    strays = [thing for thing, kind in THINGS.items() if kind != wanted]
    things = rng.sample(_KINDS[wanted].split(), rng.randint(3, 7)) + rng.sample(strays, rng.randint(1, 3))
    rng.shuffle(things)
    return Puzzle(COUNTING, tuple((thing, rng.choice((1, 1, 2, 3, 4, 5))) for thing in things), wanted)


def _read_item(text: str) -> tuple[str, int]:
    number, _, thing = text.strip().partition(" ")
    count = 1 if number in ("a", "an") else _NUMBERS.index(number) + 1 if number in _NUMBERS else 0
    return next((name for name in THINGS if thing in (name, _plural(name))), thing), count


def _article(thing: str) -> str:
    return "an" if thing[0] in "aeiou" else "a"


def _plural(thing: str) -> str:
    if thing.endswith(("sh", "ch")):
        return thing + "es"
    return thing.removesuffix("y") + "ies" if thing.endswith("y") else thing + "s"
