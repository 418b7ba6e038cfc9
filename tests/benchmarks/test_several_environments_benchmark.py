"""benchmarks/learning/several_environments.py without its trainings: the table follows from the
records.
"""

from benchmarks.learning import several_environments as several


def record(trained, seed, tags, tools):
    scores = {"tags": "1" * tags + "0" * (4 - tags), "tools": "1" * tools + "0" * (4 - tools)}
    return {
        "trained": trained,
        "seed": seed,
        "before": {"tags": "0000", "tools": "1000"},
        "after": scores,
    }


RECORDS = [
    record("tags", 1, 4, 1),
    record("tools", 1, 0, 3),
    record("both", 1, 3, 4),
    record("tags", 2, 4, 1),
    record("both", 2, 4, 4),
]


def test_differences_are_paired_by_seed():
    gaps = several.differences(RECORDS)
    assert gaps["tags"]["mean"] == -0.125
    assert gaps["tools"] == {
        "mean": 0.25,
        "low": None,
        "high": None,
    }
    assert several.differences([]) == {}


def test_the_table_has_a_row_for_each_training():
    rows = several.table(RECORDS).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| tags", "| tools", "| both"]
    assert "0.000" in rows[0] and "1.000" in rows[0]
