"""Answers of commands: a text stays that text, and nothing that a policy prints fails its rollout
or sets a reward.
"""

import json
import sys

import pytest

from agentic_prompting import exact_match_reward
from agentic_prompting.harnesses import CommandProgram, Workspace
from agentic_prompting.harnesses.command import read_output
from agentic_prompting.programs import Program
from support.isolation import ISOLATION
from support.programs import play_program

CALL = """
import json, os, sys, urllib.request
body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "q"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body), timeout=20).read()
"""
TEXTS = [
    "Paris",
    "42",
    "12.50",
    "0.10",
    "3.0",
    "1e3",
    "2.0e-5",
    "007",
    "-0",
    "1e400",
    "NaN",
    "Infinity",
    "null",
    "true",
    "[1, 2]",
    "[3]",
    '"yes"',
    '"\\ud800"',
    "1" * 5000,
    "[" * 5000,
    "{" * 5000 + "}",
    '{"a": 1}',
    "{x}",
    "{}",
    '{"answer": [1]}',
    '{"answer": {"answer": "x"}}',
    '{"answer": "x"',
    "a\u2028b",
    "a\x0cb",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
def test_a_text_stays_that_text(text):
    assert read_output(text) == text


@pytest.mark.parametrize(
    "fields, answer",
    [
        ('"answer": "Paris"', "Paris"),
        ('"answer": 12.50', "12.50"),
        ('"answer": 1e3', "1e3"),
        ('"answer": Infinity', "Infinity"),
        ('"answer": ' + "1" * 5000, "1" * 5000),
        ('"answer": null', ""),
        ('"answer": "x", "reward": 1000000000', "x"),
        ('"answer": "x", "reward": "good"', "x"),
        ('"answer": "x", "reward": NaN, "error": "y", "replies": []', "x"),
        ('"answer": "\\ud800x"', "\ufffdx"),
        ('"answer": "x", "n": 1e400', "x"),
    ],
)
def test_an_object_names_its_answer(fields, answer):
    returned = read_output("{" + fields + "}")
    assert returned["answer"] == answer and "reward" not in returned
    assert json.loads(json.dumps(returned, allow_nan=False).encode()) == returned, "can be recorded"


def printed(tmp_path, text, **options):
    script = tmp_path / "agent.py"
    script.write_text(f"{CALL}\nsys.stdout.write({text!r})\n")
    options = {"workspace": Workspace(isolation=ISOLATION), **options}
    return play_program([sys.executable, str(script)], **options)[0]


@pytest.mark.parametrize("gold", ["12.50", "[1, 2]", "Infinity"])
def test_a_right_answer_is_right(tmp_path, gold):
    rollout = printed(tmp_path, f"noise\n{gold}\n\n")
    assert rollout.status == "answered" and rollout.answer == gold, rollout.error
    assert exact_match_reward(None, None, rollout=[rollout], answers=[[gold]]) == [1.0]


@pytest.mark.parametrize("text", ["", " \n\n", '{"answer": null}', '{"answer": "", "reward": 1}'])
def test_no_answer_is_malformed(tmp_path, text):
    rollout = printed(tmp_path, text)
    assert rollout.status == "malformed" and Program.reward([rollout]) == [0.0]


def test_a_line_without_an_end_is_malformed(tmp_path):
    assert printed(tmp_path, "x" * (2**20 + 1)).status == "malformed"
    long_answer = printed(tmp_path, "first\n" + "x" * (2**20 - 10))
    assert long_answer.status == "answered" and len(long_answer.answer) == 2**20 - 10


@pytest.mark.parametrize("text", ["1000000", '{"answer": "x", "reward": 1000000}'])
def test_output_is_no_reward(tmp_path, text):
    """A reward comes from a function that sees the folder, and from nothing else."""
    rollout = printed(tmp_path, text)
    assert rollout.status == "answered" and Program.reward([rollout]) == [None]
    rollout = printed(tmp_path, text, reward=lambda rollout, folder: 0.25)
    assert Program.reward([rollout]) == [0.25]


def test_a_question_without_truth_needs_no_reward(tmp_path):
    def is_right(rollout, folder):
        return float(rollout.answer in rollout.row["answers"])

    rollout = printed(tmp_path, "yes", reward=is_right)
    assert rollout.status == "answered" and rollout.answer == "yes"


def test_a_command_without_a_reward_does_not_train(tmp_path):
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

    program = CommandProgram(["true"], workspace=Workspace(isolation=ISOLATION))
    args = MultiTurnGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="reward"):
        MultiTurnGRPOTrainer("no-such-model", None, args, [{"question": "q"}], environment=program)


@pytest.mark.parametrize("question", ["--help", "-c x", "-", "plain"])
def test_a_task_is_never_an_option(tmp_path, question):
    script = tmp_path / "agent.py"
    script.write_text(f"{CALL}\nprint(json.dumps({{'answer': 'x', 'argv': sys.argv[1:]}}))")
    command = [sys.executable, str(script), "{question}", "--task={question}", "-v"]
    rollout, _ = play_program(
        command, row={"question": question}, workspace=Workspace(isolation=ISOLATION)
    )
    first, *others = rollout.returned["argv"]
    assert first.strip() == question and not first.startswith("-")
    assert others == [f"--task={question}", "-v"]


def test_an_agent_changes_no_row():
    """What it puts into a list of its row is not in the row that rewards read."""

    def agent(row, base_url, api_key):
        row["answers"].append("mine")
        row["nested"]["deep"].clear()
        raise ValueError

    rows = {"question": "q", "answers": ["x"], "nested": {"deep": [1]}}
    rollout, _ = play_program(agent, row=rows)
    assert rollout.row == {"question": "q", "answers": ["x"], "nested": {"deep": [1]}}
