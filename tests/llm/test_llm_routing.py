"""`RoutedChat`: which model answers, and that it stays."""

import pickle
from collections import Counter

import pytest

from agentic_prompting.llm import (
    Misconfigured,
    RoutedChat,
    ScriptedChat,
    Unreachable,
    chats,
    complete,
)


def user(text):
    return [{"role": "user", "content": text}]


def models(*names):
    return {name: ScriptedChat(lambda messages, name=name: name) for name in names}


def longest_to_b(question, names):
    return "b" if len(question) > 5 else "a"


def test_the_rule_sees_the_question_and_the_names():
    seen = []
    chat = RoutedChat(
        models("a", "b"), lambda question, names: seen.append((question, names)) or "b"
    )
    reply = complete(chat, [{"role": "system", "content": "s"}, *user("q"), *user("later")])
    assert reply.text == "b"
    assert seen == [("q", ["a", "b"])]


def test_a_session_keeps_its_model():
    chat = RoutedChat(models("a", "b"), longest_to_b)
    texts = [
        complete(chat, user(text), session="s").text for text in ("short", "a long question", "x")
    ]
    assert texts == ["a", "a", "a"]
    assert complete(chat, user("a long question"), session="t").text == "b"
    assert complete(chat, user("a long question")).text == "b"
    assert complete(chat, user("short")).text == "a"


def test_everything_is_passed_on():
    inner = ScriptedChat(["ok"])
    complete(RoutedChat({"a": inner}, {"a": 1.0}), user("q"), session="s", temperature=0.3)
    assert inner.calls == [user("q")]
    assert inner.sampling == [{"temperature": 0.3}]


def test_weighted_draws_depend_on_seed_and_session_alone():
    weights = {"a": 3.0, "b": 1.0, "c": 0.0}
    sessions = [f"episode-{i}" for i in range(400)]

    def draws(seed, order):
        chat = RoutedChat(models("a", "b", "c"), weights, seed=seed)
        return {session: chat.choose(user("q"), session) for session in order}

    assert draws(0, sessions) == draws(0, reversed(sessions))
    assert draws(0, sessions) != draws(1, sessions)
    counts = Counter(draws(0, sessions).values())
    assert counts["c"] == 0
    assert 270 < counts["a"] < 330
    chat = RoutedChat(models("a", "b", "c"), weights)
    assert len({chat.choose(user(f"question {i}")) for i in range(50)}) == 2, (
        "without sessions, by question"
    )
    assert len({chat.choose(user("the same")) for _ in range(20)}) == 1


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(chats, "_SESSIONS_KEPT", 3)
    chat = RoutedChat(models("a", "b"), longest_to_b)
    for session in "wxyz":
        chat.choose(user("short"), session)
        chat.choose(user("short"), "x")
    assert list(chat._chosen) == ["y", "z", "x"]
    assert chat.choose(user("a long question"), "x") == "a", "used last, so kept"
    assert chat.choose(user("a long question"), "w") == "b", "forgotten"


@pytest.mark.parametrize(
    "rule",
    [lambda question, names: "gpt", lambda question, names: 1 / 0, lambda question, names: []],
)
def test_a_bad_rule_is_a_failed_call(rule):
    reply = complete(RoutedChat(models("a", "b"), rule), user("q"), session="s")
    assert isinstance(reply.error, Misconfigured)
    assert "routing rule" in str(reply.error)


def test_unknown_names_say_which_exist():
    reply = complete(RoutedChat(models("a", "b"), lambda question, names: "gpt"), user("q"))
    assert "'gpt'" in str(reply.error)
    assert "['a', 'b']" in str(reply.error)
    with pytest.raises(ValueError, match=r"\['gpt'\].*\['a', 'b'\]"):
        RoutedChat(models("a", "b"), {"gpt": 1.0})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        RoutedChat(models("a", "b"), weights)


def test_check_checks_every_model_that_can_be_checked():
    class Checked(ScriptedChat):
        def __init__(self, error=None):
            super().__init__(["ok"])
            self.error, self.checks = error, 0

        def check(self):
            self.checks += 1
            if self.error:
                raise self.error

    good, bad = Checked(), Checked(Unreachable("gone"))
    RoutedChat({"a": good, "b": ScriptedChat(["ok"])}, {"a": 1.0}).check()
    assert good.checks == 1
    with pytest.raises(Unreachable):
        RoutedChat({"a": good, "b": bad}, {"a": 1.0}).check()


def test_pickle_keeps_the_choices_of_weighted_rules():
    chat = RoutedChat({"a": None, "b": None}, {"a": 1.0, "b": 1.0}, seed=3)
    twin = pickle.loads(pickle.dumps(chat))
    assert [twin.choose(user("q"), str(i)) for i in range(50)] == [
        chat.choose(user("q"), str(i)) for i in range(50)
    ]
