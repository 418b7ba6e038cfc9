"""The world of benchmarks/real/conductor.py: its questions, its workers, its demonstrations and its
tables.
"""

import asyncio
import random
import re

import pytest

from agentic_prompting import Workers
from agentic_prompting.llm import Reply
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import AskGrammar
from benchmarks.real import conductor_coder, elements
from benchmarks.real.conductor import (
    ask_baselines,
    calculate,
    calls_table,
    draw_demonstrations,
    follow_plan,
    kinds_table,
    make_world,
    spell_backwards,
    systems_table,
)

pytest.importorskip("bm25s")

WORLD = make_world(7)
POOL, TRAIN, TEST = WORLD.pool, WORLD.train, WORLD.test


def test_the_right_plan_answers_every_question():
    rows = TRAIN + TEST
    assert len({row["question"] for row in rows}) == len(rows)
    environment = Workers(POOL)
    assert all(asyncio.run(follow_plan(row, environment)) in row["answers"] for row in rows)


def test_no_router_of_whole_questions_answers_the_ones_that_need_two_workers():
    right = ask_baselines(POOL, TEST, seed=7)["oracle router"]
    by_two = [
        result for result, row in zip(right, TEST, strict=True) if len(row["workers_of_plan"]) == 2
    ]
    assert by_two.count("1") == 0 and 0.3 < right.count("1") / len(right) < 0.6


def test_workers_say_what_they_cannot_do():
    assert calculate("What is 12 plus 30?") == calculate("12 + 30") == "42"
    assert calculate("1432 + Dalgate") == "this is no sum"
    assert (
        spell_backwards("the river Dorla") == "alrod"
        and spell_backwards("?!") == "there is no word"
    )


def test_demonstrations_are_well_formed_and_of_mixed_quality():
    environment = Workers(POOL)
    traces = asyncio.run(draw_demonstrations(WORLD, environment, random.Random(7)))
    right = 0
    for trace in traces:
        assert len(trace["turns"]) == len(trace["observations"]) + 1
        assert all(AskGrammar().parse(turn).well_formed for turn in trace["turns"])
        # An answer by reference stands for the whole reply.
        last = trace["observations"][-1] if trace["observations"] else ""
        right += any(last.endswith(f": {answer}") for answer in trace["answers"])
    assert 0.3 < right / len(traces) < 0.6


def test_tables_show_every_stage_and_baseline():
    stage = {
        "correct": "0110",
        "failed": 0,
        "well_formed": 1.0,
        "calls": 1.5,
        "right_worker": 0.75,
    }
    record = {
        "seed": 7,
        "kinds": ["fact", "sum", "spell", "fact, sum"],
        "before": stage,
        "warm": stage,
        "after": {**stage, "correct": "1111"},
        "baselines": {"archive alone": "1000"},
    }
    assert "| 7 | archive alone | 0.250" in systems_table([record])
    assert "+0.500" in systems_table([record])
    assert "| 7 | fact, sum | 1 | 0.00 | 0.00 | 1.00 |" in kinds_table([record])
    assert "| 7 | after | 1.0 | 1.5 | 0.75 | 0 |" in calls_table([record])


def test_the_coders_world_needs_two_workers_and_holds_out_towns_and_elements():
    def coder(messages):
        name = re.search(r"#1 : (\w+)|symbol of (\w+)", messages[-1]["content"])
        symbol = dict(zip(elements.NAMES, elements.SYMBOLS, strict=True)).get(name[1] or name[2])
        return Reply(symbol or "unknown")

    world = conductor_coder.make_world(7, coder)
    environment = Workers(world.pool)
    for row in world.train[:64] + world.test:
        assert exact_match(asyncio.run(follow_plan(row, environment)), row["answers"])
    assert not {row["question"] for row in world.train} & {row["question"] for row in world.test}
    by_symbol = [
        {row["answers"][0] for row in rows if "symbol" in row["kind"]}
        for rows in (world.train, world.test)
    ]
    assert len(by_symbol[1]) > 10 and not by_symbol[0] & by_symbol[1]
    right = ask_baselines(world.pool, world.test, seed=7)["oracle router"]
    assert not any(
        int(result)
        for result, row in zip(right, world.test, strict=True)
        if len(row["requests"]) == 2
    )
