"""Word problems with one sentence that has nothing to do with the question, made by rule.

A model of 1.5 billion parameters solves most of the stories without that sentence; with it, the
model often calculates with the sentence's number too. A critic could notice that, which makes them
a task for ProRefine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Story(NamedTuple):
    """A story and its question.

    Args:
        facts (`str`): The sentences that the answer follows from.
        question (`str`): What is asked.
        answer (`int`): The right answer.
        distractions (`tuple[str, ...]`): Sentences that do not matter, one of which is added.
    """

    facts: str
    question: str
    answer: int
    distractions: tuple[str, ...]


def bakery(draw: random.Random) -> Story:
    trays = draw.randint(5, 9)
    rolls = draw.randint(14, 28)
    burnt = draw.randint(3, 6)
    sold = draw.randint(11, 35)
    distraction = draw.randint(2, 4)
    return Story(
        facts=f"A baker has {trays} trays with {rolls} rolls each. {burnt} rolls on each tray are "
        f"burnt and thrown away. {sold} rolls are sold in the first hour.",
        question="How many rolls are left?",
        answer=trays * (rolls - burnt) - sold,
        distractions=(
            f"{distraction} of the trays are washed afterwards.",
            f"{distraction} assistants work in the shop.",
            f"{distraction} loaves are baked in another oven.",
        ),
    )


def book(draw: random.Random) -> Story:
    pages = draw.randint(14, 38)
    days = draw.randint(4, 9)
    last = draw.randint(5, 25)
    length = draw.randint(400, 520)
    distraction = draw.randint(6, 40)
    return Story(
        facts=f"A book has {length} pages. Ana reads {pages} pages a day for {days} days and then "
        f"{last} pages on one more day.",
        question="How many pages of the book has Ana left to read?",
        answer=length - pages * days - last,
        distractions=(
            f"Her brother reads {distraction} pages of another book.",
            f"{distraction} of the pages that she has read have a picture.",
            f"She reads {distraction} of the pages a second time.",
        ),
    )


def orchard(draw: random.Random) -> Story:
    rows = draw.randint(6, 14)
    trees = draw.randint(12, 35)
    felled = draw.randint(3, 9)
    planted = draw.randint(11, 60)
    distraction = draw.randint(5, 20)
    return Story(
        facts=f"An orchard has {rows} rows of {trees} trees. A storm fells {felled} trees in each "
        f"row. The owner then plants {planted} new trees.",
        question="How many trees stand in the orchard now?",
        answer=rows * (trees - felled) + planted,
        distractions=(
            f"{distraction} of the trees have no fruit this year.",
            f"The neighbour plants {distraction} trees as well.",
            f"{distraction} of the felled trees are sawn into boards.",
        ),
    )


def ages(draw: random.Random) -> Story:
    age = draw.randint(4, 12)
    times = draw.randint(3, 6)
    younger = draw.randint(2, 9)
    years = draw.randint(3, 15)
    distraction = draw.randint(2, 9)
    name = draw.choice(["Tom", "Mia", "Ben", "Eva", "Leo", "Ida"])
    return Story(
        facts=f"{name} is {age} years old. The aunt of {name} is {times} times as old as {name}. "
        f"The uncle of {name} is {younger} years younger than the aunt.",
        question=f"How old will the uncle of {name} be in {years} years?",
        answer=age * times - younger + years,
        distractions=(
            f"The aunt has lived in the town for {distraction} years.",
            f"A cousin of {name} is {distraction} years older than {name}.",
            f"The uncle married {distraction} years ago.",
        ),
    )


STORIES: tuple[Callable[[random.Random], Story], ...] = (bakery, book, orchard, ages)


def make_word_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with `question` and `answers`; the stories take turns.

    Args:
        count (`int`): Number of rows.
        seed (`int`): Seed of the numbers and of the distractions.
    """
    draw = random.Random(f"word problems {seed}")
    rows = []
    for number in range(count):
        story = STORIES[number % len(STORIES)](draw)
        text = f"{story.facts} {draw.choice(story.distractions)} {story.question}"
        rows.append({"question": text, "answers": [str(story.answer)]})
    return rows
