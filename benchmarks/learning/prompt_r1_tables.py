"""The tables of docs/lab/prompt_r1.md, made from the records of `prompt_r1_sandbox.py`.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab import interval, markdown, share, shown

AGENTS = {
    "multi": "multi-turn GRPO",
    "single": "single-turn GRPO",
    "sft": "SFT (the warm start)",
    "oracle": "prompting (the question passed on)",
    "alone": "GRPO without environment, by the paper's reward",
    "alone_f1": "GRPO without environment, by F1",
    "strict": "multi-turn GRPO, strict gate",
}
NOISES = (0.02, 0.05, 0.1)
HOME = "home"
NOBODY = "nobody"
REWORDED = "reworded"
AWAY = {
    **{f"noise {noise:g}": f"wrong with probability {noise:g}" for noise in NOISES},
    REWORDED: "words its replies anew",
}
INTERACTIONS = 4
"""T: the replies of one episode at most; the fifth turn answers."""
NOTHING = "No run of it has been recorded yet."
Entries = Sequence[Mapping[str, Any]]


def transfer_bounds(noise: float, interactions: int) -> tuple[float, float]:
    """How far a policy's value may move when each reply's distribution moves by `noise` in total
    variation.

    Args:
        noise (`float`): ε of eq 44.
        interactions (`int`): T of eq 45, the replies one episode can hold.

    Returns:
        `tuple[float, float]`: `1 - (1 - ε)^T` and `T ε`, the two bounds of eq 45-46; the first is
        the tighter one.
    """
    return 1 - (1 - noise) ** interactions, interactions * noise


def of(
    records: Entries,
    agent: str,
    environment: str = HOME,
    turns: int | None = None,
    held_out: str = "country",
) -> dict[int, Mapping[str, Any]]:
    """The records of one setting, by seed."""
    setting = {"agent": agent, "environment": environment, "turns_allowed": turns, "by": held_out}
    by_seed = {}
    for record in records:
        if record.items() >= setting.items():
            by_seed[record["seed"]] = record
    return by_seed


def exact_match(of_setting: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """The share of right answers by seed."""
    return {seed: share(record["correct"]) for seed, record in of_setting.items()}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Differences on the seeds that both have."""
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def results(records: Entries) -> str:
    """The table of every agent in the environment that it was trained for, and without one."""
    full = exact_match(of(records, "multi"))
    titles = (
        "agent",
        "environment",
        "exact match [95 %]",
        "by seed",
        "minus the first [95 %]",
        "2 hops",
        "3 hops",
    )
    rows = []
    for environment in (HOME, NOBODY):
        for agent, name in AGENTS.items():
            by_seed = of(records, agent, environment)
            if by_seed:
                environment_title = "the oracle" if environment == HOME else "none"
                rows.append(_row([name, environment_title], by_seed, full))
    return _table([*titles, "turns"], rows)


def turns(records: Entries) -> str:
    """The table of the multi-turn agent with fewer turns than in training."""
    full = exact_match(of(records, "multi"))
    titles = (
        "turns allowed",
        "exact match [95 %]",
        "by seed",
        "minus 5 turns [95 %]",
        "2 hops",
        "3 hops",
        "turns",
    )
    rows = []
    for allowed in (None, 4, 3, 2):
        by_seed = of(records, "multi", turns=allowed)
        if by_seed:
            rows.append(_row([str(allowed or 5)], by_seed, full))
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, or a sentence where it has no rows."""
    return markdown(titles, rows) if rows else NOTHING


def _row(
    cells: list[str], by_seed: Mapping[int, Mapping[str, Any]], full: Mapping[int, float]
) -> list[str]:
    """A setting's cells; accuracy by hops is pooled over seeds."""
    scores = exact_match(by_seed)
    correct_by_hops: dict[str, list[int]] = {"2": [], "3": []}
    for record in by_seed.values():
        for hops, correct in zip(record["hops"], record["correct"], strict=True):
            correct_by_hops.setdefault(hops, []).append(int(correct))
    turns = sum(record["turns"] for record in by_seed.values()) / len(by_seed)
    return [
        *cells,
        shown(list(scores.values())),
        ", ".join(f"{score:.3f}" for score in scores.values()),
        shown(paired(scores, full), "+"),
        _share_of(correct_by_hops["2"]),
        _share_of(correct_by_hops["3"]),
        f"{turns:.2f}",
    ]


def _share_of(correct: Sequence[int]) -> str:
    if not correct:
        return "–"
    return f"{sum(correct) / len(correct):.3f}"


def transfer(records: Entries) -> str:
    """The table of agents with another oracle than in training, with the bounds of eq 45-46 for
    noisy oracles.
    """
    rows = []
    for environment, title in AWAY.items():
        for agent in ("multi", "single", "sft"):
            scores = exact_match(of(records, agent, environment))
            change = paired(scores, exact_match(of(records, agent)))
            if not change:
                continue
            bounds = ["", "", ""]
            if environment != REWORDED:
                bounds = _bound_cells(float(environment.removeprefix("noise ")), change)
            score = shown(list(scores.values()))
            rows.append([title, AGENTS[agent], score, shown(change, "+"), *bounds])
    return _table(
        ("the oracle", "agent", "exact match [95 %]", "change [95 %]", "1-(1-ε)^T", "Tε", "within"),
        rows,
    )


def _bound_cells(noise: float, change: Sequence[float]) -> list[str]:
    """Both bounds, and whether a change is within the tighter one."""
    bound, linear = transfer_bounds(noise, INTERACTIONS)
    row = interval(change)
    ends = [row["mean"] if row[end] is None else row[end] for end in ("low", "high")]
    # The interval's far end decides, not the mean, so that "within" is not a matter of luck.
    is_within = max(map(abs, ends)) <= bound
    return [f"{bound:.3f}", f"{linear:.3f}", "yes" if is_within else "no"]


def splits(records: Entries) -> str:
    """The demo before and after GRPO, with whole countries held out and, by the former split,
    single questions.
    """
    rows = []
    after = {}
    for held_out in ("country", "question"):
        scores = exact_match(of(records, "multi", held_out=held_out))
        after[held_out] = scores
        if scores:
            before = list(exact_match(of(records, "sft", held_out=held_out)).values())
            seeds = ", ".join(map(str, scores))
            rows.append([f"by {held_out}", shown(before), shown(list(scores.values())), seeds])
    cost = paired(after["question"], after["country"])
    if cost:
        rows.append(["what memory was worth", "", shown(cost, "+"), ""])
    return _table(("held out", "before [95 %]", "after [95 %]", "seeds"), rows)


def headline(records: Entries) -> str:
    """The page's first paragraph: the rows' means, and the outcomes that the protocol counts
    against us.
    """
    home = exact_match(of(records, "multi"))
    if not home:
        return NOTHING
    scores = []
    for agent in ("multi", "single", "sft", "oracle"):
        by_seed = of(records, agent)
        if by_seed:
            scores.append(f"{AGENTS[agent]} {shown(list(exact_match(by_seed).values()))}")
    lines = [f"Exact match on unseen countries, {len(home)} training(s) each: {'; '.join(scores)}."]

    memory = paired(exact_match(of(records, "multi", held_out="question")), home)
    if memory:
        row = interval(memory)
        if row["mean"] >= 0.05:
            counts = "part of what was shown before was memory"
        elif row["high"] is not None and row["high"] < 0.05:
            counts = "less than .05"
        else:
            counts = f"{len(memory)} seed(s) do not decide whether that is less than .05"
        lines.append(
            f"Where only questions were held out, as once, it ended {shown(memory, '+')} higher: "
            f"{counts}."
        )
    reworded = paired(exact_match(of(records, "multi", REWORDED)), home)
    if reworded:
        lines.append(
            f"With an oracle that words its replies anew it changes by {shown(reworded, '+')}."
        )
    return "\n".join(lines)
