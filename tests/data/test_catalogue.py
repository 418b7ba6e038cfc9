"""The tables of data sets, and the check of their records."""

import pytest

from agentic_prompting.data import (
    PAIRS,
    TASKS,
    check_sources,
    check_table,
    describe_task,
    list_tasks,
)
from support.data_rows import ROWS


def test_the_catalogue_shows_every_set():
    table = list_tasks()
    assert all(name in table for name in [*TASKS, *PAIRS])
    shown = describe_task("squad_v2")
    assert "validation: 11,873" in shown
    assert "lighteval/squad_v2" in shown
    assert "without an answer are kept" in shown
    assert "aime25" in describe_task("dapo_aime25")
    with pytest.raises(ValueError, match="did you mean 'squad_v2'"):
        describe_task("squad2")


def test_the_records_are_consistent_and_a_broken_one_is_not(monkeypatch):
    assert not [check for check in check_sources() if check.problem]
    from dataclasses import replace

    monkeypatch.setitem(
        TASKS, "bbh_word_sorting", replace(TASKS["bbh_word_sorting"], expected_rows={"test": 99})
    )
    assert "its cut is not of 99 rows" in check_table(check_sources(["bbh_word_sorting"]))


def test_checking_online_reads_a_row_of_every_source(hub, monkeypatch):
    from agentic_prompting.data import catalogue

    monkeypatch.setattr(catalogue, "_find_revision", lambda source: "0123456789abcdef")
    hub.rows["hotpotqa/hotpot_qa"] = ROWS["hotpotqa"]
    checks = {
        (check.source, check.split): check for check in check_sources(["hotpotqa"], online=True)
    }
    fine = checks[("hotpotqa/hotpot_qa distractor", "train")]
    assert fine.problem == "" and fine.revision == "0123456789abcdef" and "question" in fine.columns
    assert "ConnectionError" in checks[("RUC-NLPIR/FlashRAG_datasets hotpotqa", "train")].problem
    assert all(options["streaming"] for _, _, options in hub.calls)
