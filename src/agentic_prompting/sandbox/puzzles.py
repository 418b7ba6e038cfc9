"""ProRefine's sandbox: puzzles made by rule, and four scripted models that answer, criticise, edit
and judge them.

The puzzles are word sorting and object counting in the wording of BIG-Bench Hard. Their answers are
known by construction, and the functions that score the real sets score them too.

Each model reads only its messages, as a real model would; none of them sees the accepted answers.
They solve the puzzles themselves, and sometimes make mistakes. The rate of mistakes is an argument,
set by hand: accuracies here show that the loop works, not how good models are. Whether a model
makes a mistake follows from the seed and its messages, so a run can be repeated.

The mistakes of the task model depend on its prompt (`FAULTS`). One piece of advice does harm: if
the prompt asks for short answers, the model skips its steps and makes the mistakes that other
advice had prevented. In this way refining can spoil a right answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..llm import ChatModel, Message, Reply, ScriptedChat, Usage
from ..rewards import REASONING_SCORERS

SORTING = "bbh_word_sorting"
COUNTING = "bbh_object_counting"
# The puzzles' tasks are named like the real sets, so that their scorers and starting prompts apply.

_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_CATEGORIES = {
    "fruits": "apple banana mango papaya plum lemon fig melon kiwi",
    "vegetables": "carrot onion turnip leek cabbage parsnip radish yam",
    "animals": "goat rabbit hen duck cow frog snail pig",
    "musical instruments": "flute violin drum piano trumpet clarinet accordion banjo",
    "pieces of furniture": "table chair couch bed stool wardrobe bench desk",
}

OBJECTS: dict[str, str] = {}
"""Every object that a puzzle can count, with its category."""
for _category, _names in _CATEGORIES.items():
    OBJECTS.update(dict.fromkeys(_names.split(), _category))

# Families of words that share their first letters: what an alphabetical order goes wrong on.
_STEMS = ["bar", "can", "der", "fla", "gra", "hol", "mar", "pen", "ros", "sta", "tra", "wil"]
_ENDINGS = ["d", "ge", "k", "ley", "m", "ness", "on", "ry", "st", "ter", "ther", "ton"]


@dataclass(frozen=True)
class Puzzle:
    """The content of a question, read from its text.

    Args:
        task (`str`): `"bbh_word_sorting"` or `"bbh_object_counting"`.
        items (`tuple[tuple[str, int], ...]`): The words, each with the number 1, or the objects
            with their numbers.
        category (`str`, *optional*, defaults to `""`): The category of objects to count; empty for
            word sorting.
    """

    task: str
    items: tuple[tuple[str, int], ...]
    category: str = ""

    @property
    def answer(self) -> str:
        """The right answer, in the form of the real set's."""
        if self.task == SORTING:
            return " ".join(sorted(word for word, _ in self.items))
        return str(sum(count for name, count in self.items if OBJECTS[name] == self.category))

    @property
    def question(self) -> str:
        """The question, in the words of the real set."""
        if self.task == SORTING:
            words = " ".join(word for word, _ in self.items)
            return f"Sort the following words alphabetically: List: {words}"
        phrases = [_count_phrase(name, count) for name, count in self.items]
        listing = f"{', '.join(phrases[:-1])}, and {phrases[-1]}"
        return f"I have {listing}. How many {self.category} do I have?"


def make_puzzles(
    n: int, seed: int = 0, kinds: Sequence[str] = (SORTING, COUNTING)
) -> list[dict[str, Any]]:
    """Make puzzles as rows in the schema of `load_task`.

    Tasks alternate, and no question occurs twice.

    Args:
        n (`int`): Number of puzzles.
        seed (`int`, *optional*, defaults to `0`): The same seed gives the same rows, and a larger
            `n` extends them.
        kinds (`Sequence[str]`, *optional*): The tasks to make puzzles of.

    Returns:
        `list[dict]`: Rows with `question`, `answers`, `id` and `task`.
    """
    rng = random.Random(f"puzzles {seed}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < n:
        task = kinds[len(rows) % len(kinds)]
        # The tasks in turn; a question that exists already is dropped.
        puzzle = _draw_sorting_puzzle(rng) if task == SORTING else _draw_counting_puzzle(rng)
        row = {
            "question": puzzle.question,
            "answers": [puzzle.answer],
            "id": f"{seed}-{len(rows)}",
            "task": task,
        }
        rows.setdefault(puzzle.question, row)
    return list(rows.values())


def read_puzzle(question: str) -> Puzzle | None:
    """Read the puzzle in a question's text; `None` if there is none."""
    # Word sorting: the list goes up to the end of the line.
    sorting = re.search(r"alphabetically: List: (.+)", question)
    if sorting:
        return Puzzle(SORTING, tuple((word, 1) for word in sorting[1].split()))

    # Object counting: a list of phrases, and the category to count.
    counting = re.search(r"I have (.+)\. How many ([\w ]+) do I have\?", question)
    if counting is None:
        return None
    items = [_read_item(text) for text in re.split(r", (?:and )?", counting[1])]
    category = counting[2]
    # A question about unknown objects or numbers is not one of these puzzles.
    is_readable = all(name in OBJECTS and count for name, count in items)
    if category in _CATEGORIES and is_readable:
        return Puzzle(COUNTING, tuple(items), category)
    return None


def score_puzzle(prediction: str, answers: Sequence[str]) -> float:
    """Score a prediction as the real set does: numeric answers as counts, others as a
    sorted list.
    """
    is_counting = all(answer.isdigit() for answer in answers)
    scorer = REASONING_SCORERS[COUNTING if is_counting else SORTING]
    return scorer(prediction, answers)


def _draw_sorting_puzzle(rng: random.Random) -> Puzzle:
    # Two or three words of one family, so that there are ties between first letters.
    stem = rng.choice(_STEMS)
    family = [stem + ending for ending in _ENDINGS]
    words = set(rng.sample(family, rng.randint(2, 3)))

    # Fill up with words of all families.
    all_words: list[str] = []
    for any_stem in _STEMS:
        all_words += [any_stem + ending for ending in _ENDINGS]
    size = rng.randint(5, 14)
    while len(words) < size:
        words.add(rng.choice(all_words))

    # Sort before shuffling: the order of a set differs between processes.
    shuffled = sorted(words)
    rng.shuffle(shuffled)
    return Puzzle(SORTING, tuple((word, 1) for word in shuffled))


def _draw_counting_puzzle(rng: random.Random) -> Puzzle:
    category = rng.choice(list(_CATEGORIES))
    other_objects = [name for name, name_category in OBJECTS.items() if name_category != category]

    # Objects to count, and up to three that must not be counted.
    names = rng.sample(_CATEGORIES[category].split(), rng.randint(3, 7))
    names += rng.sample(other_objects, rng.randint(1, 3))
    rng.shuffle(names)

    items = tuple((name, rng.choice((1, 1, 2, 3, 4, 5))) for name in names)
    return Puzzle(COUNTING, items, category)


def _count_phrase(name: str, count: int) -> str:
    """`"an apple"` or `"three apples"`."""
    if count > 1:
        return f"{_NUMBERS[count - 1]} {_plural(name)}"
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}"


def _read_item(text: str) -> tuple[str, int]:
    """Return the object and its number in a phrase; the number is 0 if it is not readable."""
    number, _, noun = text.strip().partition(" ")
    if number in ("a", "an"):
        count = 1
    elif number in _NUMBERS:
        count = _NUMBERS.index(number) + 1
    else:
        count = 0

    # The noun stands in the singular or in the plural.
    for name in OBJECTS:
        if noun in (name, _plural(name)):
            return name, count
    return noun, count


def _plural(noun: str) -> str:
    if noun.endswith(("sh", "ch")):
        return noun + "es"
    if noun.endswith("y"):
        return noun.removesuffix("y") + "ies"
    return noun + "s"


# ---- the models ----


class Fault(NamedTuple):
    """Something the task model gets wrong.

    Args:
        task (`str`): The task in which it occurs.
        heeded (`str`): The words in a prompt that (mostly) prevent it.
        remark (`str`): The critic's remark about it.
        advice (`str`): The sentence that the optimizer makes of the remark.
    """

    task: str
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
"""The possible mistakes, by name."""

TOO_LONG = "This is longer than it has to be."
KEEP_SHORT = "Keep the answer short."
NO_STEPS = "The result is wrong, and no steps show why."
SHOW_STEPS = "Show your steps."
BE_CAREFUL = "Be careful."
"""The advice of an optimizer that has missed the point. Changes nothing."""

# The optimizer's advice for each remark of the critic.
_ADVICE = {fault.remark: fault.advice for fault in FAULTS.values()}
_ADVICE |= {TOO_LONG: KEEP_SHORT, NO_STEPS: SHOW_STEPS}


def prompt_writer() -> ScriptedChat:
    """Return a reference LLM that writes system prompts for the puzzles, for [`headroom`]: each
    piece of advice alone, pairs of them, and prompts without effect or with a harmful one.
    """
    advice = [fault.advice for fault in FAULTS.values()]
    prompts = [f"{advice[0]} {advice[1]}", f"{advice[2]} {advice[3]}", *advice]
    prompts += [SHOW_STEPS, KEEP_SHORT, "You are a helpful assistant.", "Work carefully."]
    reply = "\n".join(f"<prompt>{prompt}</prompt>" for prompt in prompts)
    return ScriptedChat([reply])


class PuzzleSolver:
    """The task model: solves a puzzle step by step and heeds its system message.

    Its tokens are words.

    Args:
        seed (`int`, *optional*, defaults to `0`): Decides which mistakes it makes.
        carelessness (`float`, *optional*, defaults to `0.4`): Probability of each fault where
            nothing prevents it.
        in_spite (`float`, *optional*, defaults to `0.1`): Share of these that happen although the
            prompt warns.
    """

    def __init__(self, seed: int = 0, carelessness: float = 0.4, in_spite: float = 0.1):
        self.seed = seed
        self.carelessness = carelessness
        self.in_spite = in_spite
        self.model = f"sandbox task model {seed} {carelessness} {in_spite}"  # its name in results

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`].

        Cuts off after `max_tokens` words; ignores other sampling arguments.
        """
        # The system message is the prompt, the last message the question.
        system_texts = [message["content"] for message in messages if message["role"] == "system"]
        words = self.answer(" ".join(system_texts), messages[-1]["content"]).split(" ")

        # Cut off as a real model would be.
        limit = sampling.get("max_tokens") or len(words)
        prompt_length = sum(len(message["content"].split()) for message in messages)
        return Reply(
            " ".join(words[:limit]),
            finish_reason="length" if len(words) > limit else "stop",
            usage=Usage(prompt_length, min(limit, len(words))),
        )

    def answer(self, prompt: str, question: str) -> str:
        """Return the whole answer to a question under a prompt."""
        puzzle = read_puzzle(question)
        if puzzle is None:
            return "I only know how to sort words and to count things."

        # Advice to be short makes the model skip its steps, and then no other advice helps.
        prompt = prompt.lower()
        is_short = "short" in prompt and "steps." not in prompt

        # Each fault is drawn by itself, also those of the other task.
        slips = set()
        for name, fault in FAULTS.items():
            probability = self.carelessness
            if fault.heeded in prompt and not is_short:
                probability *= self.in_spite
            if _draw("slip", self.seed, name, question, is_short) < probability:
                slips.add(name)

        # Solve the puzzle with these mistakes; a short answer is the result alone.
        solve = _solve_sorting if puzzle.task == SORTING else _solve_counting
        steps, result = solve(puzzle, slips)
        return f"Answer: {result}" if is_short else f"{steps}\nAnswer: {result}"


class PuzzleCritic(ScriptedChat):
    """The feedback model: checks the steps of an output against the question, one remark for each
    kind of fault.

    Args:
        seed (`int`, *optional*, defaults to `0`): Decides when it is wrong.
        misses (`float`, *optional*, defaults to `0.15`): Probability that it overlooks all
            mistakes.
        alarms (`float`, *optional*, defaults to `0.15`): Probability that it complains where
            nothing is wrong.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, misses: float = 0.15, alarms: float = 0.15, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.misses = misses
        self.alarms = alarms
        self.model = f"sandbox critic {seed} {misses} {alarms}"

    def reply(self, messages: Sequence[Message]) -> str:
        question, output, _ = _read_sections(messages, "Question:", "Output:")
        puzzle = read_puzzle(question)
        draw = _draw(self.model, question, output)

        # Find the mistakes, then overlook them or raise a false alarm at the set rates.
        remarks = [] if puzzle is None else _remarks(puzzle, output)
        if remarks:
            return " ".join(remarks) if draw >= self.misses else "CORRECT"
        return "CORRECT" if draw >= self.alarms else TOO_LONG


class PuzzleOptimizer(ScriptedChat):
    """The optimizer: turns each remark into a sentence of the prompt, and leaves the rest of it as
    it is.

    Args:
        seed (`int`, *optional*, defaults to `0`): Decides when it is wrong.
        vague (`float`, *optional*, defaults to `0.1`): Probability that it misses the point of the
            feedback.
        untagged (`float`, *optional*, defaults to `0.05`): Probability that it forgets the tags.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, vague: float = 0.1, untagged: float = 0.05, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.vague = vague
        self.untagged = untagged
        self.model = f"sandbox optimizer {seed} {vague} {untagged}"

    def reply(self, messages: Sequence[Message]) -> str:
        prompt, feedback = _read_sections(messages, "Prompt:", "Feedback:")
        draw = _draw(self.model, prompt, feedback)

        # Translate the remarks into advice, or miss the point.
        advice = [sentence for remark, sentence in _ADVICE.items() if remark in feedback]
        if advice and draw < self.vague:
            advice = [BE_CAREFUL]

        # Advice to show steps takes the place of advice to be short.
        if SHOW_STEPS in advice:
            prompt = prompt.replace(f"\n{KEEP_SHORT}", "")
        new_sentences = [sentence for sentence in advice if sentence not in prompt]
        improved = "\n".join([prompt, *new_sentences])
        # Sometimes the tags are forgotten.
        if draw > 1 - self.untagged:
            return improved
        return f"<IMPROVED_PROMPT>{improved}</IMPROVED_PROMPT>"


class PuzzleVerifier(ScriptedChat):
    """The verifier: solves the question, compares, and errs both ways.

    Args:
        seed (`int`, *optional*, defaults to `0`): Decides when it is wrong.
        errs (`float`, *optional*, defaults to `0.1`): Probability of the wrong verdict.
        silent (`float`, *optional*, defaults to `0.02`): Probability of no verdict.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until its reply arrives.
    """

    def __init__(
        self, seed: int = 0, errs: float = 0.1, silent: float = 0.02, latency: float = 0.0
    ):
        super().__init__(self.reply, latency)
        self.errs = errs
        self.silent = silent
        self.model = f"sandbox verifier {seed} {errs} {silent}"

    def reply(self, messages: Sequence[Message]) -> str:
        question, output = _read_sections(messages, "Question:", "Prediction:")
        puzzle = read_puzzle(question)
        draw = _draw(self.model, question, output)
        # There is nothing to judge, or the verdict fails to come.
        if puzzle is None or draw > 1 - self.silent:
            return "I cannot tell."

        # The right verdict, reversed at the rate of errors.
        verdict = bool(score_puzzle(output, [puzzle.answer]))
        if draw < self.errs:
            verdict = not verdict
        return f"I worked it out and compared. <ACCURACY>{int(verdict)}</ACCURACY>"


def puzzle_models(seed: int = 0, latency: float = 0.0) -> dict[str, ChatModel]:
    """Return all four models with their defaults, as keyword arguments of [`ProRefiner`].

    Args:
        seed (`int`, *optional*, defaults to `0`): The seed of all four.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until a reply arrives, for all but
            the task model.
    """
    return {
        "task": PuzzleSolver(seed),
        "feedback": PuzzleCritic(seed, latency=latency),
        "optimizer": PuzzleOptimizer(seed, latency=latency),
        "verifier": PuzzleVerifier(seed, latency=latency),
    }


def _solve_sorting(puzzle: Puzzle, slips: set[str]) -> tuple[str, str]:
    """Return the steps and the result of a word sorting: the words of each first letter, in
    order.
    """
    words = [word for word, _ in puzzle.items]
    if "lost" in slips and len(words) > 8:  # only long lists lose a word
        words.pop()

    # Group the words by first letter, then sort each group unless the model errs on ties.
    groups: dict[str, list[str]] = {word[0]: [] for word in sorted(words)}
    for word in words:
        groups[word[0]].append(word)
    if "ties" not in slips:
        for group in groups.values():
            group.sort()

    # One line for each letter; the groups are in alphabetical order.
    steps = ["By first letters:"]
    ordered: list[str] = []
    for letter, group in groups.items():
        steps.append(f"{letter}: {', '.join(group)}.")
        ordered += group
    return "\n".join(steps), " ".join(ordered)


def _solve_counting(puzzle: Puzzle, slips: set[str]) -> tuple[str, str]:
    """Return the steps and the result of a count: each object of the category, and the sum
    so far.
    """
    counted = [name for name, _ in puzzle.items if OBJECTS[name] == puzzle.category]
    strays = [name for name, _ in puzzle.items if OBJECTS[name] != puzzle.category]
    # One object of another category is counted by mistake.
    if "strays" in slips:
        counted += strays[:1]

    # Add up, in the order of the question.
    total = 0
    steps = [f"The {puzzle.category}:"]
    for name, number in puzzle.items:
        if name in counted:
            count = 1 if "multiples" in slips else number
            total += count
            steps.append(f"{name}: {count}, so {total}.")
    return "\n".join(steps), str(total)


def _remarks(puzzle: Puzzle, output: str) -> list[str]:
    """Return the critic's remarks on an output, which may be incomplete."""
    # Complete steps have the form "name: text."; an answer without any is judged by its result.
    lines = re.findall(r"^(\w+): (.+)\.$", output, re.MULTILINE)
    if not lines and "Answer: " in output:
        return [] if score_puzzle(output, [puzzle.answer]) else [NO_STEPS]
    find_faults = _find_sorting_faults if puzzle.task == SORTING else _find_counting_faults
    faults = find_faults(puzzle, lines)
    return [fault.remark for name, fault in FAULTS.items() if name in faults]


def _find_sorting_faults(puzzle: Puzzle, lines: list[tuple[str, str]]) -> set[str]:
    # Check each line: its order, and that it has all words with this letter.
    first_letters = [word[0] for word, _ in puzzle.items]
    faults = set()
    for letter, text in lines:
        group = text.split(", ")
        if group != sorted(group):
            faults.add("ties")
        if len(group) < first_letters.count(letter):
            faults.add("lost")

    # A letter is missing if a later one has its line already; the output may end early.
    listed_letters = {letter for letter, _ in lines}
    last_letter = max(listed_letters, default="")
    if any(letter < last_letter and letter not in listed_letters for letter in first_letters):
        faults.add("lost")
    return faults


def _find_counting_faults(puzzle: Puzzle, lines: list[tuple[str, str]]) -> set[str]:
    counts = dict(puzzle.items)
    faults = set()
    for name, text in lines:
        if OBJECTS.get(name) != puzzle.category:
            faults.add("strays")
        if int(text.split(",")[0]) < counts.get(name, 0):
            faults.add("multiples")
    return faults


def _read_sections(messages: Sequence[Message], *headings: str) -> list[str]:
    """Split the last message, in the form of `refine/templates.py`, into the text under each
    heading and the rest.
    """
    content = messages[-1]["content"]
    pattern = r"\n\n".join(f"{heading}\n(.*)" for heading in headings)
    if headings[-1] == "Output:":
        pattern += r"\n\n(.*)"
    match = re.fullmatch(pattern, content, re.DOTALL)
    if match is None:
        raise ValueError(f"expected {' and '.join(headings)}, got {content!r:.200}")
    return list(match.groups())


def _draw(*key: object) -> float:
    """Return a number in [0, 1) that follows from the key alone: no state, the same in every
    process.
    """
    return random.Random(repr(key)).random()
