"""The `agentic-prompting` command: one surface over all sub-commands, `demo`, `train`, `ask`,
`evolve`, and Ctrl-C.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from agentic_prompting import local
from agentic_prompting.cli import COMMANDS, load_command
from agentic_prompting.cli.example_files import EXAMPLES as PACKAGED
from agentic_prompting.cli.launch import launch
from agentic_prompting.cli.option_parser import OptionParser
from agentic_prompting.llm import LLMError
from support.servers import Answer, LoopbackServer, unused_url
from support.tokenizers_for_tests import with_tools

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUESTION = "What is the language of Kenya?"


PARSED = [name for name in COMMANDS if name not in ("demo", "train", "merge", "report", "data")]
"""The sub-commands whose options are the fields of dataclasses."""


def parser_of(name):
    """The parser of a sub-command's options."""
    return OptionParser(
        name, import_module(f"agentic_prompting.cli.{name.replace('-', '_')}").SETTINGS
    )


# --- one surface ----------------------------------------------------------------------------------


def test_the_commands_are_those_of_the_table():
    assert set(COMMANDS) == {
        "demo",
        "train",
        "evaluate",
        "ask",
        "refine",
        "evolve",
        "serve",
        "report",
        "data",
        "doctor",
        "check-env",
        "plan",
        "headroom",
        "merge",
        "rescore",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_function_and_help(run, name):
    assert load_command(name).__doc__
    status, out, err = run(name, "--help")
    assert status == 0 and err == "" and f"agentic-prompting {name}" in out


@pytest.mark.parametrize("name", PARSED)
def test_every_option_has_help(name):
    silent = [action.dest for action in parser_of(name)._actions if not action.help]
    silent = [name for name in silent if not name.startswith("no_")]
    assert not silent, f"{name}: no help for {silent}"


def test_train_alone_prints_its_methods(run):
    status, out, err = run("train")
    assert (status, err) == (0, "") and out == run("train", "--help")[1] and "espl" in out


def flags_of(name):
    return set(parser_of(name)._option_string_actions)


def test_an_option_is_the_same_thing_everywhere():
    """One name, one type.

    Folders that are written to are --output-dir, what scripts read is --json.
    """
    types: dict[str, set[str]] = {}
    for name in PARSED:
        for settings in import_module(f"agentic_prompting.cli.{name.replace('-', '_')}").SETTINGS:
            for option, hint in typing.get_type_hints(settings).items():
                choices = typing.get_args(hint) or (hint,)
                names = {str(getattr(choice, "__name__", choice)) for choice in choices}
                types.setdefault(option, set()).add(" ".join(sorted(names - {"NoneType"})))
    different = {option: hints for option, hints in types.items() if len(hints) > 1}
    # `evolve` has one reward; those of `rescore` are summed, as in `train`.
    assert different == {"reward": {"str", "list"}} and len(types) > 50
    for name in ("ask", "doctor", "evaluate", "evolve", "refine", "rescore"):
        assert "--json" in flags_of(name), name
    for name in ("doctor", "evaluate", "evolve"):
        assert "--output-dir" in flags_of(name), name


def test_options_have_the_defaults_of_the_python_api():
    from agentic_prompting.evolution import EvolveConfig
    from agentic_prompting.refine.loop import RefineSettings
    from agentic_prompting.serve import ServeConfig

    for name, api, count in (
        ("serve", ServeConfig, 8),
        ("refine", RefineSettings, 6),
        ("evolve", EvolveConfig, 14),
    ):
        options = {action.dest: action.default for action in parser_of(name)._actions}
        defaults = {field.name: field.default for field in fields(api) if field.name in options}
        assert len(defaults) >= count
        assert {option: options[option] for option in defaults} == defaults, name


def test_a_switch_leaves_the_next_word_alone():
    parser = parser_of("ask")
    options, words = parser.parse_with_words(["--sandbox", "runs/a", "what?", "--json", "true"])
    assert options.sandbox and options.json and words == ["runs/a", "what?"]


def test_options_may_be_written_as_in_scripts(run, tmp_path):
    status, _, err = run("report", tmp_path, f"--output_dir={tmp_path}/a_b")
    assert status == 2 and "nothing to report" in err  # and not: no such option


def test_shells_complete_it(monkeypatch, run):
    monkeypatch.setenv("_AGENTIC_PROMPTING_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "agentic-prompting do")
    monkeypatch.setenv("COMP_CWORD", "1")
    _, out, _ = run()
    assert out.split() == ["doctor"]


def test_data_as_json(run):
    data_sets = json.loads(run("data", "list", "--json")[1])["sets"]
    assert {"gsm8k", "hotpotqa"} <= {data_set["name"] for data_set in data_sets}
    assert all(data_set["splits"] for data_set in data_sets)
    assert [
        data_set["name"]
        for data_set in json.loads(run("data", "show", "gsm8k", "--json")[1])["sets"]
    ] == ["gsm8k"]
    checks = json.loads(run("data", "check", "gsm8k", "--json")[1])["checks"]
    assert checks and all(check["task"] == "gsm8k" and not check["problem"] for check in checks)


# --- demo and train: what is started --------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """What would have been started, and with which status it ends."""
    calls = []

    def start(program, arguments, accelerate_config=None):
        calls.append((program, list(arguments), accelerate_config))
        return start.status

    start.status = 0
    start.calls = calls

    monkeypatch.setattr("agentic_prompting.cli.train.launch", start)
    monkeypatch.setattr("agentic_prompting.cli.demo.launch", start)
    return start


def test_the_package_has_the_examples_configurations():
    """The wheel has no examples/: those of training are in the package, too, the same ones.

    Tables need a clone.
    """
    ours = {
        path.relative_to(EXAMPLES): path.read_bytes()
        for path in EXAMPLES.rglob("*.*")
        if path.suffix in (".yaml", ".json")
    }
    packaged = {path.relative_to(PACKAGED): path.read_bytes() for path in PACKAGED.rglob("*.*")}
    assert packaged == {
        path: text for path, text in ours.items() if not path.name.startswith("eval_")
    }


def test_their_names_work_outside_of_a_clone(run, launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [
        "--config",
        "examples/configs/qwen3_4b.yaml",
        "--accelerate-config",
        "examples/accelerate/ddp.yaml",
    ]
    assert run("train", "prompt-r1", *given)[0] == 0
    options = ["--config", str(PACKAGED / "configs" / "qwen3_4b.yaml")]
    assert launched.calls == [("prompt-r1", options, PACKAGED / "accelerate" / "ddp.yaml")]
    assert json.loads(run("doctor", "--config", "examples/configs/qwen3_4b.yaml", "--json")[1])[
        "findings"
    ]


@pytest.mark.parametrize(
    ("arguments", "program", "config"),
    [([], "prompt-r1", "sandbox.yaml"), (["--method", "espl"], "espl", "espl/sandbox.yaml")],
)
def test_demo(run, launched, tmp_path, arguments, program, config):
    status, out, _ = run("demo", *arguments, "--output_dir", tmp_path, "--max-steps", 5)
    options = [
        "--config",
        str(PACKAGED / "configs" / config),
        "--output_dir",
        str(tmp_path),
        "--max-steps",
        "5",
    ]
    assert (status, launched.calls) == (
        0,
        [(program, options, PACKAGED / "accelerate" / "single.yaml")],
    )
    assert f"next:  agentic-prompting report {tmp_path}" in out


def test_the_demo_of_a_real_model(run, launched, tmp_path, monkeypatch):
    """Two processes where there are two cores; else the same batch on one. In the faster precision."""
    options = ["--config", str(PACKAGED / "configs" / "real.yaml"), "--output_dir", str(tmp_path)]
    for cores, has_bf16, more, file in (
        (2, False, [], "cpu2.yaml"),
        (2, True, ["--bf16", "true"], "cpu2.yaml"),
        (1, False, ["--gradient_accumulation_steps", "4"], "single.yaml"),
    ):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(local, "has_bf16_instructions", lambda has=has_bf16: has)
        status, out, _ = run("demo", "--real", "--output-dir", tmp_path, "--model", "a/model")
        assert status == 0 and "--sandbox" not in out
        expected = [*options, *more, "--model", "a/model"]
        assert launched.calls.pop() == ("prompt-r1", expected, PACKAGED / "accelerate" / file)
    assert run("demo", "--real", "--method", "espl")[0] == 2


def test_the_demos_threads_do_not_spin(run, launched, tmp_path, monkeypatch):
    """One thread, and passive waiting, unless the user has said otherwise: beside other work two
    take far longer.
    """
    monkeypatch.setattr(
        os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    )
    run("demo", "--output-dir", tmp_path)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "passive")


def test_an_interrupted_demo_goes_on_and_a_finished_one_is_kept(run, launched, tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    launched.status = 130
    status, out, _ = run("demo", "--output-dir", tmp_path)
    assert (status, out) == (130, "")
    assert launched.calls[0][1][-2:] == ["--resume_from_checkpoint", "true"]
    (tmp_path / "summary.json").write_text("{}")
    status, _, err = run("demo", "--output-dir", tmp_path)
    assert status == 2
    assert f"agentic-prompting report {tmp_path}" in err
    assert len(launched.calls) == 1


def test_demo_of_prorefine(run, tmp_path):
    status, out, _ = run("demo", "--method", "prorefine", "--output-dir", tmp_path, "--rows", 10)
    assert status == 0
    assert out.count("| bbh_word_sorting |") == 3
    assert "next:  agentic-prompting report" in out
    assert len((tmp_path / "verifier.jsonl").read_text().splitlines()) == 10


def test_train_passes_everything_on(run, launched, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("max_steps: 1\n")
    launched.status = 3
    words = ["--max-steps", "5", "--learning-rate", "1e-3", "--top-k", "-1"]
    status, _, _ = run(
        "train", "espl", "--config", config, *words, "--accelerate-config", "two.yaml"
    )
    assert status == 3
    assert launched.calls == [("espl", ["--config", str(config), *words], Path("two.yaml"))]


def test_train_help_shows_the_options_of_the_program(run, launched):
    status, out, _ = run("train", "prompt-r1", "--help")
    assert status == 0 and not launched.calls
    for option in (
        "--accelerate-config",
        "--warm_start_steps",
        "--max_turns",
        "--use_peft",
        "--budget_usd",
    ):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to train: agentic-prompting train prompt-r1 --config FILE"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (
            ["--max_steps", "1", "--accelerate-config", "nowhere.yaml"],
            "accelerate config --config_file nowhere.yaml",
        ),
    ],
)
def test_train_with_bad_input_is_one_line(run, arguments, message):
    status, out, err = run("train", "prompt-r1", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.mark.parametrize(("code", "status"), [(3, 3), (130, 130), (-9, 137)])
def test_the_status_of_the_program_is_that_of_the_command(monkeypatch, code, status):
    def launch_command(arguments):
        assert arguments.module
        assert arguments.training_script == "agentic_prompting.cli.train_program"
        assert arguments.training_script_args == ["espl", "--max_steps", "1"]
        raise subprocess.CalledProcessError(code, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)
    before = signal.getsignal(signal.SIGINT)
    assert launch("espl", ["--max_steps", "1"], PACKAGED / "accelerate" / "single.yaml") == status
    assert signal.getsignal(signal.SIGINT) is before


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_finishes_the_step_and_the_run_can_go_on(tiny_policy, tmp_path):
    """A real SIGINT to the command, which passes it on to the process that trains."""
    folder = tmp_path / "run"
    log = tmp_path / "log"
    shutil.copytree(tiny_policy, folder / "warm_start")
    command = [
        sys.executable,
        "-c",
        "from agentic_prompting.cli import main; main()",
        "train",
        "prompt-r1",
        "--config",
        EXAMPLES / "configs" / "sandbox.yaml",
        "--accelerate-config",
        EXAMPLES / "accelerate" / "single.yaml",
        "--output-dir",
        folder,
        "--per_device_train_batch_size",
        "16",
        "--max_steps",
        "500",
        "--n_test",
        "8",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with open(log, "w") as file:
        running = subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 400
        while "step 1:" not in log.read_text():
            assert running.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        status = running.wait(150)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    output = log.read_text()
    (checkpoint,) = folder.glob("checkpoint-*")
    assert status == 130 and "Traceback" not in output, output[-3000:]
    assert "finishing this step, then saving a checkpoint" in output
    assert output.rstrip().endswith(
        f"run the same command with --resume_from_checkpoint {checkpoint}"
    )
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert 1 <= state["global_step"] < 500
    assert checkpoint.name == f"checkpoint-{state['global_step']}"
    assert not (folder / "summary.json").exists(), (
        "an interrupted run is not reported as a finished one"
    )


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("no such\nthing"), 2, "agentic-prompting: no such thing (FILE:LINE in fail)\n"),
        (LLMError("gone"), 1, "agentic-prompting: gone (FILE:LINE in fail)\n"),
        (KeyboardInterrupt("go on with --x"), 130, "go on with --x\n"),
        (KeyboardInterrupt(), 130, "interrupted; what is not in a checkpoint is lost\n"),
    ],
)
def test_programs_end_with_a_line_and_a_status(capsys, error, status, said):
    from agentic_prompting.cli.script import run_script

    def fail():
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_script(fail)
    line = fail.__code__.co_firstlineno + 1
    said = said.replace("FILE", __file__).replace(
        "LINE", str(line)
    )  # the place in code of the user's
    assert stopped.value.code == status and capsys.readouterr().err == said


def test_an_error_in_a_reward_is_one_line(capsys):
    from agentic_prompting.cli.script import run_script
    from agentic_prompting.trainers.reward_functions import guard_reward_function

    def broken_reward(completions, **columns):
        return columns["no such column"]

    guarded = guard_reward_function(broken_reward)
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: guarded(completions=["a"]))
    line = broken_reward.__code__.co_firstlineno
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.count("\n") == 1
    assert (
        f"broken_reward ({__file__}:{line}) raised KeyError" in err
        and f"{__file__}:{line + 1}" in err
    )


# --- ask ------------------------------------------------------------------------------------------


def test_ask_shows_the_conversation(run, asking_policy):
    status, out, err = run("ask", QUESTION, "--run", asking_policy, "--sandbox", "--seed", 3)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line]
    assert lines[:5] == [
        "agent thinks   the language",
        "agent asks     what is the language of Kenya ?",
        "large LLM      the answer is Swahili .",
        "agent thinks   done",
        "agent answers  Swahili",
    ]
    assert lines[5:] == ["2 turns, 1 call to the large LLM"], "the answer is shown once"
    assert "\x1b" not in out, "no colours in a pipe"


def test_ask_as_json(run, asking_policy):
    status, out, _ = run(
        "ask", QUESTION, "--run", asking_policy, "--sandbox", "--seed", 3, "--json"
    )
    record = json.loads(out)
    assert status == 0
    assert (record["answer"], record["status"], record["error"]) == (
        "Swahili",
        "answered",
        None,
    )
    assert [message["role"] for message in record["conversation"]] == [
        "agent",
        "environment",
        "agent",
    ]
    assert record["conversation"][0]["request"] == "what is the language of Kenya ?"
    assert record["usage"]["calls"] == 1
    assert record["usage"]["prompt_tokens"] > 0
    assert record["usage"]["agent_tokens"] > 5


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_large_llm_says_does_not_steer_the_terminal(run, asking_policy, status, as_json):
    """A window title, the clipboard, a cleared screen, text that runs backwards."""
    hostile = "\x1b]52;c;eA==\x07 \x1b[2J \x9b31m \u202e Kenya"
    with LoopbackServer(
        lambda body, n: "ok" if n == 0 else Answer(hostile, status=status)
    ) as server:
        arguments = [
            "--run",
            asking_policy,
            "--environment-model",
            "m",
            "--environment-base-url",
            server.base_url,
        ]
        out = run(
            "ask", "what is the language of Kenya ?", *arguments, "--seed", 3, *["--json"] * as_json
        )[1]
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)
    assert "52;c;eA==" in out and "u202e" in out
    if as_json and status == 200:
        assert json.loads(out)["conversation"][1]["text"] == hostile


def test_ask_when_the_large_llm_breaks(run, asking_policy):
    """After the first word it is asked for, to see whether it is there: [markup] in its reply stays
    as it is.
    """
    with LoopbackServer(
        lambda body, n: "[bold]ok" if n == 0 else Answer("no", status=400)
    ) as server:
        arguments = [
            "--run",
            asking_policy,
            "--environment-model",
            "m",
            "--environment-base-url",
            server.base_url,
        ]
        status, out, _ = run("ask", "what is the language of Kenya ?", *arguments, "--seed", 3)
    assert status == 1 and "large LLM      no reply: the endpoint rejected the request" in out
    assert "no answer (failed: " in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--sandbox"], 2, "`agentic-prompting demo` trains one"),
        (["--run", "RUN"], 2, "--environment-model NAME, or say --sandbox"),
        (["--run", "PLAIN", "--sandbox"], 2, "agentic-prompting headroom --untrained"),
        (["--run", "nowhere", "--sandbox"], 2, "agentic-prompting demo --output-dir nowhere"),
        (
            ["--run", "RUN", "--sandbox", "Who are you?"],
            2,
            "which country has the capital served by airport NBO ?",
        ),
        (
            ["--run", "RUN", "--environment-model", "m", "--environment-base-url", "URL"],
            1,
            "--environment-base-url",
        ),
    ],
)
def test_ask_with_bad_input_is_one_line(run, asking_policy, tmp_path, arguments, status, message):
    (tmp_path / "config.json").write_text("{}")
    places = {"RUN": str(asking_policy), "PLAIN": str(tmp_path), "URL": unused_url()}
    given = [places.get(word, word) for word in arguments]
    question = [] if "Who are you?" in given else [QUESTION]
    found, out, err = run("ask", *question, *given)
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert message in err


# --- evolve ---------------------------------------------------------------------------------------


def test_evolve_through_endpoints(run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "#### 7"}) + "\n" for i in range(4))
    )
    reply = "<answer>7</answer>"
    with LoopbackServer(lambda body, number: reply) as server:
        urls = ["--policy-base-url", server.base_url, "--reference-base-url", server.base_url]
        arguments = [
            *urls,
            "--policy-model=small",
            "--reference-model=large",
            f"--data-files={rows}",
            "--problems-per-step=2",
            "--num-generations=1",
            "--initial-prompt=Think.",
            f"--output-dir={tmp_path / 'out'}",
        ]
        status, out, _ = run("evolve", *arguments, "--steps", 1, "--json")
        record = json.loads(out)
        assert status == 3, "one attempt each, nothing to compare: nothing was learned"
        assert record["prompt"].startswith("Think.")
        assert record["usage"]["policy"]["prompt_tokens"] > 0
        assert (tmp_path / "out" / "system_prompt.txt").read_text().startswith("Think.")
        status, out, _ = run("evolve", *arguments, "--steps", 2)
        assert status == 3 and "step 2:" in out and "step 1:" not in out, "a stopped run goes on"


def test_evolve_needs_models(run):
    status, _, err = run("evolve")
    assert status == 2 and "--policy-model" in err and "--reference-model" in err


# --- said at once ---------------------------------------------------------------------------------


def test_without_its_extra_serving_says_so_before_anything_is_loaded():
    """46 s came before it. In a process of its own: what has been imported here stays imported."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None; from agentic_prompting.cli import "
        "main\n"
    )
    code += (
        "try: main(['serve', 'nowhere', '--sandbox'])\nfinally: print(*({'torch', 'transformers'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "\n"), done.stderr
    assert done.stderr == (
        "agentic-prompting: serving needs more (prometheus_client): pip install "
        "'agentic-prompting[serve]'\n"
    )


@pytest.fixture
def no_key(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nothing_is_fetched(monkeypatch):
    """A test that comes to the hub has loaded too much."""
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked")
    )
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("data were loaded"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "RUN", "--sandbox", "--port", "80800"],
            "port must be from 0 to 65535, got 80800",
        ),
        (["serve", "nowhere", "--sandbox"], "nowhere does not exist"),
        (
            ["ask", QUESTION, "--run", "runs/nowhere", "--sandbox"],
            "runs/nowhere does not exist; `agentic",
        ),
        (["serve", "EMPTY", "--sandbox"], "EMPTY holds no model (no config.json)"),
        (["ask", QUESTION, "--run", "EMPTY", "--sandbox"], "EMPTY holds no model (no config.json)"),
        (["ask", QUESTION, "--run", "CUT", "--sandbox"], "CUT/checkpoint-10"),
        (["serve", "CUT", "--sandbox"], "CUT/checkpoint-10"),
        (
            ["ask", QUESTION, "--run", "ADAPTER", "--sandbox"],
            "an adapter of the base model runs/base",
        ),
    ],
)
def test_what_cannot_be_served_or_asked(
    run, asking_policy, nothing_is_fetched, tmp_path, arguments, message
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    for step in (9, 10):
        checkpoint = tmp_path / "cut" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter_config.json").write_text("{}")
    (tmp_path / "cut" / "checkpoint-11").mkdir()  # without a model
    (tmp_path / "runs" / "base").mkdir(parents=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "runs/base"}'
    )
    places = {
        "RUN": str(asking_policy),
        "EMPTY": str(tmp_path / "empty"),
        "ADAPTER": str(tmp_path / "adapter"),
        "CUT": str(tmp_path / "cut"),
    }
    status, out, err = run(*[places.get(word, word) for word in arguments])
    assert (status, out, err.count("\n")) == (2, "", 1), err
    for place in ("EMPTY", "CUT"):
        message = message.replace(place, places[place])
    assert message in err


def refused(method, *arguments):
    """The line with which a training program ends."""
    from agentic_prompting.cli import script, train_program

    err = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(err):
        script.run_script(lambda: train_program.main(method, [str(word) for word in arguments]))
    *_, line = err.getvalue().splitlines()
    assert ended.value.code in (1, 2) and line.startswith("agentic-prompting: ")
    return line.removeprefix("agentic-prompting: ")


ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]


def test_a_typo_is_said_before_bf16_is_asked_for(tmp_path, nothing_is_fetched):
    config = tmp_path / "run.yaml"
    config.write_text("learning_rat: 0.1\nmodel_name_or_path: x/y\n")
    message = refused("prompt-r1", "--config", config, "--environment_model", "m")
    assert "learning_rat is not an option" in message
    assert "learning_rate" in message
    assert "bf16" not in message


def test_without_a_gpu_both_options_are_named(nothing_is_fetched, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = refused(
        "prompt-r1",
        "--environment_model",
        "m",
        "--model_name_or_path",
        tmp_path,
        "--output_dir",
        tmp_path,
    )
    assert message.endswith("On a machine without a GPU: --use_cpu true --bf16 false")


def test_programs_look_at_the_endpoint_then_the_model_then_the_data(
    no_key, nothing_is_fetched, tmp_path
):
    """As `doctor` does, each in one line: 82 s of retries named neither of two mistakes."""
    out = ["--output_dir", tmp_path, *ON_A_CPU]
    wrong = ["--model_name_or_path", tmp_path / "nowhere", "--task", "gsm8k", *out]
    assert "OPENAI_API_KEY" in refused("prompt-r1", "--environment_model", "gpt-4o-mini", *wrong)
    assert "OPENAI_API_KEY" in refused("espl", "--reference_model", "gpt-4o-mini", *wrong)
    with LoopbackServer(lambda body, n: "ok") as server:
        words = ["--environment_model", "m", "--environment_base_url", server.base_url]
        assert f"{tmp_path / 'nowhere'} does not exist" in refused("prompt-r1", *words, *wrong)
        assert "name the model to train" in refused("prompt-r1", *words, "--task", "gsm8k", *out)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An address where nobody listens, and nothing in the cache."""
    from huggingface_hub import constants

    from agentic_prompting.cli.hub import probe_hub

    probe_hub.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    yield
    probe_hub.cache_clear()


def test_without_a_hub_a_model_is_missed_at_once(
    run, no_hub, nothing_is_fetched, tmp_path, capsys, monkeypatch
):
    """Forty seconds of retries came before a traceback."""
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was tried")
    )
    with LoopbackServer(lambda body, n: "ok") as server:
        words = [
            "--environment_model",
            "m",
            "--environment_base_url",
            server.base_url,
            "--output_dir",
            tmp_path,
        ]
        message = refused(
            "prompt-r1",
            *words,
            *ON_A_CPU,
            "--model_name_or_path",
            "Qwen/Qwen3-4B",
            "--task",
            "gsm8k",
        )
    assert message.startswith("Qwen/Qwen3-4B is not a local folder, and the hub cannot be reached")
    capsys.readouterr()
    status, _, err = run("ask", QUESTION, "--run", "me/my-agent", "--sandbox")
    assert status == 2
    assert err.startswith("agentic-prompting: me/my-agent is not a local folder")
    assert err.count("\n") == 1
    config = tmp_path / "run.yaml"
    config.write_text("model_name_or_path: Qwen/Qwen3-4B\n")
    status, out, _ = run("doctor", "--config", config, "--json")
    (finding_of_model,) = [
        finding for finding in json.loads(out)["findings"] if finding["check"] == "model"
    ]
    assert status == 1
    assert finding_of_model["level"] == "problem"
    assert "cannot be reached" in finding_of_model["says"]


def test_without_a_hub_data_are_missed_at_once(run, no_hub, tmp_path, monkeypatch):
    """Libraries do not try again; what is asked for first in `evaluate` is the key."""
    from agentic_prompting.cli.task_rows import TaskRows

    asked = []
    monkeypatch.setattr("time.sleep", lambda seconds: asked.append(seconds))
    with pytest.raises(ValueError, match="gsm8k.*'train'"):
        TaskRows().load("gsm8k", 0)
    assert not asked
    config = tmp_path / "table.yaml"
    config.write_text(
        "title: T\ntasks: [gsm8k]\nmodels: {model: {name: gpt-4o-mini}}\nsystems: {cot: {kind: "
        "prompted}}\n"
    )
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    status, _, err = run("evaluate", "--config", config, "--output", tmp_path / "out")
    assert status == 2
    assert err.splitlines()[-1].startswith(
        "agentic-prompting: no key for model (gpt-4o-mini): export"
    )


def test_a_missing_extra_is_said_before_anything_is_loaded(
    monkeypatch, nothing_is_fetched, tmp_path
):
    from agentic_prompting.cli import extras

    here = extras.version_of
    monkeypatch.setattr(
        extras, "version_of", lambda name: None if name in ("math-verify", "vllm") else here(name)
    )
    common = [
        f"--output_dir={tmp_path}",
        "--task=gsm8k",
        "--reflector=policy",
        "--model_name_or_path=x/y",
    ]
    assert "pip install 'agentic-prompting[math]'" in refused(
        "espl", "--reward", "math", *common, *ON_A_CPU
    )
    assert "pip install 'agentic-prompting[vllm]'" in refused(
        "espl", "--use_vllm", "true", *common, *ON_A_CPU
    )


# --- rows of one's own ----------------------------------------------------------------------------


@pytest.fixture
def own_rows(tmp_path):
    file = tmp_path / "support.csv"
    file.write_text("nr,request,reply\n1,Where is Rome?,Italy\n2,What is 2 + 2?,4\n")
    return ["--dataset", file, "--columns", "question=request,answer=reply,id=nr"]


def test_rows_of_ones_own_are_a_file_and_its_columns(run, own_rows, tmp_path):
    with LoopbackServer(lambda body, number: "<answer>4</answer>") as server:
        urls = ["--policy-base-url", server.base_url, "--reference-base-url", server.base_url]
        models = [
            "--policy-model=small",
            "--reference-model=large",
            "--steps=1",
            "--num-generations=1",
        ]
        where = ["--problems-per-step", 2, "--output-dir", tmp_path / "out", "--json"]
        status, _, err = run("evolve", *urls, *models, *own_rows, *where)
        assert status == 3 and "no two attempts differ" in err
        questions = {
            body["messages"][-1]["content"] for body in server.requests if body["model"] == "small"
        }
    assert questions == {"Where is Rome?", "What is 2 + 2?"}


def test_training_takes_them_too(own_rows, tmp_path):
    from agentic_prompting.cli.train_program import parse_method_options

    common = [
        *own_rows,
        "--output_dir",
        tmp_path,
        *ON_A_CPU,
        "--model_name_or_path",
        tmp_path,
    ]  # a folder: the model is looked for first
    for method, asked in (
        ("prompt-r1", ["--environment_model", "m"]),
        ("espl", ["--reflector", "policy"]),
    ):
        script, args, _ = parse_method_options(method, [str(word) for word in [*common, *asked]])
        script.check(args)
        rows = script.load(script.task, 0)
        assert rows["question"] == ["Where is Rome?", "What is 2 + 2?"]
        assert rows["answers"] == [
            ["Italy"],
            ["4"],
        ]
    asked = [
        "--environment_model",
        "m",
        "--environment_base_url",
        unused_url(),
        "--check_environment",
        "false",
    ]
    wrong = [word if word != own_rows[3] else "request" for word in common]
    assert "--columns request is not of the form" in refused("prompt-r1", *wrong, *asked)
    assert "--dataset, --columns would have no effect" in refused(
        "prompt-r1", *common, *asked, "--sandbox", "true"
    )


def test_data_that_cannot_be_had_are_one_line(monkeypatch, tmp_path):
    def fails(*_, **__):
        raise RuntimeError("gsm8k: no source could be loaded. Tried:\n  a: b\n  c: d")

    monkeypatch.setattr("agentic_prompting.data.load_task", fails)
    monkeypatch.setattr(
        "agentic_prompting.cli.train_prompt_r1.check_before_loading", lambda *_: None
    )
    words = ["--environment_model", "m", "--environment_base_url", unused_url(), "--task", "gsm8k"]
    message = refused(
        "prompt-r1", *words, "--model_name_or_path", "x/y", "--output_dir", tmp_path, *ON_A_CPU
    )
    assert message.endswith("no source could be loaded. Tried: a: b c: d")


# --- an environment of one's own ------------------------------------------------------------------

SUMS = '''
class Calculator:
    """Answers sums."""

    def step(self, rollout):
        numbers = [int(word) for word in rollout.turns[-1].request.split() if word.isdigit()]
        return f"the sum is {sum(numbers)} ." if numbers else None


def broken(rollout):
    raise KeyError("no such tool")


def wrong(rollout):
    return 42


def told(rollout):
    return "the answer is Swahili ."


def made():
    return Calculator()


def silent(rollout):
    return None


twelve = 12
'''

TOOLS = '''
from agentic_prompting.interop import ToolEnvironment, TRLEnvironment


def stock(part: str, shelf: int = 0) -> str:
    """How many of a part there are.

    Args:
        part: Its name.
        shelf: Its shelf.
    """
    return f"12 of {part}"


def picky(colour: str, count: int) -> str:
    """Refuses everything.

    Args:
        colour: One of two. (choices: ["red", "blue"])
        count: How many.
    """
    raise KeyError(f"no {colour} {count}")


class Till:
    """A till with a state of its own."""

    def reset(self, **row):
        self.sum = 0

    def add(self, amount: int) -> str:
        """Adds an amount.

        Args:
            amount: In cents.
        """
        self.sum += amount
        return f"the sum is {self.sum}"


def tools():
    return ToolEnvironment([stock, picky])


def only_picky():
    return ToolEnvironment([picky])


def till():
    return TRLEnvironment(Till)
'''


@pytest.fixture
def sums(tmp_path, monkeypatch):
    (tmp_path / "own_sums.py").write_text(SUMS)
    (tmp_path / "own_tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text('{"question": "what is 17 plus 4 ?", "answers": ["21"]}\n')
    monkeypatch.chdir(tmp_path)


def test_check_env_calls_each_tool_by_itself_and_shows_the_schemas(run, sums):
    status, out, err = run("check-env", "own_tools:tools", "--dataset", "rows.jsonl")
    assert (status, err) == (0, "")
    assert (
        'tool           {"name": "stock", "description": "How many of a part there are.", "parameters": {'
        in out
    )
    assert 'agent asks     {"name": "stock", "arguments": {"part": "what is 17 plus 4 ?"}}' in out
    assert "environment    12 of what is 17 plus 4 ?" in out
    assert 'agent asks     {"name": "picky", "arguments": {"colour": "red", "count": 1}}' in out
    assert "3 episodes: 2 replies, 1 error, the slowest" in out, "what is an error is no reply"


def test_check_env_takes_a_call_as_request(run, sums):
    call = '{"name": "stock", "arguments": {"part": "p7"}}'
    status, out, _ = run("check-env", "own_tools:tools", "--request", call)
    assert status == 0
    assert out.count("environment    12 of p7") == 3
    assert "3 episodes: 3 replies, the slowest" in out


@pytest.mark.parametrize("form", ["<tool_call>\n{}\n</tool_call>", "agent asks     {}", " {}\n"])
def test_check_env_takes_a_call_as_printed(run, sums, form):
    call = form.replace("{}", '{"name": "stock", "arguments": {"part": "p7"}}')
    status, out, err = run("check-env", "own_tools:tools", "--request", call)
    assert status == 0 and out.count("environment    12 of p7") == 3, err


def test_check_env_begins_each_episode(run, sums):
    """What a `reset` makes is there when a tool is called."""
    call = '{"name": "add", "arguments": {"amount": 5}}'
    status, out, err = run("check-env", "own_tools:till", "--request", call, "--request", call)
    assert status == 0, err
    assert out.count("the sum is 5") == 3 and out.count("the sum is 10") == 3


def test_check_env_says_that_nothing_was_asked_or_every_call_failed(
    run, sums, asking_policy, tmp_path
):
    status, out, err = run("check-env", "own_tools:only_picky")
    assert status == 1
    assert err.count("\n") == 1
    assert "KeyError" in err
    assert "give one that works: --request" in err
    status, out, err = run("check-env", "own_tools:tools", "--request", "what is 2 plus 2 ?")
    assert status == 1 and "a call must be" in err
    status, out, err = run("check-env", "own_tools:tools", "--model", asking_policy)
    assert status == 2 and "never shows the agent its tools" in err
    status, out, _ = run(
        "check-env",
        "own_tools:tools",
        "--model",
        with_tools(asking_policy, tmp_path / "with_tools"),
    )
    assert status == 1 and "no tool was called" in out
    status, out, _ = run("check-env", "own_sums:silent")
    assert status == 0 and "3 episodes: no reply" in out, "the environment ended each episode"


@pytest.mark.parametrize("name", ["own_sums:Calculator", "own_sums.py:made"])
def test_check_env_plays_three_episodes_and_shows_them(run, sums, name):
    status, out, err = run("check-env", name, "--dataset", "rows.jsonl")
    assert (status, err) == (0, "")
    assert out.count("agent asks     what is 17 plus 4 ?") == 3
    assert out.count("environment    the sum is 21 .") == 3
    assert "3 episodes: 3 replies, the slowest" in out
    assert "what training would show the agent" in out
    record = json.loads(
        run("check-env", name, "--dataset", "rows.jsonl", "--json", "--request", "1 and 2")[1]
    )
    assert [episode["observations"][0]["text"] for episode in record["episodes"]] == [
        "the sum is 3 ."
    ] * 3


def test_check_env_refuses_an_agent_of_one_parameter(run, tmp_path):
    file = tmp_path / "own_agent.py"
    file.write_text("def agent(task):\n    return '4'\n")
    status, _, err = run("check-env", f"{file}:agent")
    assert status == 2 and "(row, base_url, api_key)" in err and "called task" in err


def test_check_env_with_a_model(run, sums, asking_policy):
    status, out, _ = run(
        "check-env", "own_sums:Calculator", "--model", asking_policy, "--dataset", "rows.jsonl"
    )
    assert status == 0 and out.count("episode ") == 3 and "3 episodes: " in out


@pytest.mark.parametrize("option", ["--environment", "--program"])
def test_an_agent_with_an_environment_of_ones_own(run, sums, asking_policy, option):
    """`--program` is the word of `train` for an agent program."""
    status, out, _ = run("ask", "what is 1 ?", "--run", asking_policy, option, "own_sums:told")
    assert status == 0
    assert "environment    the answer is Swahili ." in out
    assert "large LLM      " not in out
    evaluate = ["evaluate", "--run", asking_policy, "--dataset", "rows.jsonl"]
    serve = ["serve", asking_policy, "--port", 0]
    for command in (["ask", "x", "--run", asking_policy], serve, evaluate):
        status, _, err = run(*command, option, "own_sums:Calculatr")
        assert status == 2 and "did you mean Calculator?" in err
        status, _, err = run(*command, option, "own_sums:Calculator", "--sandbox")
        assert status == 2
        assert "or name an environment of your own with --environment MODULE:NAME" in err
    status, _, err = run("serve", asking_policy, "--environment", "own_sums:Calculator", "--refine")
    assert status == 2 and "--refine asks a large LLM" in err


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("own_sums:broken", 1, "KeyError: 'no such tool'"),
        ("own_sums:wrong", 1, "own_sums.py:14) must return an Observation, a str or None, not int"),
        ("own_sums:twelve", 2, "environment has no step(rollout) to call: int"),
        ("own_sums:Calculatr", 2, "own_sums has no Calculatr; did you mean Calculator?"),
        ("nowhere_at_all:x", 2, "no module nowhere_at_all"),
        ("own_sums", 2, "module:name"),
    ],
)
def test_check_env_says_what_is_wrong(run, sums, name, status, message):
    found, out, err = run("check-env", name)
    assert found == status and message in err and err.count("\n") == 1 and "Traceback" not in out, (
        err
    )
