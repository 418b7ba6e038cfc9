"""benchmarks/real/prorefine.py with scripted models in the place of the real one."""

from dataclasses import replace
from functools import partial

from agentic_prompting.llm import ScriptedChat
from agentic_prompting.refine.templates import RolePrompts
from agentic_prompting.sandbox.puzzles import COUNTING, make_puzzles, puzzle_models
from benchmarks.real import prorefine
from benchmarks.real.word_problems import make_word_problems


class AllRoles(ScriptedChat):
    """One model in all roles, as the benchmark has it: told apart by the system message."""

    model = "scripted"

    def __init__(self):
        self.models = puzzle_models(seed=5)
        self.roles = {
            RolePrompts().role(name): name for name in ("feedback", "optimizer", "verifier")
        }

    async def __call__(self, messages, **options):
        role = self.roles.get(messages[0]["content"], "task")
        return await self.models[role](messages, **options)


def test_every_setting_is_scored_against_the_first_answers(monkeypatch):
    task = prorefine.TASKS[COUNTING]
    fewer = replace(task, make_rows=partial(make_puzzles, 12, 31, (COUNTING,)))
    monkeypatch.setitem(prorefine.TASKS, COUNTING, fewer)
    record = prorefine.measure(COUNTING, AllRoles())
    settings = record["settings"]
    assert set(settings) == set(prorefine.SETTINGS)
    assert all(len(measured["correct"]) == 12 for measured in settings.values())
    # Only what is wrong by the labels is refined, so nothing right can be broken.
    wrong = settings["none"]["correct"].count("0")
    assert 0 < wrong == settings["optimal_verifier"]["refined"] < 12
    assert settings["no_verifier"]["refined"] == 12
    table = prorefine.table([record])
    (row,) = [line for line in table.splitlines() if "the labels' verdict" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[5] == "0" and 0 < int(cells[4]) <= wrong
    assert table.count("\n") == 2 + 3


def test_a_table_without_records_says_so():
    assert "recorded yet" in prorefine.table([])


def test_word_problems_differ_and_have_the_answers_of_their_numbers():
    rows = make_word_problems(64, 32)
    assert rows == make_word_problems(64, 32)
    questions = {row["question"] for row in rows}
    assert len(questions) == 64 and not questions & {
        row["question"] for row in make_word_problems(64, 1)
    }
    # Worked out by hand for the first of each story: 7 * (15 - 6) - 16, 465 - 14 * 6 - 23,
    # 14 * (29 - 8) + 43, 3 * 11 - 3 + 13.
    assert [row["answers"] for row in rows[:4]] == [["47"], ["358"], ["337"], ["43"]]
