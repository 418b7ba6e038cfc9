"""The scorers against those that they are named after: SQuAD's, HotpotQA's and math-verify's, on
300 pairs each.

    python -m benchmarks.fidelity.scorers  # counts, and every difference with its reason
    python -m benchmarks.fidelity.scorers --json

The scoring of SQuAD v1.1 (`evaluate-v1.1.py`) and of HotpotQA (`hotpot_evaluate_v1.py`) is written
here once more, from those scripts; math-verify is the package. Each pair is a reply and an accepted
answer, as models and data sets write them. A difference has one of the reasons of `REASONS`, which
docs/fidelity.md lists; the exit status is 1 if one has none.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

from agentic_prompting.rewards import exact_match, math_match, token_f1

PAIRS = 300

REASONS = {
    "number": (
        "both are nothing but a number: SQuAD drops points and signs, by which 2.5 is 25 and -5 is "
        "5"
    ),
    "article": (
        "nothing is left of either but articles or punctuation: the option A is not the word 'the'"
    ),
    "empty": "F1 of two texts without a token is SQuAD v2.0's 1.0, and 0.0 in v1.1",
    "yes or no": (
        "HotpotQA gives F1 0 where one side is yes, no or noanswer; Prompt-R1's formula counts the "
        "overlap"
    ),
    "small number": "math-verify rounds to six decimals, by which all numbers below 5e-7 are equal",
    "hedge": "'12 or 13', 'not 12' and '12 thousand' are not 12: math-verify takes the last number",
    "marks": (
        "a right answer as agents write it that math-verify misses: LaTeX without delimiters, "
        "**x**, €5, 1e-9"
    ),
}


@dataclass(frozen=True)
class Difference:
    """One pair on which a scorer of ours and the reference differ."""

    scorer: str
    reply: str
    accepted: str
    reference: float
    ours: float | None
    reason: str


# The references
# -------------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """`normalize_answer` of both scripts."""
    lowered = text.lower()
    without_punctuation = "".join(
        character for character in lowered if character not in string.punctuation
    )
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return " ".join(without_articles.split())


def squad_exact_match(reply: str, accepted: str) -> float:
    return float(normalised(reply) == normalised(accepted))


def squad_f1(reply: str, accepted: str) -> float:
    """`f1_score` of `evaluate-v1.1.py`."""
    reply_tokens = normalised(reply).split()
    accepted_tokens = normalised(accepted).split()
    common = (Counter(reply_tokens) & Counter(accepted_tokens)).total()
    if common == 0:
        return 0.0
    precision = common / len(reply_tokens)
    recall = common / len(accepted_tokens)
    return 2 * precision * recall / (precision + recall)


def hotpot_f1(reply: str, accepted: str) -> float:
    """`f1_score` of `hotpot_evaluate_v1.py`."""
    reply_text = normalised(reply)
    accepted_text = normalised(accepted)
    for text in (reply_text, accepted_text):
        if text in ("yes", "no", "noanswer") and reply_text != accepted_text:
            return 0.0
    return squad_f1(reply, accepted)


def math_verify_match(reply: str, accepted: str) -> float:
    """math-verify as its README shows it: the accepted answer as LaTeX, the reply as it is."""
    from math_verify import parse, verify

    return float(verify(parse(f"${accepted}$"), parse(reply)))


# Pairs
# ----------------------------------------------------------------------------------------------------------------

_WORDS = [
    "the",
    "a",
    "an",
    "Nile",
    "river",
    "of",
    "King",
    "Charles II",
    "St. Mark's",
    "U.S.",
    "naïve",
    "São Paulo",
    "1975",
    "24,960",
    "3.5",
    "km",
    "and",
    "SARS-CoV-2",
    "it's",
    "“Hamlet”",
    "Theatre",
]
_WHOLE_ANSWERS = [
    "yes",
    "no",
    "Yes.",
    "No, it is not",
    "yes it is",
    "noanswer",
    "A",
    "the",
    "B",
    "?",
    "...",
    "",
    "5",
    "-5",
    "5.0",
    "25",
    "2.5",
    "$5",
    "50%",
    "1,000",
    "1000",
    "007",
    "7",
    "May 5, 1975",
    "5 May 1975",
    "3.5 km",
    "35 km",
    "12th",
    "one",
]
_VALUES = [
    r"12",
    r"-7",
    r"0",
    r"1000",
    r"0.5",
    r"0.75",
    r"3.14",
    r"18.90",
    r"\frac{1}{2}",
    r"\frac{3}{4}",
    r"\sqrt{2}",
    r"2\sqrt{3}",
    r"x+1",
    r"x^2-1",
    r"\pi",
    r"\frac{\pi}{2}",
    r"(1, 2)",
    r"\{1, 2\}",
    r"10^{-7}",
    r"0.0000001",
    r"0.0000002",
    r"1e-9",
    r"\text{east}",
    r"25\%",
    r"90^\circ",
    r"\$5",
    r"1,296",
]
_FORMS = [
    r"{}",
    r"${}$",
    r"${}$.",
    r"{}.",
    r"**{}**",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$.",
    r"\[{}\]",
    r"\({}\)",
    r"x = {}",
    r"$x = {}$.",
    r"The answer is {}",
    r"The answer is ${}$.",
    r"{} apples",
    r"{} apples.",
    r"about {}",
    r"€{}",
    r"{}°",
]
_HEDGES = ["{} or 13", "not {}", "{} thousand"]


def text_pairs(seed: int) -> list[tuple[str, str]]:
    """Replies and accepted answers to questions: equal up to their form, overlapping, and
    different.
    """
    rng = random.Random(seed)

    def text() -> str:
        if rng.random() < 0.4:
            return rng.choice(_WHOLE_ANSWERS)
        return " ".join(rng.choices(_WORDS, k=rng.randint(1, 5)))

    pairs = []
    while len(pairs) < PAIRS:
        accepted = text()
        form = rng.randrange(4)
        if form == 0:
            reply = rng.choice(("{}.", "The {}", "{}!", " {} ", "({})", "“{}”")).format(accepted)
        elif form == 1:
            reply = f"{accepted} {text()}"
        elif form == 2:
            reply = accepted.upper()
        else:
            reply = text()
        pairs.append((reply, accepted))
    return pairs


def math_pairs(seed: int) -> list[tuple[str, str]]:
    """Replies in the forms that agents write, to accepted answers in the forms of the MATH set."""
    rng = random.Random(seed)
    pairs = []
    while len(pairs) < PAIRS:
        accepted = rng.choice(_VALUES)
        value = accepted if rng.random() < 0.7 else rng.choice(_VALUES)
        pairs.append((rng.choice(_FORMS + _HEDGES).format(value), accepted))
    return pairs


# The comparison
# -------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?\$?[-+]?(\d[\d,]*(\.\d+)?|\.\d+)\s?%?\.?")
_SMALL = re.compile(r"0\.000000\d|10\^\{-7\}|1e-9")
_MARKS = " \t\r\n*_`\"'“”‘’()[]{}"


def text_reason(reply: str, accepted: str, is_hotpot: bool) -> str:
    """The reason why scores of texts may differ; empty if there is none."""
    if _NUMBER.fullmatch(reply.strip(_MARKS)) and _NUMBER.fullmatch(accepted.strip(_MARKS)):
        return "number"
    if not normalised(reply) and not normalised(accepted):
        return "article" if re.search(r"\w", reply + accepted) else "empty"
    if is_hotpot and {normalised(reply), normalised(accepted)} & {"yes", "no", "noanswer"}:
        return "yes or no"
    return ""


def math_reason(reply: str, accepted: str, reference: float) -> str:
    """As [`text_reason`], of mathematics. `reference` is math-verify's score."""
    is_right = any(reply == form.format(accepted) for form in _FORMS)
    if reference == 0.0:
        return "marks" if is_right else ""
    if any(reply == hedge.format(value) for hedge, value in product(_HEDGES, _VALUES)):
        return "hedge"
    if not is_right and _SMALL.search(reply) and _SMALL.search(accepted):
        return "small number"
    return ""


Reference = Callable[[str, str], float]


def compare(
    scorer: str,
    pairs: list[tuple[str, str]],
    ours: Callable[[str, list[str]], float | None],
    reference: Reference,
    reason: Callable[[str, str, float], str],
) -> Iterator[Difference]:
    """The pairs on which a scorer of ours and its reference differ."""
    for reply, accepted in pairs:
        reference_score = reference(reply, accepted)
        our_score = ours(reply, [accepted])
        if our_score is None or abs(our_score - reference_score) > 1e-9:
            yield Difference(
                scorer=scorer,
                reply=reply,
                accepted=accepted,
                reference=reference_score,
                ours=our_score,
                reason=reason(reply, accepted, reference_score),
            )


def differences() -> list[Difference]:
    """All differences, of all scorers."""
    squad = text_pairs(0)
    hotpot = text_pairs(1)
    maths = math_pairs(2)

    def squad_reason(reply: str, accepted: str, reference: float) -> str:
        return text_reason(reply, accepted, is_hotpot=False)

    def hotpot_reason(reply: str, accepted: str, reference: float) -> str:
        return text_reason(reply, accepted, is_hotpot=True)

    return [
        *compare("SQuAD exact match", squad, exact_match, squad_exact_match, squad_reason),
        *compare("SQuAD F1", squad, token_f1, squad_f1, squad_reason),
        *compare("HotpotQA exact match", hotpot, exact_match, squad_exact_match, squad_reason),
        *compare("HotpotQA F1", hotpot, token_f1, hotpot_f1, hotpot_reason),
        *compare("math-verify", maths, math_match, math_verify_match, math_reason),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON, and nothing else")
    parser.add_argument("--quick", action="store_true", help="no difference here: it takes seconds")
    arguments = parser.parse_args()

    gaps = differences()
    unexplained = [difference for difference in gaps if not difference.reason]
    counts = Counter((difference.scorer, difference.reason) for difference in gaps)

    if arguments.json:
        rows = []
        for (scorer, reason), count in counts.items():
            rows.append({"scorer": scorer, "reason": reason, "count": count})
        summary = {
            "pairs": PAIRS,
            "differences": rows,
            "unexplained": [asdict(difference) for difference in unexplained],
        }
        print(json.dumps(summary))
        return int(bool(unexplained))

    for difference in gaps:
        texts = f"{difference.reply!r} for {difference.accepted!r}"
        scores = f"{difference.reference:.2f}, ours {difference.ours}"
        print(f"{difference.scorer}: {texts}: {scores} ({difference.reason})")
    for (scorer, reason), count in sorted(counts.items()):
        print(f"{scorer}: {count} of {PAIRS} pairs differ: {REASONS.get(reason, 'NO REASON')}")
    return int(bool(unexplained))


if __name__ == "__main__":
    raise SystemExit(main())
