"""Budgets: what is booked where, what stops when, and that a job's budget is that of all its
processes and restarts.
"""

import gc
import logging
import math
import os
import pickle
import sqlite3
import subprocess
import sys
import time

import pytest

from agentic_prompting import LLMEnvironment
from agentic_prompting.llm import (
    Budget,
    BudgetExceeded,
    BudgetUnavailable,
    OpenAIChat,
    ReplayCache,
    RoutedChat,
    ScriptedChat,
    Usage,
    charge,
    start,
)
from support.misbehaving import MisbehavingServer, in_turn

MILLION = 1_000_000


@pytest.fixture
def server():
    """Every reply costs 15 tokens: 10 read, 5 written."""
    with MisbehavingServer() as server:
        yield server


def chat_at(server, **settings):
    return OpenAIChat(
        "m", server.base_url, price=(MILLION, MILLION), **settings
    )  # a dollar a token


def ask(chat, text="x"):
    return start(chat([{"role": "user", "content": text}])).result(10)


def test_a_book_adds_up(tmp_path):
    for budget in (Budget(), Budget(path=tmp_path / "deep" / "spending.sqlite")):
        budget.add("environment", Usage(10, 5, 1.5))
        budget.add("environment", Usage(1, 1, 0.5))
        budget.add("judge", Usage(7, 0, 0.0))
        budget.add("verifier", Usage())
        assert budget.by_account() == {"environment": Usage(11, 6, 2.0), "judge": Usage(7, 0, 0.0)}
        assert budget.spent() == Usage(18, 6, 2.0) and budget.spent("nobody") == Usage()
        assert (
            str(budget) == "environment $2.0000 (17 tokens), judge $0 or no price known (7 tokens)"
        )
    assert str(Budget()) == "nothing"
    assert pickle.loads(pickle.dumps(budget)).spent() == Usage(18, 6, 2.0), (
        "a copy reads the same book"
    )


def test_where_nothing_was_spent_there_is_no_book(tmp_path):
    with OpenAIChat("m", "http://127.0.0.1:1/v1", max_retries=0, price=(1, 1)) as chat:
        budget = Budget(usd=1, path=tmp_path / "spending.sqlite")
        charge(budget, environment=chat)
        assert ask(chat).error is not None and str(budget) == "nothing"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limit", "part"), [({"usd": 30}, "$30.0000"), ({"tokens": 30}, "30 tokens")]
)
def test_a_total_over_several_roles(server, limit, part):
    with chat_at(server) as critic, chat_at(server) as rewriter:
        charge(Budget(**limit), feedback=critic, optimizer=rewriter, verifier=None)
        assert [ask(critic).error, ask(rewriter).error] == [None, None]
        for chat in (critic, rewriter):
            error = ask(chat).error
            assert isinstance(error, BudgetExceeded)
            assert error.fatal
            assert part in str(error)
            assert "in all" in str(error)
        assert len(server.requests) == 2


def test_a_roles_own_limit_stops_it_alone(server):
    with chat_at(server, budget_tokens=20) as small, chat_at(server) as free:
        charge(Budget(), judge=small, environment=free)
        assert [ask(small).error, ask(small).error] == [None, None], (
            "reached, not foreseen: 15 of 20 after the first"
        )
        assert "'judge'" in str(ask(small).error) and ask(free).error is None


def test_calls_on_their_way_end_and_are_booked(server):
    """They were expected to cost 30 tokens together, and cost 75."""
    server.latency = 0.1
    with chat_at(server, budget_tokens=30, max_tokens=1) as chat:
        budget = Budget()
        charge(budget, environment=chat)
        futures = [start(chat([{"role": "user", "content": str(i)}])) for i in range(5)]
        assert [future.result().error for future in futures] == [None] * 5
        assert isinstance(ask(chat).error, BudgetExceeded) and budget.spent().tokens == 75


def test_requests_wait_for_those_in_flight(server):
    """All five were sent at once, and the budget ended at 75."""
    server.latency = 0.05
    with chat_at(server, budget_tokens=30) as chat:
        budget = Budget()
        charge(budget, environment=chat)
        futures = [start(chat([{"role": "user", "content": str(i)}])) for i in range(5)]
        errors = [future.result().error for future in futures]
        assert [type(error) for error in errors] == [type(None)] * 2 + [BudgetExceeded] * 3
        assert len(server.requests) == 2 and budget.spent().tokens == 30


@pytest.mark.timeout(120)
def test_a_large_budget_holds_no_request_up(server):
    server.latency = 600
    with chat_at(server, budget_tokens=10_000_000) as chat:
        futures = [start(chat([{"role": "user", "content": str(i)}])) for i in range(20)]
        while len(server.requests) < 20:  # one after another, the second would be sent after 600 s
            time.sleep(0.01)
        assert not any(future.done() for future in futures)


def test_one_roles_limit_holds_no_other_up(server):
    """Its requests wait for each other, and for them nobody else."""
    server.latency = 0.3
    with chat_at(server, budget_tokens=40) as judge, chat_at(server) as free:
        charge(Budget(tokens=10_000_000), judge=judge, environment=free)
        waiting = [start(judge([{"role": "user", "content": str(i)}])) for i in range(4)]
        futures = [start(free([{"role": "user", "content": str(i)}])) for i in range(8)]
        assert [future.result().error for future in futures] == [None] * 8
        # Three of the judge's requests take three times as long, because they follow each other.
        assert not all(future.done() for future in waiting)
        assert [type(future.result().error) for future in waiting] == [type(None)] * 3 + [
            BudgetExceeded
        ]


def test_a_request_that_stops_waiting_leaves_no_trace(server):
    server.latency = 0.3
    with chat_at(server, budget_tokens=30) as chat:
        first, second, third = (
            start(chat([{"role": "user", "content": str(i)}])) for i in range(3)
        )
        while not server.requests:
            time.sleep(0.005)
        assert second.cancel()
        assert [first.result().error, third.result().error] == [None, None]
        assert [request["messages"][0]["content"] for request in server.requests] == ["0", "2"]


def test_a_failed_request_gives_its_room_back():
    plan = in_turn("400", "reset before the reply", None)
    with (
        MisbehavingServer(plan) as server,
        chat_at(server, budget_tokens=30, max_retries=0) as chat,
    ):
        assert [ask(chat).error is None for _ in range(5)] == [False, False, True, True, False]
        assert isinstance(ask(chat).error, BudgetExceeded)


def test_a_book_without_estimates_goes_on(tmp_path):
    path = tmp_path / "spending.sqlite"
    table = (
        "CREATE TABLE spending (account TEXT PRIMARY KEY, prompt_tokens INTEGER NOT NULL, "
        "completion_tokens INTEGER"
    )
    with sqlite3.connect(path) as older:
        older.execute(f"{table} NOT NULL, cost_usd REAL NOT NULL) WITHOUT ROWID")
        older.execute("INSERT INTO spending VALUES ('judge', 7, 3, 0.5)")
    budget = Budget(path=path)
    budget.add("judge", Usage(1, 1, 0.5, 2))
    assert Budget(path=path).by_account() == {"judge": Usage(8, 4, 1.0, 2)}
    assert str(budget) == "judge $1.0000 (12 tokens, 2 of them estimated)"


def test_earlier_spending_moves_to_the_new_budget(server, tmp_path):
    path = tmp_path / "spending.sqlite"
    with chat_at(server) as chat:
        ask(chat)
        charge(Budget(path=path), environment=chat)
        ask(chat)
    with chat_at(server, budget_usd=30) as chat:  # a run that is resumed
        charge(Budget(path=path), environment=chat)
        assert "$30.0000 of the budget of $30.0000 are spent by 'environment'" in str(
            ask(chat).error
        )


def test_replies_from_the_cache_cost_nothing(server, tmp_path):
    cache = ReplayCache(tmp_path / "replies.sqlite")
    budget = Budget(tokens=16)
    for _ in range(3):
        with chat_at(server, cache=cache) as chat:
            charge(budget, environment=chat)
            assert start(chat([{"role": "user", "content": "x"}], repeat=0)).result(5).error is None
    assert budget.spent().tokens == 15


def test_models_behind_environments_and_routers_are_charged(server):
    with chat_at(server) as chat:
        budget = Budget()
        environment = LLMEnvironment(
            RoutedChat({"big": chat, "fake": ScriptedChat(["x"])}, {"big": 1.0})
        )
        charge(budget, environment=environment)
        ask(environment.chat)
        assert budget.by_account() == {"environment/big": Usage(10, 5, 15.0)}


def test_a_limit_on_what_books_nothing_is_warned_of(server, tmp_path, caplog):
    for budget in (Budget(), Budget(usd=1)):
        charge(budget, environment=LLMEnvironment(chat_at(server)), judge=len)
        budget.warn_if_it_limits_nothing()
    unlimited = Budget()
    charge(unlimited, environment=LLMEnvironment(lambda messages: "reply"))
    unlimited.warn_if_it_limits_nothing()
    assert not caplog.records
    # Also where an earlier process has spent something under the same path.
    Budget(usd=1, path=tmp_path / "book.sqlite").add("environment", Usage(1, 1, 0.1))
    limited = Budget(usd=1, path=tmp_path / "book.sqlite")
    charge(limited, environment=LLMEnvironment(lambda messages: "reply"))
    limited.warn_if_it_limits_nothing()
    assert "the budget limits nothing" in caplog.text


def test_unknown_price_needs_a_token_budget(server, caplog):
    with (
        OpenAIChat("no-such-model", server.base_url) as one,
        OpenAIChat("no-such-model", server.base_url) as two,
    ):
        with pytest.raises(ValueError, match="'no-such-model' is not known.*budget_tokens"):
            charge(Budget(usd=1), feedback=one)
        budget = Budget(usd=1, tokens=20)
        with caplog.at_level(logging.WARNING):
            charge(budget, feedback=one, optimizer=two)
        assert all("'no-such-model'" in record.message for record in caplog.records)
        assert len(caplog.records) == 2
        assert ask(one).error is None and ask(two).error is None
        assert isinstance(ask(one).error, BudgetExceeded)


def test_limits_that_make_no_sense(caplog):
    for limits in ({"usd": -1}, {"tokens": -1}, {"usd": math.nan}, {"tokens": math.nan}):
        with pytest.raises(ValueError, match="negative"):
            Budget(**limits)
    with pytest.raises(ValueError, match="budget_tokens"):
        OpenAIChat("no-such-model", budget_usd=1)
    OpenAIChat("no-such-model", budget_usd=1, budget_tokens=10)
    assert "only the tokens are counted" in caplog.text


# A book that cannot be kept


@pytest.fixture
def locked(tmp_path):
    """A book that another process does not let go of; `locked(False)` lets go."""
    path = tmp_path / "spending.sqlite"
    Budget(path=path).add("before", Usage(1, 0, 0.0))
    assert Budget(path=path).spent().tokens == 1
    gc.collect()  # connections are parts of a circle
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE spending SET cost_usd = 0.0")
    yield path, holder
    holder.close()


@pytest.fixture
def _quickly(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.budget._BUSY_SECONDS", 0.1, raising=False)
    monkeypatch.setattr("agentic_prompting.records._AGAIN_SECONDS", 0.0, raising=False)


def damage(path):
    sqlite3.connect(path, isolation_level=None).execute("DROP TABLE spending")


@pytest.mark.parametrize("limit", [{}, {"usd": 1000}])
def test_a_locked_book_holds_up_and_loses_nothing(server, locked, _quickly, limit):
    path, holder = locked
    with chat_at(server) as booked, chat_at(server) as free:
        budget = Budget(path=path, **limit)
        charge(budget, judge=booked)
        futures = [start(booked([{"role": "user", "content": str(i)}])) for i in range(3)]
        assert ask(free).error is None
        assert [future.result(10).error for future in futures] == [None] * 3
        assert "judge $45.0000 (45 tokens)" in str(budget), (
            "what is not in the book yet counts all the same"
        )
        holder.close()
        assert budget.spent().tokens == 46 == Budget(path=path).spent().tokens, (
            "written as soon as it can be"
        )


def test_full_disk_loses_no_reply(server, tmp_path, _quickly, caplog):
    path = tmp_path / "spending.sqlite"
    Budget(path=path).add("before", Usage(1, 0, 0.0))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON spending BEGIN SELECT RAISE(FAIL, 'database or disk "
        "is full'); END"
    )
    with chat_at(server) as chat:
        charge(Budget(path=path), environment=chat)
        assert [ask(chat, str(i)).error for i in range(20)] == [None] * 20
        assert Budget(path=path).spent().tokens == 1
        assert caplog.text.count("disk is full") == 1, "said once, not for every call"
        other.execute("DROP TRIGGER full")
        assert ask(chat).error is None
        assert Budget(path=path).spent().tokens == 1 + 21 * 15


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_damaged_book_loses_neither_reply_nor_stop(server, tmp_path, _quickly, when):
    path = tmp_path / "spending.sqlite"
    if when == "before":
        path.write_text("no database at all " * 1000)
    with chat_at(server) as chat:
        budget = Budget(path=path)
        charge(budget, environment=chat)
        assert ask(chat).error is None
        if when != "before":
            damage(path)
        assert ask(chat).error is None and ask(chat).error is None
        assert "environment $45.0000 (45 tokens)" in str(budget) and str(path) in str(budget)


@pytest.mark.parametrize("limit", [{"usd": 1000}, {"tokens": 10**6}])
def test_limit_without_a_book_stops_clearly(server, tmp_path, _quickly, limit):
    path = tmp_path / "spending.sqlite"
    server.latency = 0.1
    with chat_at(server) as chat:
        budget = Budget(path=path, **limit)
        charge(budget, environment=chat)
        ask(chat)
        paid = start(chat([{"role": "user", "content": "on its way"}]))
        while len(server.requests) < 2:
            time.sleep(0.005)
        damage(path)
        assert paid.result(10).text == "reply to on its way"
        error = ask(chat).error
        assert isinstance(error, BudgetUnavailable) and error.fatal
        assert str(path) in str(error) and "\n" not in str(error)
        assert len(server.requests) == 2
        with pytest.raises(BudgetUnavailable):
            budget.stop_when_spent()


def test_a_clients_own_limit_needs_the_book_too(server, tmp_path, _quickly):
    (tmp_path / "spending.sqlite").write_text("no database " * 1000)
    with chat_at(server, budget_usd=10) as chat:
        charge(Budget(path=tmp_path / "spending.sqlite"), environment=chat)
        assert isinstance(ask(chat).error, BudgetUnavailable)


def test_long_locked_book_stops_a_limited_run(server, locked, _quickly, monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.budget._GRACE_SECONDS", 0.0)
    with chat_at(server) as chat:
        charge(Budget(usd=1000, path=locked[0]), environment=chat)
        assert isinstance(ask(chat).error, BudgetUnavailable) and "locked" in str(ask(chat).error)


# Wrappers and shared clients


def test_wrappers_are_looked_through(server):
    class Around:
        def __init__(self, **inside):
            vars(self).update(inside)

    with chat_at(server) as one, chat_at(server) as two, chat_at(server) as three:
        budget = Budget()
        loop = Around(chat=three)
        loop.model = loop
        charge(budget, reference=Around(chat=Around(models={"a": one, "b": two})), judge=loop)
        for chat in (one, two, three):
            ask(chat)
        assert sorted(budget.by_account()) == ["judge", "reference/a", "reference/b"]


def test_client_with_several_roles_has_joined_account(server):
    with chat_at(server) as chat:
        budget = Budget()
        charge(budget, feedback=chat, optimizer=chat, verifier=ScriptedChat(["x"]))
        ask(chat)
        assert budget.by_account() == {"feedback+optimizer": Usage(10, 5, 15.0)}


PROCESS = """
import sys
from agentic_prompting.llm import Budget, BudgetExceeded, OpenAIChat, charge, start
with OpenAIChat("m", sys.argv[1], max_concurrency=2) as chat:
    charge(Budget(tokens=3000, path=sys.argv[2]), environment=chat)
    futures = [start(chat([{"role": "user", "content": str(i)}])) for i in range(400)]
    replies = [future.result() for future in futures]
    assert {type(reply.error) for reply in replies} <= {type(None), BudgetExceeded}
    print(sum(reply.error is None for reply in replies))
"""


def test_processes_share_one_budget(server, tmp_path):
    """Two processes, no torch: together they may overshoot by what both had on its way, four calls."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PROCESS, server.base_url, str(tmp_path / "spending.sqlite")]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answered = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert 200 <= sum(answered) == len(server.requests) <= 200 + 3
    assert Budget(path=tmp_path / "spending.sqlite").spent().tokens == 15 * sum(answered)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_books_what_it_spends(tmp_path):
    """Its entries were taken for the parent's and dropped until another process had made the file:
    no limit at all.
    """
    budget = Budget(usd=2.0, path=tmp_path / "budget.sqlite")
    budget.stop_when_spent()
    if (child := os.fork()) == 0:
        budget.note("environment", Usage(1, 1, 1.0))
        budget.settle()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert budget.spent().cost_usd == 1.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_does_not_write_the_parents_entries(tmp_path):
    budget = Budget(path=tmp_path / "budget.sqlite")
    budget.note("environment", Usage(1, 1, 1.0))
    if (child := os.fork()) == 0:
        budget.add("environment", Usage(1, 1, 0.25))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert budget.spent().cost_usd == 1.25
