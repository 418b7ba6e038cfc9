"""A file of results: a run that was stopped goes on."""

import json
from dataclasses import replace

import pytest

from agentic_prompting.llm import (
    BudgetExceeded,
    OpenAIChat,
    ReplayCache,
)
from agentic_prompting.refine import (
    ProRefiner,
    RefinementResult,
)
from support.refine_models import PROMPT, QUERIES, Log, answer, improve, refiner, untimed
from support.servers import Answer, LoopbackServer


def test_results_are_written_as_they_finish(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    results = refiner().refine_all(PROMPT, QUERIES, output=path, progress=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 20 and {line["id"] for line in lines} == {str(i) for i in range(20)}
    read = [
        RefinementResult.from_dict({k: v for k, v in line.items() if k not in ("key", "settings")})
        for line in lines
    ]
    assert sorted(read, key=lambda result: int(result.id)) == results


def test_a_killed_run_goes_on_where_it_was(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    whole = refiner().refine_all(PROMPT, QUERIES, output=path, progress=False)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:7]) + lines[7][: len(lines[7]) // 2]
    )  # killed in the middle of a line
    log = Log()
    resumed = refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False)
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == set(
        QUERIES[7:]
    )
    assert [untimed(result) for result in resumed] == [untimed(result) for result in whole]
    assert "cut off while being written" in caplog.text
    log = Log()
    assert refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False) == resumed
    assert log.calls == [] and len(path.read_bytes().splitlines()) == 20


def test_more_queries_equal_ones_and_another_order(tmp_path):
    path = tmp_path / "results.jsonl"
    refiner().refine_all(PROMPT, ["A?", "B?"], output=path, progress=False)
    log = Log()
    results = refiner(log).refine_all(PROMPT, ["B?", "A?", "A?", "C?"], output=path, progress=False)
    assert [result.query for result in results] == ["B?", "A?", "A?", "C?"]
    assert [result.id for result in results] == ["0", "1", "2", "3"]
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == {"A?", "C?"}
    assert len(path.read_bytes().splitlines()) == 4


def test_queries_that_failed_are_done_again(tmp_path):
    path = tmp_path / "results.jsonl"
    log = Log(fail_at=set(range(0, 3)))  # the first query's task model, three times
    first = refiner(log).refine_all(
        PROMPT, ["A?", "B?"], max_in_flight=1, output=path, progress=False
    )
    assert [result.stop_reason for result in first] == ["failed", "finished"]
    log = Log()
    again = refiner(log).refine_all(PROMPT, ["A?", "B?"], output=path, progress=False)
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == {"A?"}
    assert again[0].error is None and len(path.read_bytes().splitlines()) == 2


def test_a_fatal_failure_stops_the_run_and_loses_nothing(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    clean = Log()
    refiner(clean).refine_all(PROMPT, QUERIES[:3], progress=False)
    log = Log(fail_at=set(range(len(clean.calls), 999)), error=BudgetExceeded("$5 are spent"))
    results = refiner(log).refine_all(PROMPT, QUERIES, max_in_flight=1, output=path, progress=False)
    assert [result.error is None for result in results] == [True] * 3 + [False] * 17
    assert all(result.error.kind == "BudgetExceeded" for result in results[3:])
    assert len(log.calls) == len(clean.calls) + 1  # the fourth query's first call, and no other
    assert "stopped after 3 of 20 queries" in caplog.text
    assert len(path.read_bytes().splitlines()) == 4
    log = Log()
    assert all(
        r.error is None
        for r in refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False)
    )
    assert len({said[-1]["content"] for role, said, _ in log.calls if role == "task"}) == 17


def test_a_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "results.jsonl"
    refiner().refine_all(PROMPT, ["A?"], output=path, progress=False)
    before = path.read_bytes()
    for other in (refiner(tokens_per_step=5), refiner(verifier=lambda query, output: True)):
        with pytest.raises(ValueError, match="holds results of other settings or models"):
            other.refine_all(PROMPT, ["A?"], output=path, progress=False)
    assert path.read_bytes() == before
    path.write_text('{"question": "mine"}\n')
    with pytest.raises(ValueError, match="line 1 of .* is no refinement result"):
        refiner().refine_all(PROMPT, ["A?"], output=path, progress=False)
    assert path.read_text() == '{"question": "mine"}\n'


def test_paid_replies_are_not_paid_twice(tmp_path):
    def said(body, number):
        system = body["messages"][0]["content"]
        user = body["messages"][-1]["content"]
        if user.startswith("Prompt:"):
            return Answer(improve(system, user))
        if user.startswith("Question:"):
            return Answer("Be careful.")
        full = answer(25)(system, user).split()
        limit = body["max_tokens"]
        return Answer(
            " ".join(full[:limit]), finish_reason="length" if len(full) > limit else "stop"
        )

    with LoopbackServer(said) as server:
        cache = ReplayCache(tmp_path / "replies.sqlite")
        runs = []
        for _ in range(2):
            with OpenAIChat("small", server.base_url, "none", cache=cache) as chat:
                results = ProRefiner(chat, chat, chat).refine_all(
                    PROMPT, QUERIES[:5], progress=False
                )
                runs.append((results, chat.stats))
        request_count = len(server.requests)
    (first, paid), (second, unpaid) = runs
    # Queries whose critic says the same share the optimizer's greedy reply already in the first
    # run.
    assert paid.calls - paid.cached == request_count == len(cache) and paid.cached == 4 * 3
    assert unpaid.cached == unpaid.calls == paid.calls and unpaid.usage.tokens == 0
    assert [(r.answer, r.prompt, len(r.steps)) for r in first] == [
        (r.answer, r.prompt, len(r.steps)) for r in second
    ]
    assert first[0].prompt == PROMPT + "+++" and second[0].usage["task"].cached == 4


def test_an_edited_verifier_is_not_continued(tmp_path):
    """It decides which questions are refined, so results of both must not be mixed."""
    file = tmp_path / "my_verifier.py"
    path = tmp_path / "results.jsonl"

    def refine(limit):
        file.write_text(f"def judge(query, answer):\n    return len(answer) > {limit}\n")
        names = {"__name__": "my_verifier"}
        exec(compile(file.read_text(), str(file), "exec"), names)
        log = Log()
        judged = replace(refiner(log), verifier=names["judge"])
        judged.refine_all(PROMPT, QUERIES, output=path, progress=False)
        return log.calls

    assert refine(3)
    assert refine(3) == []
    with pytest.raises(ValueError, match="code of a function"):
        refine(4)

    # Results of older versions do not say.
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["version"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert refine(4) == []


def test_a_clients_own_sampling_is_part_of_the_version():
    """Temperatures of the roles are sent with each call; a client may have other defaults."""

    def version(**sampling):
        critic = OpenAIChat("m", base_url="http://localhost:1/v1", **sampling)
        return ProRefiner(critic, critic, critic).version()

    assert version() is None
    assert version(top_p=0.9) not in (None, version(top_p=0.8))
