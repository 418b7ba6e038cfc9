"""Settings of command-line agents as data, with a stand-in for a harness (the real ones:
tests/interop).
"""

import json
import logging
import sys
import textwrap

import pytest

from agentic_prompting.harnesses import HARNESSES, CommandProgram, Harness, get_harness
from agentic_prompting.llm import Misconfigured
from agentic_prompting.rollout import Limits
from support.programs import LIMITS, play_program

AGENT = """
import json, os, sys, urllib.request
home = os.environ["HOME"]
settings = json.load(open(home + "/.own/settings.json"))
own = open(home + "/.own/AGENTS.md").read() if os.path.exists(home + "/.own/AGENTS.md") else ""
messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": own + sys.argv[1]}]
body = json.dumps({"model": settings["model"], "messages": messages}).encode()
request = urllib.request.Request(settings["url"] + "/chat/completions", body, {"x-api-key": os.environ["OWN_KEY"]})
said = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
json.dump({"info": {"answer": said, "settings": settings}}, open(home + "/trace.json", "w"))
print("log line\\n42")
"""

SETTINGS = '{"model": "{model}", "url": "{url}", "n": [{window}, {output}], "by": "{api}"}'


def own(tmp_path, **changes):
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(AGENT))
    settings = {
        "name": "own",
        "command": (sys.executable, str(path), "{task}"),
        "environment": {"OWN_KEY": "{api_key}"},
        "dialects": {
            "chat": ("completions", "{base_url}"),
            "responses": ("responses", "{base_url}/x"),
        },
        "files": {".own/settings.json": SETTINGS},
        "prompt_file": ".own/AGENTS.md",
        "task": "Do: {question}",
    }
    return Harness(**{**settings, **changes})


ROW = {
    "question": "what {url}?",
    "answers": ["SECRET"],
    "prompt": [{"role": "system", "content": "EVOLVED. "}],
}


def test_a_harness_is_told_the_address_and_the_prompt_in_its_own_way(tmp_path):
    rollout, policy = play_program(own(tmp_path), row=ROW)
    assert rollout.answer == "42", "a text, and never a reward"
    (context,) = policy.contexts()
    assert "system\nYou are an agent.<" in context and "user\nEVOLVED. Do: what {url}?<" in context
    assert context.count("EVOLVED") == 1 and "SECRET" not in context


def test_without_a_file_for_prompts_they_stand_in_front(tmp_path):
    _, policy = play_program(own(tmp_path, prompt_file=None), row=ROW)
    assert "system\nEVOLVED. \n\nYou are an agent.<" in policy.contexts()[0]


def test_an_answer_in_a_file_and_the_trainers_limits(tmp_path):
    rollout, _ = play_program(own(tmp_path, answer=("trace.json", "info", "settings")), row=ROW)
    found = json.loads(rollout.answer.replace("'", '"'))
    assert found["n"] == [LIMITS.max_context, LIMITS.max_turn_tokens]
    assert found["by"] == "completions"
    small = Limits(max_turn_tokens=4000, max_tokens=4000, max_context=900)
    rollout, _ = play_program(
        own(tmp_path, answer=("trace.json", "info", "settings", "n")), row=ROW, limits=small
    )
    assert rollout.answer == "[900, 900]"
    for missing in ("no.json", "trace.json"):
        rollout, _ = play_program(own(tmp_path, answer=(missing, "info", "nothing")), row=ROW)
        assert rollout.status == "malformed"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "spoils", ["os.mkfifo(file)", "os.symlink(OUTSIDE, file)", "os.mkdir(file)"]
)
def test_files_that_the_trainer_reads_after_a_harness_are_files_of_its_own(tmp_path, spoils):
    """No pipe, which would hold up all rollouts, and no link to what the harness itself may not
    write.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.json").write_text(
        '{"info": "from outside", "role": "assistant", "content": "from outside"}'
    )
    ends = f"""
file = home + "/trace.json"
os.remove(file), os.mkdir(home + "/sessions"), os.symlink({str(outside)!r}, home + "/sessions/linked")
{spoils.replace("OUTSIDE", repr(str(outside / "a.json")))}
"""
    harness = own(tmp_path, answer=("trace.json", "info"), trace="sessions/linked/*.json")
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT) + ends)
    rollout, _ = play_program(harness, row=ROW)
    assert (rollout.status, rollout.answer) == ("malformed", None)
    assert rollout.counts["program/witness_differences"] == 0


def test_a_harness_that_gives_up_at_a_reply_that_was_cut_learns(tmp_path):
    giving_up = AGENT.replace(
        'print("log line', 'sys.exit("Incomplete") if said else print("log line'
    )
    for text, status in (("x" * 999, "malformed"), ("whole", "failed")):
        harness = own(tmp_path)
        (tmp_path / "agent.py").write_text(giving_up)
        assert play_program(harness, lambda *_, text=text: text, row=ROW)[0].status == status


def test_a_harness_that_gives_up_at_an_empty_reply_learns(tmp_path):
    """qwen-code asks three times and ends with an error: the policy's doing."""
    harness = own(tmp_path)
    (tmp_path / "agent.py").write_text(
        AGENT.replace('print("log line', 'sys.exit("Empty") if not said else print("log line')
    )
    assert (
        play_program(harness, lambda *_: "<think>\nhm\n</think>\n\n", row=ROW)[0].status
        == "malformed"
    )
    assert play_program(harness, lambda *_: "whole", row=ROW)[0].status == "answered"


def test_the_table_of_harnesses():
    assert set(HARNESSES) == {
        "mini-swe-agent",
        "codex",
        "claude-code",
        "opencode",
        "pi",
        "qwen-code",
        "gemini-cli",
    }
    for name, one in HARNESSES.items():
        assert one.version and one.package and "{task}" in one.command and get_harness(name) == one
        for text in one.files.values():
            if text.startswith("{"):
                json.loads(text.replace("{window}", "1").replace("{output}", "1"))
    assert get_harness("pi", "google", task="{goal}").dialect == "google"
    with pytest.raises(ValueError, match="speaks responses, not 'chat'"):
        get_harness("codex", "chat")
    with pytest.raises(ValueError, match="make a Harness"):
        get_harness("unknown")
    assert get_harness("claude-code").dialect == "messages"


def test_a_harness_that_is_not_installed_is_named():
    with pytest.raises(Misconfigured, match="'no-such-agent'.*PATH.*npm i own"):
        CommandProgram(
            Harness("own", ("no-such-agent",), {"chat": ("", "")}, package="npm i own")
        ).check()


def test_another_version_than_was_tried_is_said(tmp_path, monkeypatch, caplog):
    package = tmp_path / "node_modules" / "own"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text('{"version": "2.0.1"}')
    (package / "bin" / "own.js").write_text("#!/bin/sh\n")
    (package / "bin" / "own.js").chmod(0o755)
    (tmp_path / "own").symlink_to(package / "bin" / "own.js")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for version, said in (("2.0.1", False), ("1.9.0", True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Harness(
                "own", ("own",), {"chat": ("", "")}, version=version, package="npm install -g own"
            ).check()
        assert ("installed in version 2.0.1" in caplog.text) == said
