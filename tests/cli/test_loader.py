"""Parts of your own from the command line, and the run as the first argument of every command that
uses one.
"""

import json
import subprocess
import sys

import pytest

from agentic_prompting.cli.loader import (
    REWARDS,
    SCORES,
    UnknownPart,
    load_environment,
    load_part,
    load_reward,
    load_score,
    register_judge,
    register_selection,
)

PARTS = '''
import random

class Shop:
    """Sells things."""

    def step(self, rollout):
        return "it costs 4 ."

def score(completions, answers, **columns):
    return [float(len(answer)) for answer in answers]

def rule(members, k, rng):
    return [len(members) - 1] * min(k, 1) + list(range(len(members) - 1))[: k - 1]

def strict(answer, answers):
    return float(answer in answers)

def lonely(answer):
    return 1.0

def percent(answer, answers):
    return 100.0

def raising(answer, answers):
    return answers["no"]

number = 3
'''


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "broken_parts.py").write_text("import nothing_of_that_name")
    (tmp_path / "raising_parts.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["own_parts", "own_parts.py", "FOLDER/own_parts.py"])
def test_a_part_is_loaded_by_module_or_file(parts, place):
    place = place.replace("FOLDER", str(parts))
    assert load_environment(f"{place}:Shop").step(None) == "it costs 4 ."
    assert load_reward(f"{place}:score")(completions=["x"], answers=[["1", "2"]]) == [2.0]
    assert load_score(f"{place}:strict")("a", ["a"]) == 1.0
    assert load_part(f"{place}:Shop", "environment") is load_part(f"{place}:Shop", "environment"), (
        "imported once"
    )


@pytest.mark.parametrize("name", REWARDS)
def test_the_shipped_rewards_are_there(name):
    assert callable(load_reward(name))


@pytest.mark.parametrize("name", SCORES)
def test_the_shipped_scores_are_there(name):
    assert load_score(name)("The answer is (A).", ["B"]) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "there is no reward 'exact_mach'; did you mean exact_match?"),
        ("own_parts:scor", "own_parts has no scor; did you mean score?"),
        ("own_parts:number", "own_parts:number is a int"),
        (
            "nowhere_at_all:score",
            "no module nowhere_at_all: start the command in the folder that holds it",
        ),
        ("broken_parts:score", "no module nothing_of_that_name: broken_parts imports it"),
        ("raising_parts:score", "raising_parts cannot be imported: ZeroDivisionError"),
        ("no/such/file.py:score", "no/such/file.py does not exist"),
        (":score", "there is no reward ':score'"),
        ("own_parts:", "there is no reward 'own_parts:'"),
    ],
)
def test_a_wrong_name_is_one_line(parts, name, message):
    with pytest.raises(ValueError) as raised:
        load_reward(name)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_selection_rule_of_ones_own_is_drawn_by(parts):
    from agentic_prompting.evolution import EvolveConfig, Population, SystemPrompt
    from agentic_prompting.evolution.selection import SELECTION_RULES

    try:
        register_selection("own_parts:rule")
        assert EvolveConfig(selection="own_parts:rule").selection == "own_parts:rule"
        population = Population(SystemPrompt("root"), 4, "own_parts:rule")
        assert [prompt.text for prompt in population.select(1)] == ["root"]
    finally:
        SELECTION_RULES.pop("own_parts:rule", None)


def test_a_judge_is_a_metric(parts):
    from agentic_prompting.evaluation import METRICS, find_metrics

    try:
        (score,) = find_metrics([register_judge("own_parts:strict")]).values()
        assert score(["a", "b"], [["a"], ["a"]]) == [1.0, 0.0]
    finally:
        METRICS.pop("own_parts:strict", None)


def test_a_score_of_wrong_parameters_is_refused(parts):
    with pytest.raises(UnknownPart, match="own_parts:lonely .*accepted"):
        load_score("own_parts:lonely")


@pytest.mark.parametrize(
    ("name", "message"),
    [("percent", "returned 100"), ("raising", r"TypeError.*own_parts.py:\d+ in raising")],
)
def test_a_faulty_score_is_named(parts, name, message):
    score = load_score(f"own_parts:{name}")
    with pytest.raises(UnknownPart, match=f"own_parts:{name} .*{message}"):
        score("a", ["a"])


@pytest.mark.parametrize(
    "command",
    [
        ["check-env", "own_parts:Shopp"],
        ["ask", "RUN", "what?", "--environment", "own_parts:Shopp"],
        ["serve", "RUN", "--environment", "own_parts:Shopp", "--port", "0"],
        [
            "evolve",
            "--policy-model",
            "m",
            "--reference-model",
            "m",
            "--selection",
            "own_parts:rull",
        ],
        [
            "evolve",
            "--policy-model=m",
            "--reference-model=m",
            "--dataset=rows.jsonl",
            "--reward=own_parts:scoree",
        ],
        ["refine", "--sandbox", "--score", "own_parts:strikt"],
        [
            "evaluate",
            "--config",
            "examples/configs/eval_prorefine_table1.yaml",
            "--sandbox",
            "--judge",
            "own_parts:strikt",
        ],
    ],
    ids=lambda command: " ".join(command[:1] + command[-2:-1]),
)
def test_a_wrong_name_ends_every_command_with_status_2(run, parts, asking_policy, command):
    (parts / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    status, _, err = run(*(asking_policy if word == "RUN" else word for word in command))
    assert status == 2 and "did you mean" in err and err.strip().count("\n") == 0, err


ON_A_CPU = [
    "--use_cpu=true",
    "--bf16=false",
    "--report_to=none",
    "--logging_steps=1",
    "--max_steps=1",
]


@pytest.mark.parametrize("method", ["prompt-r1", "espl"])
def test_an_environment_and_a_reward_of_ones_own_are_trained(
    parts, asking_policy, method, monkeypatch, capsys
):
    """In this process: what `accelerate launch` would start."""
    from agentic_prompting.cli.train_program import main
    from agentic_prompting.evolution.selection import SELECTION_RULES

    rows = [{"question": f"what is {i} ?", "answers": ["4"]} for i in range(8)]
    (parts / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        "--environment",
        "own_parts:Shop",
        "--reward",
        "own_parts.py:score",
        "--dataset",
        "rows.jsonl",
    ]
    own += ["--model_name_or_path", str(asking_policy), "--output_dir", "out", *ON_A_CPU]
    small = [
        "--per_device_train_batch_size",
        "4",
        "--num_generations",
        "2",
        "--max_completion_length",
        "32",
    ]
    if method == "espl":
        small = [
            "--mode",
            "rl",
            "--prompts_per_step",
            "1",
            "--gradient_accumulation_steps",
            "1",
            *small,
        ]
        (parts / "espl.yaml").write_text("selection: own_parts:rule\n")
        small += ["--config", "espl.yaml"]
        # Measured before: the run does not point to `headroom`.
        (parts / "out").mkdir()
        (parts / "out" / "headroom.json").write_text("{}")
    try:
        main(method, [*own, *small])
    finally:
        SELECTION_RULES.pop("own_parts:rule", None)
    (log,) = [
        json.loads(line)
        for line in (parts / "out" / "rollouts" / "log.jsonl").read_text().splitlines()
    ][:1]
    assert log["rewards/score/mean"] == 1.0
    printed = capsys.readouterr()
    assert "agentic-prompting report out" in printed.out.splitlines()[-1]
    pointers = [line for line in printed.err.splitlines() if "agentic-prompting headroom" in line]
    assert len(pointers) == (method == "prompt-r1")


def test_training_with_a_wrong_name_exits_with_2(parts):
    command = [
        sys.executable,
        "-m",
        "agentic_prompting.cli.train_program",
        "espl",
        "--reward",
        "exact_mach",
        "--task",
        "gsm8k",
    ]
    command += ["--environment", "none", "--reflector", "policy", "--output_dir", "out", *ON_A_CPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "did you mean exact_match?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["ask", "serve"])
def test_the_run_is_the_first_argument_or_an_option(
    run, parts, asking_policy, command, monkeypatch
):
    from agentic_prompting import serve

    monkeypatch.setattr(serve, "run_service", lambda service: None)
    more = ["--environment", "own_parts:Shop"]
    asked = ["what is 2 ?"] if command == "ask" else ["--port", 0]
    first = run(command, asking_policy, *asked, *more)
    second = run(command, *asked, "--run", asking_policy, *more)
    assert first == second and first[0] in (0, 1) and first[2] == ""
    for wrong in ([*asked, *more], [asking_policy, *asked, "--run", asking_policy, *more]):
        status, _, err = run(command, *wrong)
        assert status == 2 and f"agentic-prompting {command} RUN" in err


def test_report_takes_its_run_both_ways(run, parts):
    for words in (["nowhere"], ["--run", "nowhere"]):
        assert run("report", *words)[::2] == (2, "agentic-prompting: nowhere does not exist\n")
    assert "report RUN" in run("report")[2]


WRONG_AGENTS = """
async def two(row, client): ...

async def none(): ...

def returns_none(): ...

class Two:
    def __call__(self, row, client): ...

seven = 7
"""


@pytest.mark.parametrize("name", ["two", "none", "returns_none", "Two", "seven"])
@pytest.mark.parametrize("command", ["check-env", "ask", "evaluate"])
def test_a_wrong_agent_names_its_parameters(run, parts, asking_policy, command, name):
    (parts / "wrong_agents.py").write_text(WRONG_AGENTS)
    (parts / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    place = f"wrong_agents.py:{name}"
    words = {
        "check-env": [place, "--model", asking_policy],
        "ask": ["what?", "--run", asking_policy, "--program", place],
        "evaluate": ["--run", asking_policy, "--program", place, "--dataset", "rows.jsonl"],
    }
    status, _, err = run(command, *words[command])
    assert status == 2 and "Traceback" not in err
    assert "base_url" in err and err.strip().count("\n") == 0, err


@pytest.mark.parametrize("name", ["three", "Three"])
def test_an_agent_may_name_its_parameters_freely(parts, name):
    from agentic_prompting.cli.loader import load_environment

    (parts / "agents.py").write_text(
        "def three(row, url, key): ...\n\n\n"
        "class Three:\n    def __call__(self, row, base_url, api_key): ...\n"
    )
    assert load_environment(f"agents.py:{name}").plays_whole_episodes
