"""Commands whose endpoints never answer, or reject the key: an error within seconds that names the
role and its options. A model that an endpoint does not list is named in a warning.
"""

import json
import socketserver
import threading
import time

import pytest

from support.misbehaving import MisbehavingServer
from support.servers import Answer, LoopbackServer, unused_url

# An endpoint that has never answered is waited for 30 s at most, one that has answered for 120 s.
SECONDS = 60


@pytest.fixture(params=["refused", "unknown host", "no HTTP"])
def silent_url(request):
    if request.param == "refused":
        yield unused_url()
    elif request.param == "unknown host":
        yield "http://nowhere.invalid/v1"
    else:
        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
            server.shutdown()


class HangUp(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def solve(body, number):
    question = body["messages"][-1]["content"]
    if "<prompt>" in question:
        return "<prompt>Take care.</prompt><prompt>Hurry.</prompt>"
    return "<answer>1</answer>"


def options(**urls):
    words = []
    for role, url in urls.items():
        words += [f"--{role}-model=m", f"--{role}-base-url={url}"]
    return words


def run_quickly(run, *words):
    started = time.monotonic()
    status, out, err = run(*words)
    assert time.monotonic() - started < SECONDS
    return status, out, err


@pytest.mark.parametrize("command", ["headroom", "evolve", "refine", "evaluate"])
def test_a_silent_endpoint_is_named_in_seconds(run, sums, tmp_path, silent_url, command):
    with LoopbackServer(solve) as server:
        if command == "refine":
            words = ["--query=q", *options(task=server.base_url, feedback=silent_url)]
            named = "--feedback-base-url"
        elif command == "evaluate":
            table = {
                "title": "t",
                "output": str(tmp_path / "out"),
                "tasks": [str(sums)],
                "n": 4,
                "models": {"large": {"name": "m", "base_url": silent_url}},
                "systems": {"plain": {"kind": "prompted", "model": "large"}},
            }
            (tmp_path / "table.yaml").write_text(json.dumps(table))
            words = [f"--config={tmp_path / 'table.yaml'}"]
            named = "models: large"
        else:
            words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}"]
            words += options(policy=server.base_url, reference=silent_url)
            named = "--reference-base-url"
        status, out, err = run_quickly(run, command, *words)
    assert status == 1 and named in err, err
    assert "wrote no prompt" not in out + err and "Unreachable(" not in out + err
    assert not server.requests, "nothing is paid for before all endpoints answer"


def test_a_server_without_a_list_of_models_is_asked(run, sums, tmp_path):
    with LoopbackServer(solve) as server:  # 501 to GET
        urls = {"policy": server.base_url, "reference": server.base_url}
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", *options(**urls)]
        status, _, err = run("headroom", *words, "--tried=4", "--calls=64")
    assert status == 0 and server.requests, err


def test_a_server_that_knows_chats_alone_is_asked(run, sums, tmp_path):
    with MisbehavingServer(say=lambda request: "<answer>1</answer>") as server:  # no GET
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", "--calls=64"]
        status, _, err = run("headroom", *words, *options(environment=server.base_url))
    assert status == 0 and server.requests, err


def test_a_recorded_run_needs_no_endpoint(run, sums, tmp_path):
    with LoopbackServer(solve) as server:
        urls = {"policy": server.base_url, "reference": server.base_url}
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", *options(**urls)]
        words += ["--tried=4", "--calls=64"]
        first = run("headroom", *words, "--json")
    second = run_quickly(run, "headroom", *words, "--json")
    assert (first[0], second[0]) == (0, 0), second
    assert json.loads(first[1])["prompts"] == json.loads(second[1])["prompts"]


def test_an_outage_on_the_way_is_waited_for(run, sums, tmp_path):
    def stumble(body, number):
        return Answer(drop="before") if 10 <= number < 14 else solve(body, number)

    with LoopbackServer(stumble) as server:
        urls = {"policy": server.base_url, "reference": server.base_url}
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", *options(**urls)]
        status, out, err = run("headroom", *words, "--tried=4", "--calls=64", "--json")
    assert status == 0 and json.loads(out)["failed"] == 0, err


def test_a_forgotten_address_is_pointed_out(run, sums, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with LoopbackServer(solve) as server:
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}"]
        words += [*options(policy=server.base_url), "--reference-model=m"]
        status, _, err = run_quickly(run, "headroom", *words)
    assert status == 1
    assert "--policy-base-url" in err and "--reference-base-url" in err and "api.openai.com" in err
    assert "--reference-client" in err


def test_a_call_of_one_role_finds_the_missing_key_of_another(run, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with LoopbackServer(solve) as server:
        words = [*options(task=server.base_url), "--feedback-model=m"]
        words += ["--prompt=Answer.", "--query=What is 1 + 1?"]
        status, out, err = run("refine", *words)
    assert status == 1 and "the feedback model: " in out + err, out + err


def test_a_rejected_key_names_the_options(run, sums, tmp_path):
    with LoopbackServer(lambda body, number: Answer("no", status=401)) as server:
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", "--calls=64"]
        status, _, err = run("headroom", *words, *options(environment=server.base_url))
    assert status == 1 and "large LLM" in err and "--environment-client" in err, err


def test_a_budget_without_a_price_names_the_options(run, sums, tmp_path):
    words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}", "--budget-usd=1"]
    status, _, err = run("headroom", *words, *options(environment=unused_url()))
    assert status == 2 and "budget_tokens" in err and "--environment-client" in err, err


# --- the list of models ---------------------------------------------------------------------------


def test_a_rejected_key_is_found_before_anything_is_paid(run, sums, tmp_path, monkeypatch):
    """Both roles are at one address, and only the key of the second one is wrong."""
    monkeypatch.setenv("GOOD_KEY", "sk-good-0123456789")
    monkeypatch.setenv("WRONG_SECRET", "sk-wrong-0123456789")

    def answer_get(headers):
        is_right = headers["authorization"] == "Bearer sk-good-0123456789"
        return Answer(
            body={"object": "list", "data": [{"id": "m"}]}, status=200 if is_right else 401
        )

    with LoopbackServer(solve, answer_get) as server:
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}"]
        words += options(policy=server.base_url, reference=server.base_url)
        words += ["--policy-client=key=GOOD_KEY", "--reference-client=key=WRONG_SECRET"]
        status, out, err = run_quickly(run, "evolve", *words)
    assert status == 1 and not server.requests, err
    assert "the reference LLM" in err and "WRONG_SECRET" in err and "--reference-client" in err
    assert "OPENAI_API_KEY" not in err and "sk-" not in out + err


@pytest.mark.parametrize(
    "answer",
    [
        Answer("no", status=403),
        Answer("no", status=404),
        Answer(body=b"<html>"),
        Answer(body={"data": "m"}),
        Answer(body={"data": []}),
        Answer(body={"data": [{"id": None}]}),
        Answer(body={"data": [{"id": "m"}]}, drop="mid"),
        Answer(body={"data": [{"id": "other"}, {"id": "m"}]}),
        Answer(body={"data": [{"id": "m:latest"}]}),
        Answer(body={"data": [{"id": "models/m"}]}),
    ],
)
def test_other_answers_to_the_list_prove_nothing(run, answer):
    with LoopbackServer(solve, lambda headers: answer) as server:
        words = options(task=server.base_url, feedback=server.base_url)
        status, _, err = run("refine", *words, "--query=What is 1 + 1?")
    assert status == 0 and server.requests and "list" not in err, err


def test_a_model_that_is_not_listed_leads_to_a_warning(run, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-good-0123456789")
    names = ["text-embedding", "gpt-4o-mini", "gpt-4o", "whisper", "sk-good-0123456789", "a", "b"]
    listed = Answer(body={"object": "list", "data": [{"id": name} for name in names]})
    with LoopbackServer(solve, lambda headers: listed) as server:
        urls = [f"--task-base-url={server.base_url}", f"--feedback-base-url={server.base_url}"]
        words = [*urls, "--task-model=gpt-4o", "--feedback-model=gpt-4o-minl"]
        words += ["--task-client=key=SOME_KEY", "--feedback-client=key=SOME_KEY"]
        status, out, err = run("refine", *words, "--query=What is 1 + 1?")
    assert status == 0 and server.requests, "some servers list fewer models than they serve"
    (warning,) = [line for line in err.splitlines() if "list" in line]
    assert "the feedback model" in warning and "gpt-4o-minl" in warning
    assert "gpt-4o-mini" in warning and "sk-good" not in out + err


def test_an_error_of_a_call_names_the_variable_of_its_key(run, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-wrong-0123456789")
    with LoopbackServer(lambda body, number: Answer("no", status=401)) as server:
        words = options(task=server.base_url, feedback=server.base_url)
        status, out, err = run("refine", *words, "--task-client=key=MY_KEY", "--query=q")
    assert status == 1 and "set MY_KEY" in out + err and "sk-wrong" not in out + err, err
