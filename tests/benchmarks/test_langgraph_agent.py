"""The graph and the table of benchmarks/real/langgraph_agent.py."""

import pytest

from agentic_prompting.sandbox.library import Library, country_facts
from benchmarks.real.langgraph_agent import make_agent, table
from support.misbehaving import MisbehavingServer


def test_the_graph_asks_its_expert_once_and_answers():
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    facts = country_facts()
    answer = make_agent(Library(facts))
    row = facts[0].as_row()
    # The policy asks the row's question, and then another one: only the first of them is answered.
    with MisbehavingServer(say=lambda request: row["question"]) as server:
        assert answer(row, server.base_url, "key") == {"answer": row["question"], "asked": True}
        conversations = [request["messages"] for request in server.requests]
    assert [len(messages) for messages in conversations] == [1, 3]
    assert facts[0].document in conversations[1][-1]["content"]
    with MisbehavingServer(say=lambda request: "I know it") as server:
        assert answer(row, server.base_url, "key") == {"answer": "I know it", "asked": False}


def test_the_table_has_the_three_models():
    stage = {"asked": "0101", "correct": "0100", "failed": 1}
    record = {
        "seed": 7,
        "failed_in_training": 2,
        "before": stage,
        "warm": stage,
        "after": {"asked": "1111", "correct": "1110", "failed": 0},
    }
    lines = table([record]).splitlines()
    assert "| 7 | published | 0.500 | 0.250" in lines[2] and "+0.500" in lines[2]
    assert lines[4].startswith("| 7 | trained | 1.000 | 0.750") and lines[4].endswith("| 2 |")
