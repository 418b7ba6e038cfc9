"""The columns that `train --columns` has named are those of the trained agent: in `ask`, `serve`,
`evaluate`, `rescore`.
"""

import json
import shutil

import pytest

from agentic_prompting.agent import PromptAgent
from agentic_prompting.cli.rows_file import RowsFile
from agentic_prompting.cli.train_program import main as train
from agentic_prompting.llm.loop import start
from agentic_prompting.rollout import SPEC_FILE, AgentSpec
from agentic_prompting.rollout.recording import read_rollouts
from agentic_prompting.serve import AgentAnswers

COLUMNS = {"question": "Frage", "context": "Text", "answers": "Antwort"}
OPTION = ",".join(f"{name}={own_name}" for name, own_name in COLUMNS.items())
# A program that reads one column by the name of the file, and the others by ours.
PROGRAM = """
from openai import AsyncOpenAI

async def program(row, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    text = row["Text"] + row["question"]
    messages = [{"role": "user", "content": text}]
    await client.chat.completions.create(model="agent", messages=messages, max_tokens=4)
    return "read " + row["context"] + "; " + row["Frage"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_policy):
    """A program, rows, and a model that was trained in it with `--columns`."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "own_program.py").write_text(PROGRAM)
    lines = [f"what is {n} ?,it is {n},{n}" for n in range(8)]
    (folder / "rows.csv").write_text("\n".join(["Frage,Text,Antwort", *lines]) + "\n")
    words = (
        f"--program {folder}/own_program.py:program --dataset {folder}/rows.csv --columns {OPTION}"
    )
    words += (
        f" --model_name_or_path {tiny_policy} --output_dir {folder}/run --use_cpu true --bf16 false"
    )
    words += (
        " --max_steps 1 --per_device_train_batch_size 2 --num_generations 2 "
        "--max_completion_length 8"
    )
    train("agent", words.split())
    return folder


@pytest.fixture
def ask(run, folder):
    def ask(*words, trained=folder / "run", **options):
        return run("ask", "--run", trained, "--program", f"{folder}/own_program.py:program", *words)

    return ask


def test_a_row_has_both_names_of_a_column():
    spec = AgentSpec(columns=COLUMNS)
    row = {"question": "q", "Text": "t"}
    assert spec.with_both_names(row) == {**row, "Frage": "q", "context": "t"}
    both = {"question": "q", "Frage": "f"}
    assert spec.with_both_names(both) == both


def test_training_saves_the_columns(folder):
    assert AgentSpec.load(folder / "run").columns == COLUMNS


@pytest.mark.parametrize("field", ["context", "Text"])
def test_ask_gives_the_program_a_row(ask, folder, field, tmp_path):
    status, out, err = ask("what is 9 ?", "--row", json.dumps({field: "the text"}))
    assert status == 0 and "read the text; what is 9 ?" in out and not err
    # The same from a file, with the question in it.
    file = tmp_path / "row.json"
    file.write_text(json.dumps({field: "the text", "Frage": "what is 9 ?"}))
    status, out, _ = ask("--row", file)
    assert status == 0 and "read the text; what is 9 ?" in out


def test_transcripts_begin_with_the_first_request(ask, folder):
    words = ("--row", '{"context": "the text"}', "what is 9 ?")
    _, shown, _ = ask(*words)
    assert shown.index("program        the textwhat is 9 ?") < shown.index("model writes")
    assert "environment" not in shown
    first, *_ = json.loads(ask(*words, "--json")[1])["conversation"]
    assert first["role"] == "program" and "the text" in first["text"]
    records = list(read_rollouts(folder / "run" / "rollouts"))
    assert all("it is" in record["first_request"] for record in records) and records


def test_ask_names_what_a_row_lacks(ask):
    status, _, err = ask("what is 9 ?")
    assert status == 1 and err.count("""--row '{"context": "..."}'""") == 1


def test_columns_of_the_option_come_first(ask, folder, tmp_path):
    """An agent of an older version does not know its columns."""
    shutil.copytree(folder / "run", tmp_path / "old")
    file = tmp_path / "old" / SPEC_FILE
    spec = json.loads(file.read_text())
    del spec["columns"]
    file.write_text(json.dumps(spec))
    words = ["what is 9 ?", "--row", '{"context": "the text"}']
    status, out, _ = ask(*words, trained=tmp_path / "old")
    assert status == 1 and "Text" in out
    status, out, _ = ask(*words, "--columns", OPTION, trained=tmp_path / "old")
    assert status == 0 and "read the text; what is 9 ?" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["q", "--row", "Text"], "--row is no JSON"),
        (["q", "--row", "[1]"], "--row takes an object"),
        (["q", "--row", '{"Frage": "p"}'], "given twice"),
        (["q", "--row", '{"prompt": "p"}'], "`prompt`"),
        (["--row", '{"Text": "t"}'], "no question"),
        (["q", "--columns", "context"], "--columns context"),
    ],
)
def test_ask_refuses_unclear_rows(ask, words, message):
    status, _, err = ask(*words)
    assert status == 2 and message in err


@pytest.mark.parametrize("words", [["--row", '{"a": 1}'], ["--columns", "a=b"]])
def test_a_large_llm_reads_no_row(run, words):
    status, _, err = run("ask", "RUN", "q", "--environment-model", "m", *words)
    assert status == 2 and words[0] in err and "--program" in err


def test_evaluate_and_rescore_know_the_columns(run, folder):
    rows = ["--dataset", folder / "rows.csv"]
    program = ["--program", f"{folder}/own_program.py:program"]
    status, _, err = run("evaluate", "--run", folder / "run", *program, *rows)
    assert status == 0 and f"--columns {OPTION}" in err
    (first, *_) = (folder / "run" / "evaluation" / "run.jsonl").read_text().splitlines()
    assert "read it is 0; what is 0 ?" in first
    status, _, err = run("rescore", folder / "run", "--reward", "exact_match", *rows)
    assert status == 0 and f"--columns {OPTION}" in err


def test_headroom_knows_the_columns(run, folder, tmp_path):
    words = ["--untrained", folder / "run", "--dataset", folder / "rows.csv", "--group-size", 2]
    program = ["--program", f"{folder}/own_program.py:program"]
    status, out, err = run("headroom", *words, *program, "--output-dir", tmp_path)
    assert status == 0, err
    assert f"--columns {OPTION}" in err and "Signal for GRPO: " in out


def test_columns_of_other_rows(tmp_path):
    file = tmp_path / "other.csv"
    file.write_text("question,Text,Reply\nq,t,r\n")
    assert RowsFile(str(file), {}).choose_columns(COLUMNS) == {"context": "Text"}
    chosen = {"answer": "Reply", "context": "question"}
    assert RowsFile(str(file), chosen).choose_columns(COLUMNS) == chosen


def test_a_service_takes_fields_of_the_columns(folder):
    from agentic_prompting.cli.loader import load_environment

    program = load_environment(f"{folder}/own_program.py:program")
    answers = AgentAnswers(PromptAgent.from_pretrained(folder / "run", program))
    assert answers.row_fields == ["context", "Text"]
    messages = [{"role": "user", "content": "what is 9 ?"}]
    answer = start(answers(messages, 0, None, fields={"context": "the text"})).result(60)
    assert answer.text == "read the text; what is 9 ?"
