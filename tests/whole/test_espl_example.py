"""`examples/train_espl.py` and `examples/evolve_closed_model.py` as a user runs them, and their
configurations.
"""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from agentic_prompting.cli import main, train_program
from agentic_prompting.sandbox.setup import prepare_guarded
from agentic_prompting.trainers import ESPLConfig

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs" / "espl").glob("*.yaml"))


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A policy that has hardly learned anything: enough to see that everything is connected."""
    folder = tmp_path_factory.mktemp("guarded")
    prepare_guarded(folder, seed=0, n_test=8, warm_start_steps=2, copying_steps=1)
    # Programs with other settings take it, too.
    (folder / "warm_start" / "made_from.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("file", "program"), [("train_espl", train_program.main), ("evolve_closed_model", main)]
)
def test_the_examples_start_the_programs(file, program):
    assert runpy.run_path(str(ROOT / "examples" / f"{file}.py"))["main"] is program


def test_the_configurations_are_those_of_the_issue():
    assert [path.stem for path in CONFIGS] == [
        "aime_beyondaime",
        "dapo100_aime25",
        "hmmt",
        "math_qwen3_4b",
        "nq_hotpotqa",
        "prompt_r1_espl",
        "sandbox",
        "search",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_is_an_option_and_the_script_takes_it(path, monkeypatch):
    monkeypatch.setattr(ESPLConfig, "bf16", False)
    written = yaml.safe_load(path.read_text())
    options = ["--config", str(path), "--bf16", "false", "--use_cpu", "true"]
    # What a user adds: the models and addresses that this configuration's environment asks.
    needed = {
        "reference_model": "large" if written.get("reflector") != "policy" else None,
        "environment_model": "large" if written.get("environment") == "llm" else None,
        "search_url": (
            "http://127.0.0.1:1/retrieve" if written.get("environment") == "search" else None
        ),
    }
    for name, value in needed.items():
        if value and name not in written:
            options += [f"--{name}", value]
    kinds = train_program.METHODS["espl"]
    assert set(written) <= {name for kind in kinds for name in kind.__dataclass_fields__}
    parsed = train_program.parse_method_options("espl", options)
    parsed[0].check(parsed[1])
    values = {name: value for one in parsed for name, value in vars(one).items()}
    for name in set(written) - {
        "bf16",
        "use_cpu",
        "report_to",
        "dtype",
        "save_strategy",
        "eval_strategy",
        "lr_scheduler_type",
    }:
        expected = (written[name], [written[name]], str(written[name]))
        assert values[name] in expected or str(values[name]) in expected, name


def train(*arguments):
    train_program.main("espl", list(map(str, arguments)))


def evolve(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["evolve", *map(str, arguments)])
    return ended.value.code


def test_the_sandbox_end_to_end(warm, capsys):
    config = ROOT / "examples" / "configs" / "espl" / "sandbox.yaml"
    train(
        "--config",
        config,
        "--output_dir",
        warm,
        "--n_test",
        8,
        "--max_steps",
        2,
        "--seed",
        0,
        "--per_device_train_batch_size",
        12,
        "--warm_start_steps",
        2,
        "--evolution_lag",
        0,
    )
    printed = capsys.readouterr().out
    assert "policy after, best prompt" in printed
    assert "95 % interval" in printed
    assert f"written to {warm}" in printed
    summary = json.loads((warm / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["questions"] == 8 and len(summary["exact_match"]) == 4
    assert (warm / "system_prompt.txt").read_text().startswith("these are the rules of the house")
    log = json.loads((warm / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2], (
        "for the report, without any checkpoint"
    )


def test_held_out_rows_make_a_curve(warm, tmp_path):
    """Figure 12; in the sandbox its own test questions."""
    config = ROOT / "examples" / "configs" / "espl" / "sandbox.yaml"
    run = tmp_path / "run"
    shutil.copytree(warm / "warm_start", run / "warm_start")
    train(
        "--config",
        config,
        "--output_dir",
        run,
        "--n_test",
        4,
        "--max_steps",
        2,
        "--seed",
        0,
        "--mode",
        "rl",
        "--per_device_train_batch_size",
        12,
        "--warm_start_steps",
        2,
        "--eval_strategy",
        "steps",
        "--eval_steps",
        1,
        "--per_device_eval_batch_size",
        4,
    )
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_reward" in entry] == [1, 2]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text(
            "".join(
                json.dumps({"question": f"{file.stem} {n}?", "answer": "x"}) + "\n"
                for n in range(3)
            )
        )
    asked = train_program.ESPLArguments(eval_task=",".join(map(str, files)), eval_task_rows=2)
    assert sorted(row["question"][0] for row in asked.load_held_out(asked.task, 0)) == [
        "a",
        "a",
        "b",
        "b",
    ]
    assert train_program.ESPLArguments().load_held_out("", 0) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "gsm8k"], "--reference_model"),
        (["--reward", "applause"], "there is no reward 'applause'"),
        (["--environment", "llm"], "--environment would have no effect"),
        (["--task", "gsm8k", "--environment", "llm"], "--environment_model"),
        (["--task", "gsm8k", "--environment", "search"], "--search_url"),
        (["--p_crossover", "2"], "p_crossover"),
        (["--reflector", "me"], "reflector must be one of"),
    ],
)
def test_bad_input_is_said(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        train("--output_dir", tmp_path, "--bf16", "false", "--use_cpu", "true", *arguments)


def test_a_closed_model_in_the_sandbox_and_its_resume(warm, capsys):
    options = ["--sandbox", "--output_dir", warm, "--problems_per_step", 2, "--num_generations", 2]
    assert evolve(*options, "--steps", 2, "--eval_every", 2, "--eval_task_rows", 2) == 0
    first = capsys.readouterr().out
    assert "step 2:" in first and "; held out: " in first and "written to" in first
    assert evolve(*options, "--steps", 3) == 0
    printed = capsys.readouterr().out
    assert "step 3:" in printed and "step 2:" not in printed, "it goes on where it was stopped"


def test_a_closed_model_needs_models(tmp_path, capsys):
    assert evolve("--output_dir", tmp_path) == 2 and "--policy-model" in capsys.readouterr().err


def test_an_episode_is_the_same_whoever_shares_its_batch(warm):
    from agentic_prompting import LLMEnvironment, PromptAgent
    from agentic_prompting.llm import complete, gather
    from agentic_prompting.rollout import run_with_engine
    from agentic_prompting.sandbox.setup import ROOT as PROMPT, AgentChat, Transcript

    sandbox = prepare_guarded(warm, 0, 8)
    agent = PromptAgent.from_pretrained(sandbox.model, LLMEnvironment(sandbox.oracle))
    talks = [PROMPT.messages(sandbox.spec.messages(row)) for row in sandbox.test]
    chat = AgentChat(agent, 3)
    together = run_with_engine(agent.policy, gather(chat(talk, repeat=1) for talk in talks))
    alone, other = (
        [complete(chat, talk, repeat=repeat).text for talk in talks] for repeat in (1, 2)
    )
    assert [reply.text for reply in together] == alone != other
    assert (
        Transcript()
        .parse(
            "<think> a </think> <interaction_prompt> b </interaction_prompt>\n[reply] c\n"
            "<think> d </think> <answer> e </answer>"
        )
        .answer
        == "e"
    )


def test_every_policy_is_evaluated_at_one_temperature(warm, monkeypatch):
    """Whatever it was trained at: a policy that was trained at 1.0 slips there more often."""
    from dataclasses import replace

    from agentic_prompting import PromptAgent
    from agentic_prompting.evolution import SystemPrompt
    from agentic_prompting.rollout import AgentSpec
    from agentic_prompting.sandbox.results import guarded_exact_match

    sandbox = prepare_guarded(warm, seed=0, n_test=2)
    played = []
    replace(AgentSpec.load(sandbox.model), sampling={"temperature": 1.0}).save(sandbox.model)

    def answer_all(agent, rows, **options):
        played.append(agent.spec.sampling)
        return []

    monkeypatch.setattr(PromptAgent, "answer_all", answer_all)
    monkeypatch.setattr("agentic_prompting.sandbox.results.exact_match_of", len)
    guarded_exact_match(sandbox, sandbox.model, SystemPrompt("be brief", ()))
    assert played == [{"temperature": 0.7}]
