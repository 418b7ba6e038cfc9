"""How each role's model is called, as options say."""

import pytest

from agentic_prompting.cli.client_settings import ClientSettings
from agentic_prompting.llm import OpenAIChat


def make_client(text):
    return ClientSettings.read(text, "policy-client").make_client("m", "http://127.0.0.1:1/v1")


def test_settings_are_arguments_of_the_client(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    client = make_client("concurrency=8, rate=60,price=0.15/0.6,key=MY_KEY")
    assert (client.max_concurrency, client.requests_per_minute) == (8, 60.0)
    assert client.price == (0.15, 0.6)
    assert (client.find_key(), client.key_variable) == ("sk-secret", "MY_KEY")
    plain = OpenAIChat("m", "http://127.0.0.1:1/v1")
    for text in (None, ""):
        client = make_client(text)
        for name in ("max_concurrency", "requests_per_minute", "price", "key_variable"):
            assert getattr(client, name) == getattr(plain, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=8", "concurrency, rate, price and key"),
        ("concurrency=many", "whole number"),
        ("rate", "requests per minute"),
        ("price=0.15", "per million"),
        ("key=UNSET_VARIABLE", "UNSET_VARIABLE"),
    ],
)
def test_a_mistake_names_the_option(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_client(text)
    assert "--policy-client" in str(refused.value)


def test_a_key_itself_is_not_shown():
    with pytest.raises(ValueError, match="environment variable") as refused:
        make_client("key=sk-abcdef123456")
    assert "abcdef" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["evolve", "--policy-model", "a", "--reference-model", "b", "--policy-client", "speed=1"],
        ["evolve", "--policy-model", "a", "--reference-model", "b", "--reference-client", "rate=0"],
        ["ask", "nowhere", "q", "--environment-model", "m", "--environment-client", "price=1"],
        ["headroom", "--policy-model", "a", "--policy-client", "key="],
    ],
)
def test_commands_refuse_wrong_settings(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    rows = [] if words[0] == "ask" else ["--dataset", "rows.jsonl"]
    status, _, err = run(*words, *rows)
    assert status == 2 and err.count("\n") == 1, err
