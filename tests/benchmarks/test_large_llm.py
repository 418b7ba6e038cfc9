"""The task of benchmarks/real/large_llm.py: its facts, the large LLM alone, and its table."""

from agentic_prompting.llm import ScriptedChat
from benchmarks.real.elements import NAMES, SYMBOLS, element_facts
from benchmarks.real.large_llm import ask_alone, table


def test_elements_have_names_symbols_and_numbers():
    assert len(NAMES) == len(SYMBOLS) == len(set(NAMES)) == len(set(SYMBOLS)) == 118
    facts = {(fact.subject, fact.relation): fact for fact in element_facts()}
    assert len(facts) == 4 * 118
    for name, symbol, number in (
        ("gold", "Au", "79"),
        ("hydrogen", "H", "1"),
        ("oganesson", "Og", "118"),
    ):
        assert facts[name, "symbol"].value == symbol
        assert facts[name, "number"].value == number
        assert facts[name, "element of a symbol"].value == name


def test_the_large_llm_alone_is_scored_by_its_whole_reply():
    facts = [fact for fact in element_facts() if fact.subject == "gold"][:2]
    chat = ScriptedChat(["Au", "The atomic number of gold is 79."])
    assert ask_alone(chat, facts) == {"right": "10", "contained": "11"}


def test_the_table_compares_every_system_with_the_trained_agent():
    stage = {"asked": "0101", "correct": "0100"}
    record = {
        "seed": 7,
        "before": stage,
        "warm": stage,
        "after": {"asked": "1111", "correct": "1110"},
        "single": {"asked": "0000", "correct": "1000"},
        "llm_alone": {"right": "1100", "contained": "1111"},
    }
    shown = table([record])
    assert "| 7 | trained to ask | 1.000 | 0.750" in shown
    assert "| 7 | the large LLM alone |  | 0.500" in shown and "+0.250" in shown
