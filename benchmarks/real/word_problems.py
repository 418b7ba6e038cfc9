"""Word problems with one sentence that has nothing to do with the question, made by rule.

A model of 1.5 billion parameters solves the stories without that sentence, and often counts its
number in with it. A prompt can say so, which makes them a task for ProRefine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Story(NamedTuple):
    """A story and its question, with the right answer; `sentences` are those that do not matter."""

    facts: str
    question: str
    answer: int
    sentences: tuple[str, ...]


def bakery(draw: random.Random) -> Story:
    trays, rolls, burnt = draw.randint(5, 9), draw.randint(14, 28), draw.randint(3, 6)
    sold, other = draw.randint(11, 35), draw.randint(2, 4)
    return Story(
        facts=f"A baker has {trays} trays with {rolls} rolls each. {burnt} rolls on each tray are "
        f"burnt and thrown away. {sold} rolls are sold in the first hour.",
        question="How many rolls are left?",
        answer=trays * (rolls - burnt) - sold,
        sentences=(
            f"{other} of the trays are washed afterwards.",
            f"{other} assistants work in the shop.",
            f"{other} loaves are baked in another oven.",
        ),
    )


def book(draw: random.Random) -> Story:
    pages, days, last = draw.randint(14, 38), draw.randint(4, 9), draw.randint(5, 25)
    length, other = draw.randint(400, 520), draw.randint(6, 40)
    return Story(
        facts=f"A book has {length} pages. Ana reads {pages} pages a day for {days} days and then "
        f"{last} pages on one more day.",
        question="How many pages of the book has Ana left to read?",
        answer=length - pages * days - last,
        sentences=(
            f"Her brother reads {other} pages of another book.",
            f"{other} of the pages that she has read have a picture.",
            f"She reads {other} of the pages a second time.",
        ),
    )


def orchard(draw: random.Random) -> Story:
    rows, trees, felled = draw.randint(6, 14), draw.randint(12, 35), draw.randint(3, 9)
    planted, other = draw.randint(11, 60), draw.randint(5, 20)
    return Story(
        facts=f"An orchard has {rows} rows of {trees} trees. A storm fells {felled} trees in each "
        f"row. The owner then plants {planted} new trees.",
        question="How many trees stand in the orchard now?",
        answer=rows * (trees - felled) + planted,
        sentences=(
            f"{other} of the trees have no fruit this year.",
            f"The neighbour plants {other} trees as well.",
            f"{other} of the felled trees are sawn into boards.",
        ),
    )


def ages(draw: random.Random) -> Story:
    age, times, younger = draw.randint(4, 12), draw.randint(3, 6), draw.randint(2, 9)
    years, other = draw.randint(3, 15), draw.randint(2, 9)
    name = draw.choice(["Tom", "Mia", "Ben", "Eva", "Leo", "Ida"])
    return Story(
        facts=f"{name} is {age} years old. The aunt of {name} is {times} times as old as {name}. "
        f"The uncle of {name} is {younger} years younger than the aunt.",
        question=f"How old will the uncle of {name} be in {years} years?",
        answer=age * times - younger + years,
        sentences=(
            f"The aunt has lived in the town for {other} years.",
            f"A cousin of {name} is {other} years older than {name}.",
            f"The uncle married {other} years ago.",
        ),
    )


STORIES: tuple[Callable[[random.Random], Story], ...] = (bakery, book, orchard, ages)


def make_word_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with `question` and `answers`, as many of each story.

    Args:
        count (`int`): Number of rows.
        seed (`int`): Seed of the numbers and of the sentences.
    """
    draw = random.Random(f"word problems {seed}")
    rows = []
    for number in range(count):
        story = STORIES[number % len(STORIES)](draw)
        text = f"{story.facts} {draw.choice(story.sentences)} {story.question}"
        rows.append({"question": text, "answers": [str(story.answer)]})
    return rows
