"""benchmarks/real/evolve_prompts.py with scripted models in the place of the real ones."""

from collections import Counter

from agentic_prompting.llm import Reply
from benchmarks.real import evolve_prompts

RULE = "Write a date as day/month/year in digits."


class Policy:
    """Writes dates as it is told, and otherwise as it likes."""

    model = "scripted"

    async def __call__(self, messages, **options):
        day, month, year = messages[-1]["content"].split()
        number = evolve_prompts.MONTHS.index(month) + 1
        if RULE in messages[0]["content"]:
            return Reply(f"{int(day):02}/{number:02}/{year}")
        return Reply(f"{month} {day}, {year}")


class Reflector:
    """Finds the rule at once."""

    model = "scripted"

    async def __call__(self, messages, **options):
        return Reply(f"The format was wrong.\n<instructions>{RULE}</instructions>")


def test_a_prompt_with_the_rule_is_found_and_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(evolve_prompts, "FORMATS", ("{day:02}/{month:02}/{year}",))
    monkeypatch.setattr(evolve_prompts, "HELD_OUT", 16)
    record = evolve_prompts.measure("dates", 5, Policy(), Reflector(), tmp_path)
    assert record["correct"] == {"first": "0" * 16, "best": "1" * 16}
    assert RULE in record["prompts"]["best"] and record["children"] >= 1
    assert "| 5 | dates | 0.000" in evolve_prompts.table([record])


def test_rules_are_drawn_and_right_to_the_letter():
    for task in evolve_prompts.FIRST_PROMPTS:
        rows = evolve_prompts.draw_rows(task, 40, seed=3)
        assert len({row["question"] for row in rows}) == 40
        assert rows == evolve_prompts.draw_rows(task, 60, seed=3)[:40]
    queues = Counter(row["answers"][0] for row in evolve_prompts.draw_rows("queues", 80, seed=3))
    assert set(queues) == set(evolve_prompts.QUEUES)
    assert evolve_prompts.same_text("2021.03.14\n", ["2021.03.14"]) == 1
    assert evolve_prompts.same_text("2021/03/14", ["2021.03.14"]) == 0
