"""One file means the same rows to all commands, whatever its format and its further columns."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from agentic_prompting.cli import headroom
from agentic_prompting.cli.check_env import CheckEnvOptions
from agentic_prompting.cli.evaluate import EvaluateOptions
from agentic_prompting.cli.headroom_options import HeadroomOptions
from agentic_prompting.cli.rescore import RescoreOptions, _load_own_rows
from agentic_prompting.cli.rows_file import RowsFile, has_labels
from agentic_prompting.cli.train_agent import AgentArguments
from agentic_prompting.data import load_task

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n), "task": f"task {n}", "level": str(n)}
    for n in range(10)
]


def write_csv(path, rows, separator=";", start="\ufeff"):
    names = list(rows[0])
    lines = [separator.join(names)] + [separator.join(row[name] for name in names) for row in rows]
    path.write_text(start + "\n".join(lines) + "\n", encoding="utf-8")


def write_json_lines(path, rows):
    path.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path, rows):
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


WRITERS = {
    "rows.csv": write_csv,
    "rows.jsonl": write_json_lines,
    "rows.json": write_json,
    "ROWS.JSONL": write_json_lines,
}


@pytest.fixture(params=WRITERS)
def file(request, tmp_path):
    path = tmp_path / request.param
    WRITERS[request.param](path, ROWS)
    return str(path)


def test_all_commands_give_a_program_the_same_rows(file):
    """Its further columns were there in some commands, and for some formats."""
    options = {"dataset": file, "held_out": 0.3}
    agent = AgentArguments(**options)
    expected = agent.load_held_out("", 0)
    assert len(expected) == 3 and len(agent.load("", 0)) == 7
    for row in expected:
        (own,) = [own for own in ROWS if own["question"] == row["question"]]
        assert row["answers"] == [own["answer"]]
        assert (row["task"], row["level"]) == (own["task"], own["level"])
    evaluated = EvaluateOptions(**options)
    assert evaluated.add_file_columns(evaluated.load_for_evaluation("")) == expected
    for command in (CheckEnvOptions, HeadroomOptions, RescoreOptions):
        rows = command(**options)
        assert rows.add_file_columns(rows.load("", 0)) == agent.load("", 0)
    assert _load_own_rows(RescoreOptions(**options)) == agent.load("", 0)


def test_headroom_measures_a_program_on_its_rows(file, monkeypatch):
    environment = SimpleNamespace(plays_whole_episodes=True)
    monkeypatch.setattr(HeadroomOptions, "open_environment", lambda *_: environment)
    monkeypatch.setattr(headroom, "_load_untrained", lambda *_: None)
    monkeypatch.setattr(headroom, "find_model", lambda name: name)
    monkeypatch.setattr(headroom, "check_agent", lambda _: None)
    monkeypatch.setattr(HeadroomOptions, "add_trained_columns", lambda *_: None)
    options = HeadroomOptions(dataset=file, untrained="m", environment="a:b")
    with ExitStack() as stack:
        settings_fields = headroom._connect_settings(options, stack)
    assert settings_fields["rows"] == AgentArguments(dataset=file).load("", 0)


def test_columns_of_a_program_may_be_renamed(file):
    options = AgentArguments(
        dataset=file, columns="question=question,answer=answer,difficulty=level"
    )
    assert [row["difficulty"] for row in options.load("", 0)] == [str(n) for n in range(10)]


def test_task_rows_are_a_sample_in_every_command(file):
    agent = AgentArguments(dataset=file, task_rows=4)
    others = CheckEnvOptions(dataset=file, task_rows=4)
    rows = agent.load("", 3)
    assert rows == others.add_file_columns(others.load("", 3))
    assert rows != agent.load("", 0)


def test_evaluation_tasks_keep_their_columns(file):
    rows = AgentArguments(dataset=file, eval_task=file, eval_task_rows=5).load_held_out("", 0)
    assert len(rows) == 5 and all(row["level"] for row in rows)
    assert AgentArguments(dataset=file).load_held_out("", 0) is None


def test_tasks_without_answers_stay_as_they_are(tmp_path):
    """A program may judge its answers itself."""
    file = tmp_path / "tasks.jsonl"
    write_json_lines(file, [{"issue": f"bug {n}", "tests": {}} for n in range(5)])
    options = {"dataset": str(file), "eval_task": str(file)}
    agent = AgentArguments(**options)
    assert agent.load("", 0) == [{"issue": f"bug {n}", "tests": {}} for n in range(5)]
    assert agent.load_held_out("", 0) == agent.load("", 0)
    agent = AgentArguments(**options, task_rows=2, columns="question=issue")
    assert all(row["question"] == row["issue"] for row in agent.load("", 0))
    assert len(agent.load("", 0)) == 2
    with pytest.raises(ValueError, match="has 5 rows"):
        AgentArguments(**options, task_rows=6).load("", 0)
    with pytest.raises(ValueError, match="held-out"):
        AgentArguments(dataset=str(file), held_out=0.5).load("", 0)


def test_what_load_task_keeps_has_labels():
    assert has_labels([{"question": "q", "answers": ["a"]}, {"question": "q", "answer": 0}])
    for row in (
        {"question": "q", "answers": []},
        {"question": "q", "answer": None},
        {"question": None, "answer": "a"},
        {"prompt": "q", "answer": "a"},
    ):
        assert not has_labels([row])


def test_dropped_rows_do_not_shift_the_others(tmp_path):
    file = tmp_path / "rows.csv"
    write_csv(file, [ROWS[0], {**ROWS[1], "answer": ""}, ROWS[2]])
    rows = RowsFile(str(file), {}).join(load_task(str(file)))
    assert [row["level"] for row in rows] == ["0", "2"]


def test_dropped_rows_are_named_once(tmp_path, caplog):
    file = tmp_path / "rows.csv"
    write_csv(file, [{**ROWS[0], "answer": ""}, *ROWS[1:]])
    agent = AgentArguments(dataset=str(file), held_out=0.3)
    assert len(agent.load("", 0)) + len(agent.load_held_out("", 0)) == 9
    assert sum("dropped 1 row" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "options",
    [
        AgentArguments(),
        RescoreOptions(),
        CheckEnvOptions(),
        EvaluateOptions(environment="own:program"),
        HeadroomOptions(environment="own:program"),
    ],
)
def test_rows_with_a_context_do_not_contradict(options, tmp_path, caplog):
    rows = [{"Frage": "Wo wohnt er?", "Text": f"Brief {n}", "Antwort": str(n)} for n in range(4)]
    write_csv(tmp_path / "rows.csv", rows)
    options.dataset = str(tmp_path / "rows.csv")
    options.columns = "question=Frage,answer=Antwort"
    options.task_rows = 4
    assert len(options.load("", 0)) == 4
    assert not caplog.messages


def test_a_plain_agent_reads_no_context(tmp_path, caplog):
    write_csv(tmp_path / "rows.csv", [{**ROWS[n], "question": "x"} for n in range(2)])
    EvaluateOptions(dataset=str(tmp_path / "rows.csv")).load("", 0)
    assert "no reply is right in both" in caplog.text


def test_a_command_sees_no_truth_under_its_own_name(tmp_path, monkeypatch):
    """The policy drives the command, which reads its row."""
    (tmp_path / "own_command.py").write_text("program = ['agent', '{question}']\n")
    columns = "question=Frage,answers=Antwort,tests=Tests"
    agent = AgentArguments(program=f"{tmp_path}/own_command.py:program", columns=columns)
    program = agent.build_program()
    assert {"Antwort", "Tests"} <= {*program.hidden} and "Frage" not in program.hidden

    (tmp_path / "own_object.py").write_text(
        "from agentic_prompting.harnesses import CommandProgram, Workspace\n"
        "workspace = Workspace(isolation='none')\n"
        "program = CommandProgram(['agent'], workspace=workspace)\n"
    )
    options = EvaluateOptions(environment=f"{tmp_path}/own_object.py:program", columns=columns)
    with ExitStack() as stack:
        assert "Antwort" in options.open_environment(stack, options.budget()).hidden


def test_the_agent_sees_no_file_of_tasks(file, monkeypatch):
    """Those of the evaluation hold answers, too."""
    seen = []

    class Program:
        def keep_private(self, paths):
            seen.extend(paths)
            raise InterruptedError

    agent = AgentArguments(program="a:b", dataset=file, eval_task=f"gsm8k/test,{file}")
    monkeypatch.setattr(AgentArguments, "build_program", lambda *_: Program())
    with ExitStack() as stack, pytest.raises(InterruptedError):
        agent.build_trainer(None, None, stack)
    assert seen == [file, file]
