"""Rows are checked before a model is loaded."""

from dataclasses import replace

import pytest
from datasets import Dataset

from agentic_prompting.rollout import AgentSpec
from agentic_prompting.trainers.prepare_rows import (
    check_dataset,
    warn_of_known_rows,
    warn_of_unused_system_prompt,
)


def rows_of(*questions):
    return Dataset.from_list([{"question": question} for question in questions])


def test_evaluation_rows_that_are_learned_are_warned_of(caplog):
    warn_of_known_rows(rows_of("a", "b"), [rows_of("c")])
    assert not caplog.messages
    warn_of_known_rows(rows_of("a", "b"), [rows_of("c", "b"), rows_of("d")])
    (message,) = caplog.messages
    assert "1 of the 3 rows" in message and "'b'" in message


@pytest.mark.parametrize("prompt", [None, "", []], ids=str)
def test_a_row_without_a_prompt_is_refused(prompt):
    full = [{"role": "user", "content": "x"}] if isinstance(prompt, list) else "x"
    rows = [{"prompt": full, "question": "x"}, {"prompt": prompt, "question": ""}]
    with pytest.raises(ValueError, match="row 1 .*`prompt`"):
        check_dataset(Dataset.from_list(rows), [], None)
    rows[1]["question"] = "y"
    check_dataset(Dataset.from_list(rows), [], None)


def test_a_rows_own_system_message_is_warned_of_once(caplog):
    conversation = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "q"}]
    rows = Dataset.from_list([{"prompt": conversation}] * 3)
    spec = AgentSpec("{question}", "Ours.")
    warn_of_unused_system_prompt(spec, [rows, rows])
    (record,) = caplog.records
    assert "system_prompt=" in record.message and "Mine." in record.message
    # E-SPL joins both; rows without a system message, or with a text, get the agent's.
    caplog.clear()
    warn_of_unused_system_prompt(replace(spec, join_system_prompt=True), [rows])
    for prompt in (conversation[1:], "text"):
        warn_of_unused_system_prompt(spec, [Dataset.from_list([{"prompt": prompt}])])
    warn_of_unused_system_prompt(spec, [Dataset.from_list([{"question": "q"}])])
    assert not caplog.records


@pytest.mark.parametrize("column", ["rollout", "completions"])
def test_a_column_that_rewards_would_not_get_is_refused(column):
    rows = Dataset.from_list([{"question": "q", column: "mine"}])
    with pytest.raises(ValueError, match=f"column '{column}'.*rename"):
        check_dataset(rows, [], None)
