"""Options of `train` and of its YAML files: all that the trainers take in Python, one line for a
mistake, a short help and a JSON schema.
"""

import inspect
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from agentic_prompting import ESPLTrainer, MultiTurnGRPOTrainer, PromptR1Trainer
from agentic_prompting.cli.run_configuration import option_defaults
from agentic_prompting.cli.script import run_script
from agentic_prompting.cli.train_options import GRAMMAR_OPTIONS
from agentic_prompting.cli.train_program import METHODS, main, method_help, parse_method_options
from agentic_prompting.rollout import FreeText, read_rollouts

ROOT = Path(__file__).parents[2]
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
PARTS = '''
from transformers import TrainerCallback
from agentic_prompting.evolution import Population, SystemPrompt

class OrderDB:
    """Knows orders."""

    def step(self, rollout):
        return "it was sent on Monday ."

class Counter:
    """Counts."""

    def reset(self, **row):
        self.count = 0

    def increase(self, by: int) -> str:
        """
        Adds to a counter.

        Args:
            by: How much.
        """
        self.count += by
        return str(self.count)

def look_up(order: str) -> str:
    """
    Looks up an order.

    Args:
        order: Its number.
    """
    return "sent"

def short(completions, **columns):
    return [1.0 for _ in completions]

class Marks(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print("MARKED")

def two_prompts():
    return Population(SystemPrompt("Answer ."))
'''
OPTION_OF = {
    "model": "model_name_or_path",
    "reward_funcs": "reward",
    "args": "max_turns",
    "train_dataset": "dataset",
    "eval_dataset": "eval_task",
    "processing_class": "tokenizer",
    "environment": "environment",
    "tools": "tools",
    "environment_factory": "environment_factory",
    "prompt_template": "prompt_template",
    "system_prompt": "system_prompt",
    "grammar": "grammar",
    "reference": "reference_model",
    "initial_prompt": "initial_prompt",
    "population": "population",
    "callbacks": "callbacks",
    "peft_config": "use_peft",
}
"""Parameters of the trainers, and those of TRL's that their docstrings name: the option of each."""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "shop.py").write_text(PARTS)
    rows = [{"question": f"where is order {i} ?", "answers": ["4"]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("method", "kind"), [("prompt-r1", PromptR1Trainer), ("espl", ESPLTrainer)]
)
def test_every_argument_of_a_trainer_is_an_option(method, kind):
    named = {
        *inspect.signature(MultiTurnGRPOTrainer).parameters,
        *inspect.signature(kind).parameters,
    }
    named = (named | {"callbacks", "peft_config"}) - {"kwargs"}
    assert {OPTION_OF[name] for name in named} <= option_defaults(method).keys()


def trainer_of(method, monkeypatch, *words):
    """The arguments that a program calls its trainer with."""
    given = {}

    class Made(Exception):
        pass

    def make(**arguments):
        given.update(arguments)
        raise Made

    name = {"prompt-r1": "PromptR1Trainer", "espl": "ESPLTrainer"}[method]
    module = f"agentic_prompting.cli.train_{method.replace('-', '_')}"
    monkeypatch.setattr(f"{module}.{name}", make)
    monkeypatch.setattr(f"{module}.check_before_loading", lambda *_: None)
    script, args, model = parse_method_options(method, [str(word) for word in [*words, *ON_A_CPU]])
    script.check(args)
    with ExitStack() as stack, pytest.raises(Made):
        script.build_trainer(args, model, stack)
    return given


@pytest.mark.parametrize("method", ["prompt-r1", "espl"])
def test_a_file_names_them_all(parts, tiny_policy, method, monkeypatch):
    (parts / "words.txt").write_text("Order : {question}")
    values = {
        "model_name_or_path": str(tiny_policy),
        "tokenizer": str(tiny_policy),
        "dataset": "rows.jsonl",
        "eval_task": "rows.jsonl",
        "environment": "shop:OrderDB",
        "reward": ["exact_match", "shop:short"],
        "prompt_template": "words.txt",
        "system_prompt": "Be kind.",
        "grammar": "free",
        "callbacks": ["shop.py:Marks"],
        "output_dir": "out",
    }
    if method == "espl":
        values |= {"reflector": "policy", "population": "shop:two_prompts"}
    (parts / "run.yaml").write_text(yaml.safe_dump(values))
    arguments = trainer_of(method, monkeypatch, "--config", "run.yaml")
    assert arguments["environment"].step(None) == "it was sent on Monday ."
    assert [function.__name__ for function in arguments["reward_funcs"]] == [
        "exact_match_reward",
        "short",
    ]
    assert (arguments["prompt_template"], arguments["system_prompt"]) == (
        "Order : {question}",
        "Be kind.",
    )
    assert arguments["grammar"] == FreeText()
    assert type(arguments["callbacks"][0]).__name__ == "Marks"
    assert len(arguments["eval_dataset"]) == len(arguments["train_dataset"]) == 8
    assert arguments["processing_class"] is not None
    if method == "espl":
        assert arguments["population"].members[0].prompt.text == "Answer ."


@pytest.mark.parametrize("method", ["prompt-r1", "espl"])
def test_tools_and_a_factory_take_the_place_of_an_environment(parts, method, monkeypatch):
    words = ["--model_name_or_path", "x/y", "--dataset", "rows.jsonl", "--output_dir", "out"]
    words += ["--reflector", "policy"] if method == "espl" else []
    arguments = trainer_of(method, monkeypatch, *words, "--tools", "shop:look_up")
    assert [function.__name__ for function in arguments["tools"]] == ["look_up"]
    assert arguments["environment_factory"] is None
    assert "environment" not in arguments
    arguments = trainer_of(method, monkeypatch, *words, "--environment_factory", "shop:Counter")
    assert arguments["environment_factory"].__name__ == "Counter" and arguments["tools"] is None


def test_options_of_loading_reach_the_model(parts, monkeypatch):
    """Options of TRL's `ModelConfig` that were taken and never used."""
    from agentic_prompting.cli.train_program import loading_arguments

    words = [
        "--model_name_or_path",
        "x/y",
        "--environment_model",
        "m",
        "--output_dir",
        "out",
        *ON_A_CPU,
    ]
    _, _, model = parse_method_options(
        "prompt-r1", [*words, "--dtype", "bfloat16", "--model_revision", "v2"]
    )
    assert loading_arguments(model) == {"dtype": "bfloat16", "revision": "v2"}
    assert loading_arguments(parse_method_options("prompt-r1", words)[2]) == {}


def test_an_environment_of_ones_own_is_trained_from_a_file(parts, asking_policy, capsys):
    values = {
        "model_name_or_path": str(asking_policy),
        "environment": "shop:OrderDB",
        "reward": "shop:short",
        "callbacks": "shop:Marks",
        "dataset": "rows.jsonl",
        "output_dir": "out",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 32,
        "system_prompt": "Hello",
    }
    (parts / "run.yaml").write_text(yaml.safe_dump(values))
    main("prompt-r1", ["--config", "run.yaml", *ON_A_CPU])
    assert "MARKED" in capsys.readouterr().out
    assert {record["rewards"]["short"] for record in read_rollouts("out/rollouts")} == {1.0}
    assert json.loads(Path("out/agentic_prompting.json").read_text())["system_prompt"] == "Hello"
    with pytest.raises(ValueError, match=r"out.*--resume_from_checkpoint true"):
        main("prompt-r1", ["--config", "run.yaml", *ON_A_CPU])
    main("prompt-r1", ["--config", "run.yaml", "--overwrite", *ON_A_CPU])
    assert Path("out.previous/agentic_prompting.json").exists()
    assert Path("out/agentic_prompting.json").exists()


# --- mistakes -------------------------------------------------------------------------------------

BASE = ["--model_name_or_path", "x/y", "--dataset", "rows.jsonl", "--output_dir", "out", *ON_A_CPU]
MISTAKES = [
    (["--environment", "shop:OrderBD"], "shop has no OrderBD; did you mean OrderDB?"),
    (["--environment", "shap:OrderDB"], "no module shap"),
    (
        ["--environment", "serch"],
        "did you mean search?",
    ),
    (
        ["--environ", "shop:OrderDB"],
        "did you mean --environment?",
    ),
    (["--environment", "shop:OrderDB", "--prompt_templat", "x"], "did you mean --prompt_template?"),
    (["--environment", "shop:OrderDB", "--reward", "exact_mach"], "did you mean exact_match?"),
    (
        ["--environment", "shop:OrderDB", "--tools", "shop:look_up"],
        "take the place of --environment",
    ),
    (["--environment", "shop:OrderDB", "--max_steps", "many"], "invalid int value: 'many'"),
    (
        ["--environment", "shop:OrderDB", "--max_steps"],
        "--max_steps/--max-steps: expected one argument",
    ),
    (["--environment", "shop:OrderDB", "--max_turns", "0"], "max_turns must be at least 1"),
    (
        ["--environment", "shop:OrderDB", "--prompt_template", "no place for it"],
        "no {question} in it",
    ),
    (["--environment", "shop:OrderDB", "extra"], "'extra' belongs to no option"),
    (["--config", "nowhere.yaml"], "nowhere.yaml"),
    (
        {"prompt_templat": "question : {question}, and long enough to hide what is meant"},
        "did you mean prompt_template?",
    ),
    ({"max_steps": "many"}, "max_steps"),
    ({"max_steps": {"a": [1]}}, "max_steps"),
    ({"learning_rate": "fast"}, "learning_rate"),
    ({"reward": {"a": 1}}, "reward"),
    ({"gate": True, "environment": "shop:OrderDB"}, "gate"),
]


@pytest.mark.parametrize("method", ["prompt-r1", "espl"])
def test_a_mistake_is_one_line_and_status_2(parts, tiny_policy, method, capsys):
    wrong = {}
    for given, message in MISTAKES:
        words = list(given)
        if isinstance(given, dict):
            (parts / "run.yaml").write_text(yaml.safe_dump(given))
            words = ["--config", "run.yaml"]
        words += [str(tiny_policy) if word == "x/y" else word for word in BASE]
        words += ["--reflector", "policy"] if method == "espl" else []
        if "gate" in given and method == "espl":
            continue
        with pytest.raises(SystemExit) as ended:
            run_script(lambda words=words: main(method, words))
        err = [line for line in capsys.readouterr().err.splitlines() if "Loading" not in line]
        if (
            ended.value.code != 2
            or len(err) != 1
            or not err[0].startswith("agentic-prompting: ")
            or message not in err[0]
        ):
            wrong[str(given)] = (ended.value.code, err)
    assert not wrong


def test_numbers_that_yaml_reads_as_text_and_lists_of_one_are_taken(parts):
    (parts / "run.yaml").write_text(
        "learning_rate: 1e-6\nlora_target_modules: all-linear\nreward: exact_match\nmax_steps: 3\nlogging_steps: 0.5\n"
        "report_to: none\nlr_scheduler_kwargs: {a: 1}\nbudget_usd: 2\noverwrite: true\n"
    )
    script, args, _ = parse_method_options(
        "espl", ["--config", "run.yaml", "--output_dir", "out", *ON_A_CPU]
    )
    assert args.learning_rate == 1e-6
    assert script.reward == ["exact_match"]
    assert args.overwrite is True


# --- help and schema ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_help_shows_all_trl_options_on_request(method, capsys):
    short, long = (method_help(method, everything) for everything in (False, True))
    assert short.count("\n") < 320 and "--adam_epsilon" not in short and "--help-all" in short
    assert "--adam_epsilon" in long and long.count("\n") > 2 * short.count("\n")
    main(method, ["--help"])
    assert "--prompt_template" in capsys.readouterr().out, (
        "of the program itself, which examples/ start"
    )
    assert all(f"--{name}" in short for name in ("environment", "learning_rate", "max_turns"))
    assert all(f"--{name}" in long for name in option_defaults(method))


def configs():
    return sorted(path for path in (ROOT / "examples" / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", configs(), ids=lambda path: path.name)
def test_an_example_names_its_schema_in_the_first_line_and_fits_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = json.loads((path.parent / first.partition("=")[2]).read_text())
    values = yaml.safe_load(path.read_text())
    assert values.keys() <= schema["properties"].keys() and schema["additionalProperties"] is False
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(values, schema)


def test_the_schemas_are_those_of_the_dataclasses(tmp_path):
    """Made anew by their script: of our own options always, of TRL's where they were made with the
    same version.
    """
    script = ROOT / "docs" / "tools" / "config_schemas.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    for made in sorted(tmp_path.glob("*.json")):
        kept, now = (
            json.loads(path.read_text()) for path in (ROOT / "examples/configs" / made.name, made)
        )
        assert (
            made.name.startswith("table")
            or {"prompt_template", "max_turns"} <= kept["properties"].keys()
        )
        if kept.get("$comment") == now.get("$comment"):
            assert kept == now, f"run python {script.relative_to(ROOT)}"
    assert len(list(tmp_path.glob("*.json"))) == 4


def test_every_shipped_grammar_is_one():
    from agentic_prompting.cli.loader import load_object

    assert {
        name: type(load_object(name, "grammar", GRAMMAR_OPTIONS)).__name__
        for name in GRAMMAR_OPTIONS
    } == {
        "tags": "TagGrammar",
        "question": "QuestionGrammar",
        "free": "FreeText",
    }


@pytest.mark.parametrize(("max_turn_tokens", "count"), [(600, 1), (500, 0), (1024, 0)])
def test_turns_above_the_whole_length_lead_to_a_warning(tmp_path, capsys, max_turn_tokens, count):
    """1024 is the default, which a run with a short length need not change."""
    words = ["--task", "gsm8k", "--environment", "none", "--reflector", "policy"]
    words += ["--max_completion_length", "500", "--max_turn_tokens", str(max_turn_tokens)]
    with pytest.raises(ValueError, match="--model_name_or_path"):
        main("espl", [*words, "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16=false"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "max_turn_tokens" in line]
    assert len(warnings) == count and all("600" in line and "500" in line for line in warnings)
