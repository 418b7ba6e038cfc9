"""A new user's first hour, played: own data, tools, reward, flaky server and TRL script; and what
mistakes look like.

    python -m benchmarks.reliability.first_hour --json  # some minutes on two cores
    python -m benchmarks.reliability.first_hour --only model "no key"  # parts and mistakes by name; --list has all

Everything is typed as a user types it, in an empty folder: commands in processes of their own,
scripts in files. Nothing here measures learning: models are tiny and steps few. The parts must end
well. Each mistake must end with another status than 0, but for those that a run survives with a
warning, and with a line that says what is wrong (a mistake without is `silent`), and with three
lines at most (else `long_errors`). Lines are those of standard error, but not what the libraries
below us print in a run without a mistake, too (`NOISE`), and not the frames of a traceback that
Python prints for a script. A second traceback ("During handling of ...") counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.lab import REPOSITORY, log, markdown

sys.path.append(str(REPOSITORY / "tests"))
from support.servers import Answer, LoopbackServer, unused_url

MOST_LINES = 3
NEED_THE_MODEL = {
    "TRL script with LoRA",
    "LoRA run with a checkpoint",
    "YAML",
    "own script",
    "evaluate and report",
}
"""Parts that use the model of the part "model"."""

NOISE = re.compile(
    r"real_accelerator|FutureWarning|warnings\.warn\(|Loading weights|Writing model|Map: |it/s\]|generation flags|"
    r"nthreads|torch\.distributed|Redirects are currently"
)
ON_A_CPU = (
    "use_cpu=True, bf16=False, gradient_checkpointing=False, report_to='none', save_strategy='no', "
    "max_steps=2"
)
FILES = {
    "mine.csv": "request,reply\n"
    + "".join(f"which shelf has part p{i} ?,s{i % 4}\n" for i in range(16)),
    "queries.jsonl": (
        '{"question": "which shelf has part p1 ?", "answers": ["s1"]}\n{"question": "and p2 ?"}\n'
    ),
    "own.py": '''
from agentic_prompting import LLMEnvironment, OpenAIChat
from agentic_prompting.rewards import exact_match
from agentic_prompting.interop import MCPTools, ToolEnvironment, TRLEnvironment


class Store:
    """A store room, which is asked for parts."""

    prompt_template = "question : {question}"

    def step(self, rollout):
        return "shelf s1"


class Till:
    """A till with a state of its own, of every episode another one."""

    def reset(self, **row):
        self.sum = 0

    def add(self, amount: int) -> str:
        """Adds an amount.

        Args:
            amount: In cents.
        """
        self.sum += amount
        return f"the sum is {self.sum}"


def till():
    return TRLEnvironment(Till)


def over_mcp():
    from mcp.server.mcpserver import MCPServer

    server, state = MCPServer("stock"), {"left": 9}

    @server.tool()
    def take(count: int) -> str:
        """Takes parts out of the stock."""
        state["left"] -= count
        return f"{state['left']} are left"

    return ToolEnvironment([MCPTools(server)])


def clerk():
    return LLMEnvironment(OpenAIChat("clerk", base_url=open("flaky.url").read(), api_key="x", timeout=2))


def broken(rollout):
    raise KeyError("shelf")


def wrong(rollout):
    return 42


def partial(completions, answers, **columns):
    """1 for a right answer, half for one that names a shelf at all."""
    texts = [one[-1]["content"] if isinstance(one, list) else one for one in completions]
    return [1.0 if g[0] in text else 0.5 * ("s" in text) for text, g in zip(texts, answers, strict=True)]


def nothing(completions, **columns):
    return None


def short(completions, **columns):
    return [1.0]


def unknown_column(completions, gold, **columns):
    return [1.0 for _ in gold]


def flat(completions, **columns):
    return [0.5 for _ in completions]


def forgetful(row, base_url, api_key):
    """An agent that forgets to return its answer."""
    from openai import OpenAI

    messages = [{"role": "user", "content": "question : " + row["question"]}]
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="agent", messages=messages)
''',
    "model.py": """
import csv

from agentic_prompting import Limits
from agentic_prompting.rollout import AgentSpec
from agentic_prompting.sandbox.policy import build_policy, build_tokenizer, save_policy

words = " ".join(["question :", *(word for row in csv.reader(open("mine.csv")) for word in row)]).split()
tokenizer = build_tokenizer(words)
spec = AgentSpec("question : {question}", limits=Limits(max_turns=2, max_turn_tokens=8, max_tokens=24))
save_policy(build_policy(tokenizer, seed=0), tokenizer, spec, "model")
""",
    # A script for TRL's GRPOTrainer with LoRA: the import, the trainer's name and the config's are
    # what has changed.
    "moved.py": """
from peft import LoraConfig

from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, load_task
from own import Store, partial

rows = load_task("mine.csv", columns={"question": "request", "answer": "reply"})
trainer = MultiTurnGRPOTrainer(
    model="model",
    reward_funcs=partial,
    args=MultiTurnGRPOConfig(
        "runs/moved", num_generations=4, per_device_train_batch_size=8, max_completion_length=24, ON_A_CPU
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
    environment=Store(),
)
assert trainer.spec.prompt_template == "question : {question}"
trainer.train()
trainer.save_model()
""".replace("ON_A_CPU", ON_A_CPU),
    "script.py": """
import sys

from agentic_prompting import PromptR1Config, PromptR1Trainer, load_task
import own

given = dict(pair.split("=", 1) for pair in sys.argv[1:])
columns = {"question": "request", "answer": "reply"}
if "meta" in given:
    columns[given["meta"]] = "request"
rows = load_task("mine.csv", columns=columns)
if (n := given.get("rename")):
    rows = rows.rename_column("answers", n)
trainer = PromptR1Trainer(
    model=given.get("model", "model"),
    environment=getattr(own, given["environment"]) if "environment" in given else own.Store(),
    reward_funcs=getattr(own, given["reward"]) if "reward" in given else None,
    prompt_template=given.get("template"),
    args=PromptR1Config(
        given.get("folder", "runs/" + "-".join(sys.argv[1:2]).replace("=", "-")), num_generations=4,
        per_device_train_batch_size=int(given.get("batch", 8)), max_completion_length=24, ON_A_CPU
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
""".replace("ON_A_CPU", ON_A_CPU),
    # Every rollout gets the same reward, in plain text without an environment.
    "flat.py": """
from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, load_task
from agentic_prompting.rollout import FreeText
from own import flat

rows = load_task("mine.csv", columns={"question": "request", "answer": "reply"})
trainer = MultiTurnGRPOTrainer(
    model="model",
    reward_funcs=flat,
    args=MultiTurnGRPOConfig(
        "runs/flat", num_generations=4, per_device_train_batch_size=8, max_completion_length=24, ON_A_CPU
    ),
    train_dataset=rows,
    environment=None,
    grammar=FreeText(),
)
trainer.train()
""".replace("ON_A_CPU", ON_A_CPU),
    # Trained with LoRA, or resumed without.
    "resumed.py": """
import sys

from peft import LoraConfig

from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, load_task
from own import Store, partial


def train(steps, adapter):
    rows = load_task("mine.csv", columns={"question": "request", "answer": "reply"})
    arguments = dict(ON_A_CPU)
    arguments |= {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
    trainer = MultiTurnGRPOTrainer(
        model="model",
        reward_funcs=partial,
        args=MultiTurnGRPOConfig(
            "runs/resumed", num_generations=4, per_device_train_batch_size=8, max_completion_length=24, **arguments
        ),
        train_dataset=rows,
        peft_config=adapter,
        environment=Store(),
    )
    trainer.train(resume_from_checkpoint=steps > 1)


if "lora" in sys.argv:
    train(1, LoraConfig(r=4, target_modules="all-linear"))
else:
    train(2, None)
""".replace("ON_A_CPU", ON_A_CPU),
    "mine.yaml": """
model_name_or_path: model
dataset: mine.csv
columns: question=request,answer=reply
environment: own:Store
reward: own:partial
output_dir: runs/yaml
use_peft: true
lora_target_modules: [all-linear]
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 24
max_steps: 2
use_cpu: true
bf16: false
gradient_checkpointing: false
report_to: none
save_strategy: 'no'
""",
}


# --- what is typed --------------------------------------------------------------------------------

OWN = "--dataset mine.csv --columns question=request,answer=reply"
MODELS = "--policy-model=small --reference-model=large"
SERVERS = "--policy-base-url=$FLAKY --reference-base-url=$FLAKY"

PARTS = {
    "data and check-env": [f"check-env own:Store {OWN}"],
    "tools": ["check-env own:till", "check-env own:over_mcp"],
    "flaky server": [f"check-env own:clerk {OWN}"],
    "model": ["model.py"],
    "TRL script with LoRA": ["moved.py"],
    "LoRA run with a checkpoint": ["resumed.py lora"],
    "YAML": ["train prompt-r1 --config mine.yaml"],
    "own script": ["script.py reward=partial folder=runs/own"],
    "E-SPL": [
        f"evolve {OWN} {SERVERS} {MODELS} --steps=2 --problems-per-step=4 --num-generations=3"
        " --grammar=free --reward=own:partial --output-dir=runs/evolve"
        " --initial-prompt='Name a shelf.'"
    ],
    "ProRefine": [
        "refine --input=queries.jsonl --output=runs/refine.jsonl --max-steps=2 --task-model=small"
        " --feedback-model=large --task-base-url=$FLAKY --feedback-base-url=$FLAKY"
    ],
    "evaluate and report": [
        f"evaluate --run model {OWN} --environment own:Store --task-rows 4",
        "report runs/own --no-pictures",
    ],
}
"""What the hour consists of, by name: lines as they are typed, with `$FLAKY` for the server's
address.
"""


@dataclass(frozen=True)
class Mistake:
    """Something that users do wrong.

    Args:
        line (`str`): The command, or a script's name and its arguments. `$FLAKY`, `$REFUSING` and
            `$CLOSED` are the addresses of the server of the parts, of one that refuses the key, and
            one without a server.
        says (`str`): A regular expression that the error message must match.
        needs (`str`, *optional*): The part that must have been played before.
        config (`str`, *optional*): The content of the file `bad.yaml`.
        survives (`bool`, *optional*, defaults to `False`): The run goes on, with a warning, and
            ends with status 0.
    """

    line: str
    says: str
    needs: str = ""
    config: str = ""
    survives: bool = False


TRAIN = "train prompt-r1 --config bad.yaml"
ASK = "ask model 'which shelf ?' --environment-model m"
YAML = FILES["mine.yaml"]

MISTAKES = {
    "misspelt option": Mistake("evolve --polcy-model m", "--polcy-model.*--policy-model"),
    "misspelt key": Mistake(
        TRAIN, r"learning_rat\b.*learning_rate", config=YAML + "learning_rat: 1e-3\n"
    ),
    "wrong type of a value": Mistake(
        TRAIN, "max_steps", config=YAML.replace("max_steps: 2", "max_steps: many")
    ),
    "no YAML": Mistake(TRAIN, "is not YAML", config="a: [1\n"),
    "missing file": Mistake("check-env own:Store --dataset nowhere.csv", "nowhere.csv"),
    "missing column": Mistake(
        "check-env own:Store --dataset mine.csv --columns question=reqest", "reqest.*request"
    ),
    "misspelt part": Mistake("check-env own:Stor", "did you mean Store"),
    "environment that raises": Mistake("check-env own:broken", "KeyError: 'shelf'"),
    "environment of a wrong type": Mistake(
        "check-env own:wrong", "must return an Observation.* int"
    ),
    "class for an object": Mistake(
        "script.py environment=Store", "class Store: pass an object", "model"
    ),
    "template without question": Mistake("script.py template=hello", r"no \{question\}", "model"),
    "missing model folder": Mistake("script.py model=runs/nowhere", "runs/nowhere does not exist"),
    "batch that does not divide": Mistake("script.py batch=6", "divi", "model"),
    "reward without a return": Mistake("script.py reward=nothing", "nothing.*None", "model"),
    "reward of a wrong length": Mistake("script.py reward=short", r"short.*\b1\b", "model"),
    "reward of a missing column": Mistake("script.py reward=unknown_column", "gold", "model"),
    "wrong address": Mistake(
        f"{ASK} --environment-base-url $CLOSED", "does not answer.*--environment-base-url", "model"
    ),
    "wrong key": Mistake(f"{ASK} --environment-base-url $REFUSING", "key", "model"),
    "no key": Mistake(
        f"evolve {OWN} {MODELS} --problems-per-step 4 --output-dir runs/keyless", "OPENAI_API_KEY"
    ),
    "trained without answers": Mistake("script.py rename=gold", "answers", "model"),
    "the same folder again": Mistake(
        "script.py reward=partial folder=runs/own", "resume", "own script"
    ),
    "nothing to learn": Mistake(
        f"evolve {OWN} --policy-model=calm --reference-model=large {SERVERS}"
        " --problems-per-step=4 --steps=1 --output-dir=runs/nothing",
        "nothing was learned.*grammar to 'marked'",
    ),
    "flat reward": Mistake(
        "flat.py", "reward is flat.*every reward is 0.5", "model", survives=True
    ),
    "reward of a column in meta": Mistake(
        "script.py reward=unknown_column meta=gold", r"gold.*meta\[i\]\)\['gold'\]", "model"
    ),
    "call of a tool that is not there": Mistake(
        """check-env own:till --request '{"name": "ad", "arguments": {"amount": 5}}'""",
        "every call failed.*ad",
    ),
    "plan from a folder that is no run": Mistake(
        "plan --from model", "settings.json.*--config", "model"
    ),
    "rescoring by a missing column": Mistake(
        "rescore runs/own --reward own:unknown_column", "gold.*--dataset", "own script"
    ),
    "table with other columns": Mistake("refine --sandbox --input mine.csv", "request, reply"),
    "budget that is too small": Mistake(
        f"evolve {OWN} {MODELS} {SERVERS} --problems-per-step=4 --budget-tokens=50"
        " --output-dir=runs/poor",
        "below the least useful one",
    ),
    "resumed without its adapter": Mistake(
        "resumed.py", "adapter.*peft_config", "LoRA run with a checkpoint"
    ),
    "agent that returns nothing": Mistake(
        f"train agent --program own:forgetful {OWN} --reward own:flat --model_name_or_path model"
        " --use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 8"
        " --max_turn_tokens 8 --max_completion_length 24 --max_steps 1 --save_strategy no"
        " --output_dir runs/forgetful",
        "returned None",
        "model",
        survives=True,
    ),
    "key of a table that is not set": Mistake(
        "evaluate --config bad.yaml",
        "NO_SUCH_KEY",
        config="title: Mine\ntasks: [mine.csv]\ncolumns: {question: request, answer: reply}\n"
        "models: {model: {name: small, key: NO_SUCH_KEY}}\n"
        "systems: {start: {kind: prompted, prompt: Answer.}}\n",
    ),
    "key in place of its variable": Mistake(
        f"evolve {OWN} {MODELS} --policy-client key=sk-1234", "name of an environment variable"
    ),
}
"""What users do wrong, by name."""


# --- servers --------------------------------------------------------------------------------------


def flaky(body: Mapping[str, Any], number: int) -> Answer | str:
    """Every model of the hour, with a 429, a 500 and a cut connection among each eight replies."""
    failures = {
        1: Answer("slow down", status=429, headers={"retry-after": "0"}),
        3: Answer("try later", status=500),
        5: Answer(drop="before"),
    }
    return failures.get(number % 8) or reply_of(body, number)


def reply_of(body: Mapping[str, Any], number: int) -> str:
    """The replies of a small model that names shelves now and then, of one that reflects, and of a
    clerk.
    """
    first = body["messages"][0]["content"]
    last = body["messages"][-1]["content"]
    if body["model"] in ("clerk", "calm"):
        return "the shelf is s1"
    if body["model"] == "large":
        if "IMPROVED_PROMPT" in first:
            return "<IMPROVED_PROMPT>Name the shelf.</IMPROVED_PROMPT>"
        if first.startswith("Task: retell"):
            return "1. It named no shelf."
        if "Prediction:" in last:
            return "<ACCURACY>0</ACCURACY>"
        if first.startswith(("Task: draw", "Task: let")):
            return '[{"op": "add", "text": "Name one shelf."}]'
        return "[]"
    names_a_shelf = "one shelf" in first or number % 3 == 0
    return f"shelf s{number % 4}" if names_a_shelf else "a part"


def refusing(body: Mapping[str, Any], number: int) -> Answer | str:
    """A server that knows no key."""
    return Answer("Incorrect API key provided", status=401)


# --- playing --------------------------------------------------------------------------------------


def split_line(line: str, addresses: Mapping[str, str]) -> list[str]:
    """The words of a typed line, with addresses in the place of their names."""
    return shlex.split(Template(line).substitute(addresses))


def run_line(words: Sequence[str], folder: Path) -> tuple[int, str, float]:
    """The exit status of a typed line, what it wrote to standard error, and its seconds."""
    is_script = words[0].endswith(".py")
    program = [] if is_script else ["-c", "from agentic_prompting.cli import main; main()"]
    hidden = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "500"}
    started = time.perf_counter()
    process = subprocess.run(
        [sys.executable, *program, *words],
        cwd=folder,
        env=env,
        text=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    return process.returncode, process.stderr, time.perf_counter() - started


def lines_to_read(stderr: str) -> list[str]:
    """The lines that a reader has to read: without noise, and of a traceback without its header and
    frames.
    """
    lines = []
    is_in_traceback = False
    for line in stderr.splitlines():
        line = line.split("\r")[-1]
        if line.startswith("Traceback (most recent call last)"):
            is_in_traceback = True
        elif is_in_traceback and line.startswith(" "):
            continue
        elif line.strip() and not NOISE.search(line):
            lines.append(line)
            is_in_traceback = False
    return lines


@contextmanager
def workplace() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the user's files, and the addresses that lines name."""
    with (
        tempfile.TemporaryDirectory() as name,
        LoopbackServer(flaky) as flaky_server,
        LoopbackServer(refusing) as refusing_server,
    ):
        folder = Path(name)
        for file, text in FILES.items():
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "flaky.url").write_text(flaky_server.base_url, encoding="utf-8")
        addresses = {
            "FLAKY": flaky_server.base_url,
            "REFUSING": refusing_server.base_url,
            "CLOSED": unused_url(),
        }
        yield folder, addresses


def names_to_play(only: Sequence[str]) -> set[str]:
    """The parts and mistakes whose names begin with one of `only` (all if it is empty), with the
    parts they need.
    """
    names = {name for name in [*PARTS, *MISTAKES] if not only or name.startswith(tuple(only))}
    names |= {MISTAKES[name].needs for name in names if name in MISTAKES}
    if NEED_THE_MODEL & names:
        names.add("model")
    return names


def play_part(lines: Sequence[str], addresses: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Type the lines of a part: whether all ended well, the seconds, and what the first failed line
    wrote.
    """
    results = [run_line(split_line(line, addresses), folder) for line in lines]
    failed = next((stderr for status, stderr, _ in results if status), "")
    record: dict[str, Any] = {
        "ok": not failed,
        "seconds": round(sum(seconds for _, _, seconds in results), 1),
    }
    if failed:
        record["said"] = lines_to_read(failed)[-5:]
    return record


def make_mistake(mistake: Mistake, addresses: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Type the line of a mistake: its status, how much there is to read, and whether that says what
    is wrong.
    """
    if mistake.config:
        (folder / "bad.yaml").write_text(mistake.config, encoding="utf-8")
    status, stderr, seconds = run_line(split_line(mistake.line, addresses), folder)
    lines = lines_to_read(stderr)
    ends_as_expected = (status == 0) == mistake.survives
    is_told = ends_as_expected and re.search(mistake.says, "\n".join(lines)) is not None
    record: dict[str, Any] = {
        "status": status,
        "lines": len(lines),
        "told": is_told,
        "seconds": round(seconds, 1),
    }
    if not is_told or len(lines) > MOST_LINES:
        record["said"] = [line[:300] for line in lines[-8:]]
    return record


def play(only: Sequence[str] = (), log: Callable[[str], None] = log) -> dict[str, Any]:
    """Play the hour, or what is named, with what that needs.

    Args:
        only (`Sequence[str]`, *optional*): Names of parts and mistakes, or beginnings of them.
        log (`Callable`, *optional*): Gets a line for each.
    """
    part_records: dict[str, dict[str, Any]] = {}
    mistake_records: dict[str, dict[str, Any]] = {}
    names = names_to_play(only)
    with workplace() as (folder, addresses):
        for name, lines in PARTS.items():
            if name in names:
                part_records[name] = part = play_part(lines, addresses, folder)
                log(f"{name}: {'ok' if part['ok'] else 'FAILED'}, {part['seconds']} s")
        for name, mistake in MISTAKES.items():
            if name in names:
                mistake_records[name] = record = make_mistake(mistake, addresses, folder)
                silent = "" if record["told"] else ", SILENT"
                log(
                    f"{name}: status {record['status']}, {record['lines']} lines{silent}, "
                    f"{record['seconds']:.1f} s"
                )
    return {
        "long_errors": sum(record["lines"] > MOST_LINES for record in mistake_records.values()),
        "silent": sum(not record["told"] for record in mistake_records.values()),
        "failed_parts": sum(not record["ok"] for record in part_records.values()),
        "parts": part_records,
        "mistakes": mistake_records,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Play a new user's first hour.")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument("--list", action="store_true", help="print the names of parts and mistakes")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of them")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join([*PARTS, *MISTAKES]))
        return 0
    results = play(options.only)
    if options.json:
        print(json.dumps(results, ensure_ascii=False))
    else:
        print_tables(results)
    return int(bool(results["long_errors"] or results["silent"] or results["failed_parts"]))


def print_tables(results: Mapping[str, Any]) -> None:
    part_rows = [[name, part["ok"], part["seconds"]] for name, part in results["parts"].items()]
    print(markdown(["part", "ok", "seconds"], part_rows))
    columns = ["status", "lines", "told", "seconds"]
    mistake_rows = [
        [name, *map(mistake.get, columns)] for name, mistake in results["mistakes"].items()
    ]
    print(markdown(["mistake", *columns], mistake_rows))
    print(
        f"long_errors {results['long_errors']}, silent {results['silent']}, "
        f"failed parts {results['failed_parts']}"
    )


if __name__ == "__main__":
    sys.exit(main())
