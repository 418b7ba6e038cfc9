"""What the pages say is what the records in `records/` say, and no figure stands on a page without
either.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recompute
from benchmarks.learning import broken as broken, prorefine_budget as budget, smoke as learning

ROOT = Path(__file__).parents[2]


# --- recompute.py ---------------------------------------------------------------------------------


def test_the_pages_say_what_the_records_say():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recompute"], capture_output=True, text=True, timeout=60
    )
    wrong = [line for line in done.stdout.splitlines() if "NOT as" in line or "NEITHER" in line]
    assert done.returncode == 0 and not wrong, "\n".join([*wrong, done.stderr])
    assert "README.md: demo.first_screen: " in done.stdout
    assert "performance.md: speed: " in done.stdout
    assert "Not recomputed, since no records are shipped" in done.stdout


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it rose to .961 [.930, .979].", 1),
        ("| 0.945 [0.927, 0.959] | +0.030 [-0.043,\n-0.019] |", 2),
        ("**.082** [+.076, +.087]", 1),
        ("exact match before  0.363   95 % interval 0.307 to 0.424", 1),
        ("<!-- recomputed: league -->\n.961 [.930, .979]\n<!-- /recomputed -->", 0),
        ("<!-- not recomputed: make demo -->.961 [.930, .979]<!-- /not recomputed -->", 0),
        ("read it in [the guide](guide.md), `[0.1, 0.2]`; version 0.31.0 [1, 2]", 0),
    ],
)
def test_a_score_with_an_interval_outside_of_marks_is_found(text, found):
    assert len(recompute.unmarked(text)) == found


def test_a_figure_within_a_line_is_recomputed(monkeypatch):
    monkeypatch.setattr(recompute.Records, "read", lambda self: [{"of": self.path.name}])
    monkeypatch.setitem(recompute.TEXTS, "speed.one", lambda records: records[0]["of"])
    page = "made of <!-- recomputed: speed.one -->old<!-- /recomputed -->, it says"
    assert recompute.recompute(page) == (page.replace("old", "speed.jsonl.gz"), ["speed.one"])


def test_the_table_of_speeds_names_what_misses_its_target_and_what_is_not_recorded():
    printed = {"population_ms": 1.5, "population_worst_ms": 7.3}
    record = {"script": "growth.py", "quick": False, "date": "2026-11-22", "printed": printed}
    table = recompute.speed([{**record, "printed": {}}, record])
    assert "| 1.5 | <= 5 | yes | full, 11-22 |" in table
    assert "| 7.3 | <= 5 | no: it weighs each" in table
    assert "(`rollout.py`) |  | <= 1.25 | no record |  |" in table


# --- learning.py and learning_broken.py -----------------------------------------------------------


def batch(step, mode="train", **rewards):
    """Two rollouts of each prompt, `p0` and so on."""
    return [
        {"mode": mode, "step": step, "system_prompt": int(name[1:]), "reward": reward + off}
        for name, reward in rewards.items()
        for off in (-0.1, 0.1)
    ]


def test_ratings_that_do_not_follow_from_rewards_are_noticed():
    rollouts = [*batch(0, p0=0.1), *batch(1, p0=0.1, p1=0.5), *batch(2, p0=0.2, p1=0.6, p2=0.605)]
    rollouts += [*batch(3, mode="eval", p0=0.9, p1=0.0), {**batch(3, p2=0)[0], "reward": None}]
    good = {0: 20.0, 1: 26.0, 2: 25.0}
    assert learning.agreement(good, rollouts) == 1.0, "1 and 2 differ by no more than a tie"
    assert learning.agreement({0: 30.0, 1: 26.0, 2: 31.0}, rollouts) == pytest.approx(1 / 3)
    assert learning.agreement({0: 25.0}, batch(0, p0=0.1)) == 0.0, (
        "where no prompts met nothing is known"
    )


def test_what_is_broken_on_purpose_is_broken(monkeypatch):
    from agentic_prompting.evolution import Population, SystemPrompt
    from agentic_prompting.rewards import PromptR1Reward
    from agentic_prompting.trainers.rollouts import Batch

    for owner, name in ((PromptR1Reward, "__call__"), (Batch, "to_trl"), (Population, "record")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    monkeypatch.setattr(PromptR1Reward, "__call__", lambda self, **columns: [0.5, None])
    monkeypatch.setattr(
        Batch, "to_trl", lambda *args: {"env_mask": [[1, 0, 0]], "prompt_ids": [[7]]}
    )
    for breaking in broken.BREAK.values():
        breaking(3)
    assert PromptR1Reward()(rollout=[]) == [-0.5, None]
    assert Batch.to_trl([]) == {"env_mask": [[0, 1, 1]], "prompt_ids": [[7]]}
    orders = set()
    for _ in range(20):
        population = Population(SystemPrompt("root"))
        for number in range(2):
            population.add(SystemPrompt(f"prompt {number}"))
        values = population.record([0, 1, 2], [[0.1], [0.5], [0.9]])
        assert sorted(values) == [0.1, 0.5, 0.9]
        orders.add(tuple(values))
    assert len(orders) > 2


# --- prorefine_budget.py --------------------------------------------------------------------------


@pytest.fixture
def question():
    from agentic_prompting.sandbox.puzzles import make_puzzles

    return make_puzzles(1, 3, ("bbh_word_sorting",))[0]["question"]


def test_every_call_and_word_of_a_method_is_counted(question):
    from agentic_prompting.llm import complete
    from agentic_prompting.sandbox.puzzles import PuzzleSolver

    models = budget.Models(3, "bbh_word_sorting", 1.0)
    first = models.solve(models.start, question)
    assert budget.self_consistency(models, question, 5)[0].tokens == first.tokens
    messages = [{"role": "system", "content": models.start}, {"role": "user", "content": question}]
    usage = complete(PuzzleSolver(3), messages).usage
    assert usage.prompt_tokens + usage.completion_tokens == first.tokens, (
        "as the scripted models count themselves"
    )
    for method in (budget.best_of, budget.self_consistency, budget.self_refine):
        sizes = method(models, question, 5)
        assert len(sizes) == 5 and sizes == sorted(
            sizes, key=lambda one: (one.calls, one.tokens)
        ), method
    assert [one.calls for one in budget.self_consistency(models, question, 5)] == [1, 2, 3, 4, 5]
    assert budget.best_of(models, question, 5)[0].calls == 2
    assert budget.self_refine(models, question, 5)[0].calls >= 2


def test_a_sample_slips_anew_only_where_it_may(question):
    def texts(anew):
        models = budget.Models(3, "bbh_word_sorting", anew)
        return {models.solve(models.start, question, sample).text for sample in range(30)}

    assert len(texts(0.0)) == 1 < len(texts(1.0)) and texts(0.0) <= texts(1.0), (
        "the first sample is ProRefine's"
    )


def test_nobody_gets_less_than_prorefine():
    answers = [[budget.Answer("", calls, 10 * calls)] * 2 for calls in (1, 3, 5)]
    assert [budget.smallest(answers, "calls", least) for least in (1, 3.2, 9)] == [0, 2, 2]
    assert budget.smallest(answers, "tokens", 30) == 1
    entries = budget.measure(1, "bbh_object_counting", 12)
    ours = next(one for one in entries if one["method"] == budget.OURS)
    for one in entries:
        enough = (
            one.get("size") in (budget.LARGEST, 25)
            or "budget" not in one
            or one[one["budget"]] >= ours[one["budget"]]
        )
        assert enough and len(one["correct"]) == 12, one
    assert len(entries) == 2 + len(budget.ANEW) * len(budget.BUDGETS) * len(budget.OTHERS)


def test_a_blind_critic_is_not_paid_for():
    from agentic_prompting.sandbox.puzzles import make_puzzles

    rows = make_puzzles(6, 3, ("bbh_word_sorting",))
    seeing, blind = (
        budget.refined(3, "bbh_word_sorting", rows, blind=value, max_steps=2)
        for value in (False, True)
    )
    assert sum(one.calls for one in blind) < sum(one.calls for one in seeing)


def test_what_counts_against_us_is_counted():
    def rows(method, *scores, **more):
        return [
            {
                "method": method,
                "seed": seed,
                "kind": "k",
                "correct": "1" * score + "0" * (10 - score),
            }
            | {"calls": 5.0, "tokens": 50.0, **more}
            for seed, score in enumerate(scores)
        ]

    found = rows(budget.OURS, 5, 6, 5) + rows(budget.FIRST, 2, 3, 2)
    for method, scores in zip(budget.OTHERS, ((2, 3, 2), (8, 9, 8), (5, 7, 4)), strict=False):
        found += rows(method, *scores, budget="calls", anew=1.0)
    sentence = budget.against(found)
    assert sentence.startswith(
        "of 3 comparisons ProRefine is above the other in 1, below it in 1, and in 1 no difference"
    )
    assert "self-consistency in 1 of 6" in sentence and budget.lift(found) == "0.300 [0.300, 0.300]"
    assert budget.table(found).count("\n") == 1 + 5
