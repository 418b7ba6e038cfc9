"""ProRefine's sandbox: puzzles made by rule, and four scripted models that answer, criticise, edit and judge them.

The puzzles are word sorting and object counting in the wording of BIG-Bench Hard. Their answers are known by
construction, and the functions that score the real sets score them too.

Each model reads only its messages, as a real model would; none of them sees the accepted answers. They solve the
puzzles themselves, and sometimes make mistakes. The rate of mistakes is an argument, set by hand: accuracies here show
that the loop works, not how good models are. Whether a model makes a mistake follows from the seed and its messages, so
that a run can be repeated.

The mistakes of the task model depend on its prompt (`FAULTS`). One piece of advice does harm: if the prompt asks for
short answers, the model skips its steps and makes the mistakes that other advice had prevented. In this way refining
can spoil a right answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..llm import ChatModel, Message, Reply, ScriptedChat, Usage
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
    """The content of a question, read from its text.

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
            return "Sort the following words alphabetically: List: " + " ".join(
                word for word, _ in self.items
            )
        named = [
            f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
            if n == 1
            else f"{_NUMBERS[n - 1]} {_plural(thing)}"
            for thing, n in self.items
        ]
        return f"I have {', '.join(named[:-1])}, and {named[-1]}. How many {self.wanted} do I have?"


def make_puzzles(
    n: int, seed: int = 0, kinds: Sequence[str] = (SORTING, COUNTING)
) -> list[dict[str, Any]]:
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
        row = {
            "question": puzzle.question,
            "answers": [puzzle.answer],
            "id": f"{seed}-{len(rows)}",
            "task": kind,
        }
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
    things = rng.sample(_KINDS[wanted].split(), rng.randint(3, 7)) + rng.sample(
        strays, rng.randint(1, 3)
    )
    rng.shuffle(things)
    return Puzzle(
        COUNTING, tuple((thing, rng.choice((1, 1, 2, 3, 4, 5))) for thing in things), wanted
    )


def _read_item(text: str) -> tuple[str, int]:
    number, _, thing = text.strip().partition(" ")
    count = 1 if number in ("a", "an") else _NUMBERS.index(number) + 1 if number in _NUMBERS else 0
    return next((name for name in THINGS if thing in (name, _plural(name))), thing), count


def _plural(thing: str) -> str:
    if thing.endswith(("sh", "ch")):
        return thing + "es"
    return thing.removesuffix("y") + "ies" if thing.endswith("y") else thing + "s"


# --- the models -------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Something the task model gets wrong.

    Args:
        kind (`str`): In which kind of puzzle.
        heeded (`str`): The words in a prompt that (mostly) prevent it.
        remark (`str`): What the critic says of it.
        advice (`str`): What the optimizer makes of the remark.
    """

    kind: str
    heeded: str
    remark: str
    advice: str


FAULTS = {
    "ties": Fault(
        SORTING,
        "letter by letter",
        "Words that begin with the same letter are out of order.",
        "Compare words that begin alike letter by letter.",
    ),
    "lost": Fault(
        SORTING,
        "every word",
        "A word of the list is missing.",
        "Make sure that every word of the list is there.",
    ),
    "multiples": Fault(
        COUNTING,
        "of each thing",
        "Things of which there are several were counted as one.",
        "Add up how many there are of each thing.",
    ),
    "strays": Fault(
        COUNTING,
        "leave out",
        "Something was counted that is not of the kind asked for.",
        "Leave out whatever is not of the kind asked for.",
    ),
}
"""What can go wrong, by name."""

TOO_LONG, KEEP_SHORT = "This is longer than it has to be.", "Keep the answer short."
NO_STEPS, SHOW_STEPS = "The result is wrong, and no steps show why.", "Show your steps."
BE_CAREFUL = "Be careful."
"""What an optimizer writes that has missed the point. Changes nothing."""

_REPLIES = {
    **{fault.remark: fault.advice for fault in FAULTS.values()},
    TOO_LONG: KEEP_SHORT,
    NO_STEPS: SHOW_STEPS,
}


def prompt_writer() -> ScriptedChat:
    """A reference LLM that writes system prompts for the puzzles, for [`headroom`]: each piece of advice alone, two of
    them together, and some that do nothing or harm."""
    advice = [fault.advice for fault in FAULTS.values()]
    pairs = [f"{advice[0]} {advice[1]}", f"{advice[2]} {advice[3]}"]
    texts = [
        *pairs,
        *advice,
        SHOW_STEPS,
        KEEP_SHORT,
        "You are a helpful assistant.",
        "Work carefully.",
    ]
    return ScriptedChat(["\n".join(f"<prompt>{text}</prompt>" for text in texts)])


class PuzzleSolver:
    """The task model: works a puzzle out step by step, heeding its system message. Words are its tokens.

    Args:
        seed (`int`, *optional*, defaults to `0`): Which slips it makes.
        carelessness (`float`, *optional*, defaults to `0.4`): Probability of each fault where nothing prevents it.
        in_spite (`float`, *optional*, defaults to `0.1`): Share of these that happen although the prompt warns.
    """

    def __init__(self, seed: int = 0, carelessness: float = 0.4, in_spite: float = 0.1):
        self.seed, self.carelessness, self.in_spite = seed, carelessness, in_spite
        self.model = (
            f"sandbox task model {seed} {carelessness} {in_spite}"  # what results files know it by
        )

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]. Cuts off after `max_tokens` words; ignores other sampling arguments."""
        system = " ".join(message["content"] for message in messages if message["role"] == "system")
        words = self.answer(system, messages[-1]["content"]).split(" ")
        limit = sampling.get("max_tokens") or len(words)
        usage = Usage(
            sum(len(message["content"].split()) for message in messages), min(limit, len(words))
        )
        return Reply(
            " ".join(words[:limit]),
            finish_reason="length" if len(words) > limit else "stop",
            usage=usage,
        )

    def answer(self, prompt: str, question: str) -> str:
        """The whole answer to a question under a prompt."""
        puzzle = read_puzzle(question)
        if puzzle is None:
            return "I only know how to sort words and to count things."
        prompt = prompt.lower()
        short = "short" in prompt and "steps." not in prompt
        slips = {
            name
            for name, fault in FAULTS.items()
            if _draw("slip", self.seed, name, question, short)
            < self.carelessness * (self.in_spite if fault.heeded in prompt and not short else 1.0)
        }
        steps, result = (_sorted if puzzle.kind == SORTING else _counted)(puzzle, slips)
        return f"Answer: {result}" if short else f"{steps}\nAnswer: {result}"


class PuzzleCritic(ScriptedChat):
    """The feedback model: checks the steps that are there against the question, one remark for each kind of fault.

    Args:
        seed (`int`, *optional*, defaults to `0`): When it is wrong.
        misses (`float`, *optional*, defaults to `0.15`): Probability that it finds nothing where something is wrong.
        alarms (`float`, *optional*, defaults to `0.15`): Probability that it complains where nothing is wrong.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, misses: float = 0.15, alarms: float = 0.15, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.misses, self.alarms, self.model = (
            misses,
            alarms,
            f"sandbox critic {seed} {misses} {alarms}",
        )

    def reply(self, messages: Sequence[Message]) -> str:
        question, output, _ = _parts(messages, "Question:", "Output:")
        puzzle, draw = read_puzzle(question), _draw(self.model, question, output)
        if remarks := _remarks(puzzle, output) if puzzle else []:
            return " ".join(remarks) if draw >= self.misses else "CORRECT"
        return "CORRECT" if draw >= self.alarms else TOO_LONG


class PuzzleOptimizer(ScriptedChat):
    """The optimizer: turns each remark into a sentence of the prompt, and leaves the rest of it as it is.

    Args:
        seed (`int`, *optional*, defaults to `0`): When it is wrong.
        vague (`float`, *optional*, defaults to `0.1`): Probability that it misses the point of the feedback.
        untagged (`float`, *optional*, defaults to `0.05`): Probability that it forgets the tags.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, vague: float = 0.1, untagged: float = 0.05, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.vague, self.untagged, self.model = (
            vague,
            untagged,
            f"sandbox optimizer {seed} {vague} {untagged}",
        )

    def reply(self, messages: Sequence[Message]) -> str:
        prompt, feedback = _parts(messages, "Prompt:", "Feedback:")
        draw = _draw(self.model, prompt, feedback)
        advice = [sentence for remark, sentence in _REPLIES.items() if remark in feedback]
        if advice and draw < self.vague:
            advice = [BE_CAREFUL]
        if SHOW_STEPS in advice:
            prompt = prompt.replace(f"\n{KEEP_SHORT}", "")
        improved = "\n".join([prompt, *(sentence for sentence in advice if sentence not in prompt)])
        return (
            improved
            if draw > 1 - self.untagged
            else f"<IMPROVED_PROMPT>{improved}</IMPROVED_PROMPT>"
        )


class PuzzleVerifier(ScriptedChat):
    """The verifier: works the question out and compares, and errs both ways.

    Args:
        seed (`int`, *optional*, defaults to `0`): When it is wrong.
        errs (`float`, *optional*, defaults to `0.1`): Probability of the wrong verdict.
        silent (`float`, *optional*, defaults to `0.02`): Probability of none.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, errs: float = 0.1, silent: float = 0.02, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.errs, self.silent, self.model = (
            errs,
            silent,
            f"sandbox verifier {seed} {errs} {silent}",
        )

    def reply(self, messages: Sequence[Message]) -> str:
        question, output = _parts(messages, "Question:", "Prediction:")
        puzzle, draw = read_puzzle(question), _draw(self.model, question, output)
        if puzzle is None or draw > 1 - self.silent:
            return "I cannot tell."
        right = bool(score_puzzle(output, [puzzle.answer])) != (draw < self.errs)
        return f"I worked it out and compared. <ACCURACY>{int(right)}</ACCURACY>"


def puzzle_models(seed: int = 0, latency: float = 0.0) -> dict[str, ChatModel]:
    """All four with their defaults, as keyword arguments of [`ProRefiner`].

    Args:
        seed (`int`, *optional*, defaults to `0`): The seed of all four.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until a reply arrives, for all but the task model.
    """
    return {
        "task": PuzzleSolver(seed),
        "feedback": PuzzleCritic(seed, latency=latency),
        "optimizer": PuzzleOptimizer(seed, latency=latency),
        "verifier": PuzzleVerifier(seed, latency=latency),
    }


def _sorted(puzzle: Puzzle, slips: set[str]) -> tuple[str, str]:
    """The steps and the result of a word sorting: the words of each first letter, in order."""
    words = [word for word, _ in puzzle.items]
    if "lost" in slips and len(words) > 8:  # only long lists lose a word
        words.pop()
    groups = [
        [word for word in words if word[0] == letter]
        for letter in sorted({word[0] for word in words})
    ]
    if "ties" not in slips:
        groups = [sorted(group) for group in groups]
    steps = [f"{group[0][0]}: {', '.join(group)}." for group in groups]
    return "By first letters:\n" + "\n".join(steps), " ".join(
        word for group in groups for word in group
    )


def _counted(puzzle: Puzzle, slips: set[str]) -> tuple[str, str]:
    """The steps and the result of a count: each thing that is of the kind, and the sum so far."""
    strays = [thing for thing, _ in puzzle.items if THINGS[thing] != puzzle.wanted]
    taken_for_one = strays[:1] if "strays" in slips else []
    total, steps = 0, []
    for thing, count in puzzle.items:
        if THINGS[thing] == puzzle.wanted or thing in taken_for_one:
            count = 1 if "multiples" in slips else count
            total += count
            steps.append(f"{thing}: {count}, so {total}.")
    return f"The {puzzle.wanted}:\n" + "\n".join(steps), str(total)


def _remarks(puzzle: Puzzle, output: str) -> list[str]:
    """The mistakes in an output, which may be incomplete."""
    lines = re.findall(r"^(\w+): (.+)\.$", output, re.MULTILINE)
    if not lines and "Answer: " in output:
        return [] if score_puzzle(output, [puzzle.answer]) else [NO_STEPS]
    found = (_sorting_faults if puzzle.kind == SORTING else _counting_faults)(puzzle, lines)
    return [fault.remark for name, fault in FAULTS.items() if name in found]


def _sorting_faults(puzzle: Puzzle, lines: list[tuple[str, str]]) -> set[str]:
    found = set()
    for letter, text in lines:
        group = text.split(", ")
        if group != sorted(group):
            found.add("ties")
        if len(group) < sum(word[0] == letter for word, _ in puzzle.items):
            found.add("lost")
    letters = {letter for letter, _ in lines}
    if any(
        word[0] < max(letters, default="") and word[0] not in letters for word, _ in puzzle.items
    ):
        found.add("lost")
    return found


def _counting_faults(puzzle: Puzzle, lines: list[tuple[str, str]]) -> set[str]:
    counts, found = dict(puzzle.items), set()
    for thing, text in lines:
        if THINGS.get(thing) != puzzle.wanted:
            found.add("strays")
        if int(text.split(",")[0]) < counts.get(thing, 0):
            found.add("multiples")
    return found


def _parts(messages: Sequence[Message], *headings: str) -> list[str]:
    """What stands under each heading of the last message, in the form of `refine/templates.py`; then what is left."""
    pattern = r"\n\n".join(f"{heading}\n(.*)" for heading in headings)
    rest = r"\n\n(.*)" if headings[-1] == "Output:" else ""
    found = re.fullmatch(pattern + rest, messages[-1]["content"], re.DOTALL)
    if found is None:
        raise ValueError(f"expected {' and '.join(headings)}, got {messages[-1]['content']!r:.200}")
    return list(found.groups())


def _draw(*of: object) -> float:
    """A number in [0, 1) that follows from `of` alone: no state, the same in every process."""
    return random.Random(repr(of)).random()
