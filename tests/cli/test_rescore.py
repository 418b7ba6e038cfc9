"""`agentic-prompting rescore`: what it prints, and mistakes."""

import json
import random
import re

import pytest

from support.browser import record, write_run

REWARD = """
def by_level(completions, level, **columns):
    return [float(value) for value in level]


def constant(completions, **columns):
    return [0.5] * len(completions)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"question": "which ?", "answer": "x"}\n')
    records = [
        record(0, random.Random(0), 3, step=0, question="which ?", reward=reward, status="answered")
        for reward in (0.0, 1.0)
    ]
    write_run(tmp_path / "run", records)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_prints_both_means_and_writes_a_file(run, folder):
    status, out, err = run("rescore", "run", "--reward", "my_rewards.py:constant")
    assert status == 0, err
    assert "0.500 [0.500, 0.500] over 1 question" in out and "100% before, 0% now" in out
    (file,) = (folder / "run" / "rescored").iterdir()
    assert str(file.name) in out and len(file.read_text().splitlines()) == 2


def test_several_rewards_are_summed(run, folder):
    (folder / "my_rewards.py").write_text(REWARD.replace("constant", "other") + REWARD)
    words = ("--reward", "my_rewards.py:constant", "my_rewards.py:other")
    status, out, err = run("rescore", "run", *words)
    assert status == 0, err
    assert "1.000 [" in out
    status, _, err = run("rescore", "run", "--reward", words[1], "--reward", words[2])
    assert status == 0, err


def test_each_evaluation_is_listed_apart(run, folder):
    records = [
        record(0, random.Random(0), 3, step=step, mode="eval", question="which ?", reward=reward)
        for step, reward in ((0, 0.0), (20, 0.5), (5, 1.0))
    ]
    write_run(folder / "evaluated", [{**each, "status": "answered"} for each in records])
    words = ("rescore", "evaluated", "--reward", "my_rewards:constant")
    out = run(*words)[1]
    assert out.index("eval at step 0:") < out.index("eval at step 5:")
    assert out.index("eval at step 5:") < out.index("eval at step 20:")
    result = json.loads(run(*words, "--json")[1])
    means = [(change["step"], change["difference"]["mean"]) for change in result["evaluations"]]
    assert means == [(0, 0.5), (5, -0.5), (20, 0.0)]
    assert result["changes"]["eval"]["step"] == 20


def test_json_is_one_object(run, folder):
    status, out, _ = run("rescore", "run", "--reward", "my_rewards:constant", "--json")
    changes = json.loads(out)["changes"]
    assert status == 0 and changes["train"]["difference"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ('{"question": "which ?", "level": 2}', ()),
        ('{"question": "which ?", "answers": ["x"], "level": 2}', ()),
        ('{"request": "which ?", "level": 2}', ("--columns", "question=request")),
        ('{"question": "which ?", "level": 2}', ("--columns", "question=question,answer=level")),
        ('{"prompt": [{"role": "user", "content": "which ?"}], "level": 2}', ()),
    ],
)
def test_a_reward_gets_every_column_of_the_dataset(run, folder, row, columns):
    (folder / "own.jsonl").write_text(row)
    words = ("rescore", "run", "--reward", "my_rewards:by_level", "--dataset", "own.jsonl")
    status, out, err = run(*words, *columns)
    assert status == 0 and "2.000" in out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one run"),
        (["run"], "--reward"),
        (["run", "--reward", "my_rewards:none"], "none"),
        (["elsewhere", "--reward", "my_rewards:constant"], "elsewhere"),
        (["run", "--reward", "my_rewards:by_level"], "'level'.*--dataset"),
    ],
)
def test_a_mistake_is_one_line(run, folder, words, message):
    status, out, err = run("rescore", *words)
    assert status == 2 and err.count("\n") == 1 and out == ""

    assert re.search(message, err), err


def test_an_evaluation_is_compared_by_system(run, folder):
    for system in ("untrained", "mine"):
        rollout = record(0, random.Random(0), 3, step=0, question="which ?", status="answered")
        answer = {"system": system, "task": "test", "run": 0, "place": 0, "answers": ["x"]}
        answer |= {"question": "which ?", "answer": "x", "trajectory": rollout}
        (folder / "evaluation").mkdir(exist_ok=True)
        (folder / "evaluation" / f"{system}.jsonl").write_text(json.dumps(answer) + "\n")
    # The order of the table, which is not that of the files' names.
    fit_calls = {"untrained": 0, "mine": 0}
    (folder / "evaluation" / "run.json").write_text(json.dumps({"fit_calls": fit_calls}))

    words = ("rescore", "evaluation", "--reward", "my_rewards:constant")
    status, out, err = run(*words)
    assert status == 0, err
    assert out.index("untrained on test") < out.index("mine on test") < out.index("minus untrained")
    systems = json.loads(run(*words, "--json")[1])["systems"]
    assert [system["mean"]["mean"] for system in systems] == [0.5, 0.5]


def test_a_folder_without_rollouts_names_evaluations(run, folder):
    status, _, err = run("rescore", ".", "--reward", "my_rewards:constant")
    assert status == 2 and "evaluate --run" in err


def test_a_column_that_the_dataset_lacks_is_not_to_be_named(run, folder):
    words = ("rescore", "run", "--reward", "my_rewards:by_level", "--dataset", "rows.jsonl")
    status, _, err = run(*words)
    assert status == 2 and "'level'" in err and "question" in err
    assert "--columns" not in err and "--dataset" not in err
