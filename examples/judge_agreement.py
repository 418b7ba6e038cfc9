"""How often a judge agrees with the truth, measured before it is used as a reward.

Groups of rollouts whose answers are known to be right or wrong are shown to a judge. The judge here
is a script: it knows the facts, makes mistakes at a set rate, and prefers the rollout that it is
shown first. Put your own chat model and your own rollouts in its place.

    python examples/judge_agreement.py --json
"""

import argparse
import json
import random
import re

from agentic_prompting.evaluation import bootstrap_interval
from agentic_prompting.llm import ScriptedChat, run
from agentic_prompting.rewards import GroupJudge, RubricJudge, exact_match
from agentic_prompting.rollout import Rollout, Sample, TagGrammar, parse_turn
from agentic_prompting.sandbox import all_questions, as_rows

RUBRIC = {
    "right": ("The final answer is right.", 3.0),
    "checked": "The agent asked before it answered.",
}
SHOWN = re.compile(r"<(rollout_\d+)>(.*?)</\1>", re.DOTALL)


def scripted_judge(mistakes: float, first_bonus: float, seed: int) -> ScriptedChat:
    """A judge that gives 8 to a right answer and 2 to a wrong one, the other way round at the rate
    of its mistakes, and some points more to the rollout that is shown first.
    """

    def reply(messages):
        request = messages[-1]["content"]
        answers = re.search("<accepted_answers>(.*?)</accepted_answers>", request)[1].split(
            "\nor: "
        )
        scores = {}
        for position, (name, text) in enumerate(SHOWN.findall(request)):
            answer = re.search("&lt;answer&gt;(.*?)&lt;/answer&gt;", text)[1]
            draw = random.Random(f"{seed} {text}").random()
            is_right = (exact_match(answer, answers) == 1.0) != (draw < mistakes)
            scores[name] = min(10, (8 if is_right else 2) + (first_bonus if position == 0 else 0))
        if "by its name:\n" in request:
            scores = dict.fromkeys(RUBRIC, scores["rollout_1"])
        return json.dumps({"reason": "", "scores": scores})

    return ScriptedChat(reply)


def groups_of_rollouts(n: int, size: int, seed: int) -> list[list[Rollout]]:
    """For each question a group of finished rollouts, some right and some wrong, and never all
    alike.
    """
    draw = random.Random(seed)
    rows = as_rows(draw.sample(all_questions(), n))
    groups = []
    for number, row in enumerate(rows):
        right = draw.sample(range(size), draw.randint(1, size - 1))
        others = [
            answer for other in rows for answer in other["answers"] if answer not in row["answers"]
        ]
        group = []
        for position in range(size):
            rollout = Rollout([1], row=dict(row), group=number, seed=number * size + position)
            text = row["answers"][0] if position in right else draw.choice(others)
            rollout.add_turn(
                Sample([2]),
                parse_turn(f"<think>{position}</think><answer>{text}</answer>", TagGrammar()),
            )
            group.append(rollout.finish("answered"))
        groups.append(group)
    return groups


def agreement(judge, groups) -> list[float]:
    """For each group the share of its pairs of a right and a wrong rollout that the judge puts in
    this order. Equal scores are no agreement.
    """
    scores = run(judge(rollout=[rollout for group in groups for rollout in group]))
    shares = []
    for group in groups:
        group_scores = scores[: len(group)]
        scores = scores[len(group) :]
        truth = [exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in group]
        pairs = [
            (group_scores[i], group_scores[j])
            for i in range(len(group))
            for j in range(len(group))
            if truth[i] > truth[j]
        ]
        shares.append(sum(None not in pair and pair[0] > pair[1] for pair in pairs) / len(pairs))
    return shares


def main() -> None:
    """Measure three judges and print their agreement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--groups", type=int, default=100, help="questions; more make the intervals narrower"
    )
    parser.add_argument("--size", type=int, default=4, help="rollouts of a question")
    parser.add_argument(
        "--mistakes", type=float, default=0.05, help="share of rollouts that the script misjudges"
    )
    parser.add_argument(
        "--first-bonus", type=float, default=7.0, help="points more for the rollout shown first"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    groups = groups_of_rollouts(args.groups, args.size, args.seed)

    def chat():
        return scripted_judge(args.mistakes, args.first_bonus, args.seed)

    judges = {
        "RubricJudge": RubricJudge(chat(), RUBRIC),
        "GroupJudge": GroupJudge(chat(), RUBRIC, seed=args.seed),
        "GroupJudge(both_orders=True)": GroupJudge(
            chat(), RUBRIC, both_orders=True, seed=args.seed
        ),
    }
    results = {}
    for name, judge in judges.items():
        share = bootstrap_interval(
            agreement(judge, groups)
        )  # over groups: pairs of a group are not independent
        numbers = {"agreement": share.mean, "low": share.low, "high": share.high}
        results[name] = {key: round(value, 3) for key, value in numbers.items()} | {
            "calls": len(judge.chat.calls)
        }
        if not args.json:
            print(f"{name}: {share}, {len(judge.chat.calls)} calls")
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
