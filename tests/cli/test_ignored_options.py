"""Options that a command does not read in the mode in use are refused, before anything is asked or
loaded.
"""

from contextlib import ExitStack

import pytest

from agentic_prompting.cli.options import given_options
from agentic_prompting.cli.refine import RefineOptions
from agentic_prompting.cli.train_program import parse_method_options

TABLE = """
title: mine
output: out
tasks: [rows.jsonl]
systems: {direct: {kind: prompted, model: m, prompt: start}}
models: {m: {name: m, base_url: "http://localhost:1"}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with rows, a table and an environment, in which the command runs."""
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 4)
    (tmp_path / "table.yaml").write_text(TABLE)
    (tmp_path / "own.py").write_text("def environment(rollout):\n    return 'x'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1")
    return tmp_path


@pytest.fixture
def refused(run, folder, asking_policy):
    """Asserts that a command ends with one line that names the option; `RUN` stands for an agent's
    folder.
    """

    def check(words, option, advice):
        words = [word.replace("RUN", str(asking_policy)) for word in words]
        status, out, err = run(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), (out, err)
        assert option in err and "no effect" in err and advice in err, err

    return check


def test_an_option_at_its_default_is_not_given():
    assert given_options(RefineOptions()) == []
    options = RefineOptions(score="exact_match", query="", max_steps=0, history=True)
    assert sorted(given_options(options)) == ["history", "max_steps"]


OWN = ["--environment", "own.py:environment"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([*OWN, "--environment-base-url", "http://x"], "own.py:environment"),
        ([*OWN, "--environment-client", "rate=1"], "own.py:environment"),
        ([*OWN, "--environment-max-tokens", "9"], "own.py:environment"),
        ([*OWN, "--replay-cache", "r.sqlite"], "own.py:environment"),
        (["--sandbox", "--environment-base-url", "http://x"], "oracle"),
    ],
)
@pytest.mark.parametrize("command", [["ask", "RUN", "q"], ["serve", "RUN"]])
def test_ask_and_serve_refuse_unread_options(refused, command, words, advice):
    refused([*command, *words], words[-2], advice)


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["--compare", "a", "b", "--metric", "token_f1"], "--metric", "--compare"),
        (["--compare", "a", "b", "--output-dir", "c"], "--output-dir", "--compare"),
        (["--compare", "a", "b", "--dataset", "rows.jsonl"], "--dataset", "--compare"),
        (["--config", "table.yaml", "--samples", "3"], "--samples", "runs:"),
        (["--config", "table.yaml", "--task-rows", "3"], "--task-rows", "n:"),
        (["--config", "table.yaml", "--task-split", "test"], "--task-split", "tasks:"),
        (["--config", "table.yaml", "--data-files", "f"], "--data-files", "data_files:"),
        (
            ["--config", "table.yaml", "--sandbox", "--dataset", "rows.jsonl"],
            "--dataset",
            "--sandbox",
        ),
        (["--config", "table.yaml", "--sandbox", "--held-out", "0.5"], "--held-out", "--sandbox"),
        (
            ["--run", "RUN", "--dataset", "rows.jsonl", "--sandbox", "--seeds", "1", "2"],
            "--seeds",
            "--samples",
        ),
        (
            ["--run", "RUN", "--dataset", "rows.jsonl", "--sandbox", "--task-split", "test"],
            "--task-split",
            "--dataset",
        ),
    ],
)
def test_evaluate_refuses_unread_options(refused, words, option, advice):
    refused(["evaluate", *words], option, advice)


MODELS = ["--task-model", "m", "--feedback-model", "m"]


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["--sandbox", "--task-model", "m"], "--task-model", "sandbox"),
        (["--sandbox", "--verifier-client", "rate=1"], "--verifier-client", "sandbox"),
        (["--sandbox", "--replay-cache", "r"], "--replay-cache", "sandbox"),
        (["--sandbox", "--score", "letter_match"], "--score", "sandbox"),
        (["--sandbox", "--columns", "question=q"], "--columns", "--input"),
        (["--query", "q", *MODELS, "--score", "letter_match"], "--score", "--input"),
        (["--query", "q", *MODELS, "--columns", "question=q"], "--columns", "--input"),
        (
            ["--sandbox", "--unit", "sentence", "--tokens-per-step", "3"],
            "--tokens-per-step",
            "--unit",
        ),
        (
            ["--query", "q", *MODELS, "--paper-setting", "no_verifier", "--verifier-model", "v"],
            "--verifier-model",
            "--paper-setting",
        ),
        (
            ["--query=q", "--local-model=RUN", "--feedback-model=m", "--task-base-url=http://x"],
            "--task-base-url",
            "--local-model",
        ),
    ],
)
def test_refine_refuses_unread_options(refused, words, option, advice):
    refused(["refine", *words], option, advice)


@pytest.mark.parametrize("option", ["--split", "--data-files", "--task-model", "--critic-base-url"])
def test_the_demo_refuses_unread_options(refused, option):
    refused(["demo", "--method", "prorefine", option, "x"], option, "--task")


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["--sandbox", "--policy-model", "m"], "--policy-model", "sandbox"),
        (["--sandbox", "--reference-client", "rate=1"], "--reference-client", "sandbox"),
        (["--sandbox", "--dataset", "rows.jsonl"], "--dataset", "sandbox"),
        (["--sandbox", "--task-rows", "9"], "--task-rows", "sandbox"),
        (["--sandbox", "--reward", "math"], "--reward", "sandbox"),
        (["--sandbox", "--initial-prompt", "x"], "--initial-prompt", "sandbox"),
        (["--sandbox", "--grammar", "free"], "--grammar", "sandbox"),
        (["--sandbox", "--prompt-template", "q: {question}"], "--prompt-template", "sandbox"),
        (["--sandbox", "--policy-sampling", '{"top_p": 0.5}'], "--policy-sampling", "sandbox"),
        (["--warm-start-steps", "9"], "--warm-start-steps", "--sandbox"),
        (["--dataset", "rows.jsonl", "--task", "svamp"], "--task", "--dataset"),
        (["--dataset", "rows.jsonl", "--task-split", "test"], "--task-split", "--dataset"),
        (["--dataset", "rows.jsonl", "--eval-task-rows", "9"], "--eval-task-rows", "--eval-task"),
    ],
)
def test_evolve_refuses_unread_options(refused, words, option, advice):
    refused(["evolve", *words], option, advice)


LLM = ["--environment-model", "m", "--dataset", "rows.jsonl"]
POLICY = ["--policy-model", "m", "--dataset", "rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["--sandbox", "--policy-model", "m"], "--policy-model", "sandbox"),
        (["--sandbox", "--config", "run.yaml"], "--config", "sandbox"),
        (["--sandbox", "--dataset", "rows.jsonl"], "--dataset", "sandbox"),
        (["--sandbox", "--group-size", "3"], "--group-size", "sandbox"),
        (["--config", "run.yaml", "--policy-model", "m"], "--policy-model", "--config"),
        (["--config", "run.yaml", "--prompt", "x"], "--prompt", "--config"),
        (["--config", "run.yaml", "--task", "svamp"], "--task", "--config"),
        (["--config", "run.yaml", *OWN], "--environment", "--config"),
        (["--config", "run.yaml", "--reference-model", "m"], "--reference-model", "prompt-r1"),
        (["--config", "run.yaml", "--tried", "4"], "--tried", "prompt-r1"),
        (["--config", "demo.yaml", "--untrained", "RUN"], "--untrained", "demo.yaml"),
        ([*LLM, "--policy-client", "rate=1"], "--policy-client", "--policy-model"),
        ([*LLM, "--reference-model", "m"], "--reference-model", "--policy-model"),
        ([*LLM, "--prompt", "x"], "--prompt", "--policy-model"),
        ([*POLICY, "--tried", "4"], "--tried", "--reference-model"),
        ([*POLICY, "--task-model", "m"], "--task-model", "--feedback-model"),
        ([*POLICY, "--verifier-model", "m"], "--verifier-model", "--feedback-model"),
        ([*POLICY, "--environment-client", "rate=1"], "--environment-client", "--environment-mod"),
        ([*POLICY, "--repeats", "2"], "--repeats", "--environment-model"),
        ([*POLICY, "--group-size", "2"], "--group-size", "--untrained"),
        ([*POLICY, "--reward", "math"], "--reward", "--untrained"),
        ([*POLICY, "--task", "svamp"], "--task", "--dataset"),
        ([*POLICY, "--metric", "token_f1", "--score", "letter_match"], "--score", "--metric"),
    ],
)
def test_headroom_refuses_unread_options(refused, folder, words, option, advice):
    (folder / "run.yaml").write_text("model_name_or_path: nowhere/at/all\nenvironment_model: m\n")
    (folder / "demo.yaml").write_text("sandbox: true\n")
    refused(["headroom", *words], option, advice)


CONFIG = ["--config", "examples/configs/qwen3_4b.yaml"]


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["plan", *CONFIG, "--run", "RUN"], "--run", "--from"),
        (["plan", *CONFIG, "--replay-cache", "r"], "--replay-cache", "asks no model"),
        (["plan", *CONFIG, "--environment-max-tokens", "9"], "--environment-max-tokens", "asks no"),
        (
            ["doctor", "--environment-base-url", "http://x"],
            "--environment-base-url",
            "--environment-model",
        ),
        (["doctor", "--reference-client", "rate=1"], "--reference-client", "--reference-model"),
        (["doctor", "--environment-max-tokens", "9"], "--environment-max-tokens", "--config"),
        (["doctor", "--accelerate-config", "x.yaml"], "--accelerate-config", "--config"),
        (["doctor", "--budget-usd", "1"], "--budget-usd", "--environment-model"),
    ],
)
def test_plan_and_doctor_refuse_unread_options(refused, words, option, advice):
    refused(words, option, advice)


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["check-env", "--harness", "codex", "--request", "x"], "--request", "--harness"),
        (["check-env", "--harness", "codex", "--model", "RUN"], "--model", "--harness"),
        (["check-env", "--harness", "codex", "--dataset", "x"], "--dataset", "--harness"),
        (["check-env", "--harness", "own.py:h", "--dialect", "chat"], "--dialect", "own.py:h"),
        (["check-env", OWN[1], "--dialect", "chat"], "--dialect", "--harness"),
        (["check-env", OWN[1], "--isolation", "none"], "--isolation", "--harness"),
        (["check-env", OWN[1], "--model", "RUN", "--request", "x"], "--request", "--model"),
        (["check-env", OWN[1], "--columns", "question=q"], "--columns", "--dataset"),
        (["rescore", "run", "--reward", "math", "--columns", "question=q"], "--columns", "--task"),
        (["rescore", "run", "--reward", "math", "--task-rows", "3"], "--task-rows", "--task"),
        (
            ["rescore", "run", "--reward=math", "--dataset=rows.jsonl", "--task=svamp"],
            "--task",
            "--dataset",
        ),
        (["report", "run", "--watch", "--json"], "--json", "--watch"),
        (["data", "list", "--online"], "--online", "check"),
        (["data", "show", "gsm8k", "--online"], "--online", "check"),
    ],
)
def test_other_commands_refuse_unread_options(refused, words, option, advice):
    refused(words, option, advice)


def test_data_list_refuses_names(run):
    status, out, err = run("data", "list", "gsm8k")
    assert (status, out) == (2, "") and "data show gsm8k" in err


OUT = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
OWN_RUN = ["--model_name_or_path", "m", "--dataset", "rows.jsonl", *OWN]
HARNESS = ["--harness", "pi", "--dataset", "rows.jsonl"]
PROGRAM = ["--program", "own.py:program", "--dataset", "rows.jsonl"]
ASKING = ["--model_name_or_path", "m", "--dataset", "rows.jsonl", "--environment_model", "m"]


@pytest.mark.parametrize(
    ("method", "words", "option"),
    [
        ("prompt-r1", ["--sandbox", "--task_rows", "9"], "--task-rows"),
        ("prompt-r1", ["--sandbox", "--task", "gsm8k"], "--task"),
        ("prompt-r1", ["--sandbox", "--search_url", "http://x"], "--search-url"),
        ("prompt-r1", ["--real", "--environment_model", "m"], "--environment-model"),
        ("prompt-r1", ["--real", "--share_replies", "step"], "--share-replies"),
        ("prompt-r1", ["--real", "--replay_cache", "r"], "--replay-cache"),
        ("prompt-r1", [*ASKING, "--n_test", "9"], "--n-test"),
        ("prompt-r1", [*ASKING, "--warm_start_steps", "0"], "--warm-start-steps"),
        ("prompt-r1", [*ASKING, "--task_split", "test"], "--task-split"),
        ("prompt-r1", [*ASKING, "--eval_task_rows", "9"], "--eval-task-rows"),
        ("prompt-r1", [*ASKING, "--search_url", "http://x"], "--search-url"),
        ("prompt-r1", [*OWN_RUN, "--environment_base_url", "http://x"], "--environment-base-url"),
        ("prompt-r1", [*OWN_RUN, "--environment_temperature", "0"], "--environment-temperature"),
        ("prompt-r1", [*OWN_RUN, "--replay_cache", "r"], "--replay-cache"),
        ("espl", ["--environment_model", "m"], "--environment-model"),
        ("espl", ["--share_replies", "step"], "--share-replies"),
        ("espl", ["--reward", "math"], "--reward"),
        ("espl", ["--initial_prompt", "x"], "--initial-prompt"),
        ("espl", ["--free_text"], "--free-text"),
        ("espl", ["--population", "own.py:two"], "--population"),
        ("espl", ["--reference_base_url", "http://x"], "--reference-base-url"),
        ("espl", ["--task", "gsm8k", "--environment_model", "m"], "--environment-model"),
        ("espl", ["--task", "gsm8k", "--warm_start_steps", "9"], "--warm-start-steps"),
        ("espl", [*OWN_RUN, "--population", "own.py:two", "--free_text"], "--free-text"),
        ("agent", [*PROGRAM, "--dialect", "chat"], "--dialect"),
        ("agent", [*PROGRAM, "--ask", "Do: {question}"], "--ask"),
        ("agent", [*HARNESS, "--environment_base_url", "http://x"], "--environment-base-url"),
        ("agent", [*HARNESS, "--share_replies", "step"], "--share-replies"),
        ("agent", [*HARNESS, "--search_url", "http://x"], "--search-url"),
        ("agent", [*HARNESS, "--replay_cache", "r"], "--replay-cache"),
        ("agent", [*HARNESS, "--data_files", "f"], "--data-files"),
        ("agent", [*HARNESS, "--task_split", "test"], "--task-split"),
    ],
)
def test_train_refuses_unread_options(folder, method, words, option):
    script, args, _ = parse_method_options(method, [*words, *OUT])
    with pytest.raises(ValueError, match=option):
        script.check(args)


@pytest.mark.parametrize(
    ("method", "words"), [("prompt-r1", ["--sandbox", "--model", "m"]), ("espl", ["--model=m"])]
)
def test_the_sandbox_takes_no_model(folder, method, words):
    script, args, model = parse_method_options(method, [*words, *OUT])
    script.check(args)
    with ExitStack() as stack, pytest.raises(ValueError, match="--model-name-or-path"):
        script.build_trainer(args, model, stack)
