"""A real model of 135 million parameters learns to use a calculator, by native tool calls.

    python -m benchmarks.real.calculator --json  # three seeds on two cores; goes on where it was stopped
    python -m benchmarks.real.calculator --json --tuning  # the seeds on which everything was chosen
    python -m benchmarks.real.calculator  # the table, from the records

Appends a record for each seed to `--records`; what is recorded is not run again.

Protocol, written before any run of the reported seeds.

1. Task. "What is 47 * 86 + 19?", "What is (47 + 86) * 19?", "What is 47 * 86 - 19?", numbers of two
   digits, drawn by the seed; 256 questions of which training has none. A tool,
   `calculate(expression)`, knows `+`, `-`, `*` and brackets.
2. Model. SmolLM2-135M-Instruct, out of a package. Its chat template shows no tools, so it gets one
   that does (`TEMPLATE`), in the form of Qwen and Hermes. It first imitates 64 uneven
   demonstrations (8 steps of 8): half guess without a call, a third leave a part of the expression
   out, about a sixth are right. Then 20 steps of `MultiTurnGRPOTrainer` with LoRA, 4 questions of 8
   rollouts each; the reward is exact match.
3. Compared, on the same questions: the published model with the same template, the model after its
   warm start, the trained one.
4. Seeds 991, 992 and 993; tuning seeds 1 to 3.
5. Expected on every seed: the trained model calls the tool in at least .9 of the rollouts, exact
   match is at least .8 and above the warm start with an interval above 0, and no rollout fails.
   Against us: any of these is missed. The figures are printed whatever they are.

Before it one tuning seed was run, seed 1, whose model learned: right answers rose from .047 to .668
in 12 steps. On the first reported seed, 991, the protocol was missed. No answer was right after the
warm start, so the reward was 0 in all 20 steps, and the model learned nothing. Seeds 992 and 993
were not run.

Second protocol, written after that and before any run of its seeds: the same, but the model first
imitates 96 demonstrations (12 steps of 8), of which .4 guess, .3 leave a part of the expression out
and .3 are right. Chosen by the share of right answers after the warm start alone, .16 and .17 on
tuning seeds 1 and 2; training was not tuned again. Seeds 994, 995 and 996. Expected: as above.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting.evaluation import paired_difference, wilson_interval
from agentic_prompting.rewards import exact_match_reward
from benchmarks.lab import log, markdown, quiet
from benchmarks.real.run_options import open_records, protocol_parser
from benchmarks.real.small_agent import by_question, imitate, load_published, train_adapter

SEEDS = (994, 995, 996)
TUNING_SEEDS = (1, 2, 3)
HELD_OUT = 256
TRAIN_ROWS = 512
DEMONSTRATIONS = 96
WARM_START_STEPS = 12
GUESSES = 0.4
"""The share of demonstrations without a call."""
PARTS = 0.3
"""The share of demonstrations that leave a part of the expression out. The others are right."""
STEPS = 20
KINDS = ("{a} * {b} + {c}", "({a} + {b}) * {c}", "{a} * {b} - {c}")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION = 60  # characters
TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
Call a function by writing
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>
{% for tool in tools %}
Function: {{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


# --- the task -------------------------------------------------------------------------------------


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Such as 12 * (3 + 4).
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"at most {MAX_EXPRESSION} characters")
    return str(_value_of(ast.parse(expression.strip(), mode="eval").body))


def _value_of(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value_of(node.left), _value_of(node.right))
    raise ValueError("only whole numbers, +, -, * and brackets")


def draw_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Different questions with their answers."""
    generator = random.Random(f"calculator {seed}")
    expressions: dict[str, None] = {}
    while len(expressions) < count:
        numbers = {name: generator.randint(11, 99) for name in "abc"}
        expressions[generator.choice(KINDS).format(**numbers)] = None
    return [
        {
            "question": f"What is {expression}?",
            "expression": expression,
            "answers": [calculate(expression)],
        }
        for expression in expressions
    ]


def call_text(expression: str) -> str:
    """A turn that calls the tool."""
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def demonstrate(row: Mapping[str, Any], generator: random.Random) -> dict[str, Any]:
    """One demonstration: a guess, a call for a part of the expression, or a right one."""
    draw = generator.random()
    if draw < GUESSES:
        guess = int(row["answers"][0]) + generator.randint(-500, 500)
        return {**row, "turns": [str(guess)], "observations": []}
    expression = row["expression"]
    if draw < GUESSES + PARTS:
        # Without its last operation.
        expression = expression.rpartition(" ")[0].rpartition(" ")[0].strip("()")
    value = calculate(expression)
    return {**row, "turns": [call_text(expression), value], "observations": [value]}


# --- a run ----------------------------------------------------------------------------------------


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """Warm-start a model, train it, and ask it the held-out questions before, between and after."""
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from agentic_prompting.interop import ToolEnvironment
    from agentic_prompting.rollout import AgentSpec, Limits

    started = time.monotonic()
    rows = draw_rows(seed, TRAIN_ROWS + HELD_OUT)
    train = rows[:TRAIN_ROWS]
    test = rows[TRAIN_ROWS:]
    environment = ToolEnvironment([calculate])
    spec = AgentSpec(
        "{question}",
        grammar=environment.grammar,
        limits=Limits(max_turns=2, max_turn_tokens=56, max_tokens=320),
        sampling={"temperature": 0.7},
        chat_template_kwargs=dict(environment.chat_template_kwargs),
    )

    # The published model, under a template that shows tools.
    model, tokenizer = load_published()
    tokenizer.chat_template = TEMPLATE
    published = folder / "published"
    model.save_pretrained(published)
    tokenizer.save_pretrained(published)

    generator = random.Random(f"demonstrations {seed}")
    traces = [demonstrate(row, generator) for row in train[:DEMONSTRATIONS]]
    warm = imitate(model, tokenizer, spec, traces, folder, seed, max_steps=WARM_START_STEPS)
    training = train_adapter(
        MultiTurnGRPOTrainer,
        MultiTurnGRPOConfig,
        warm,
        environment,
        exact_match_reward,
        train,
        spec,
        folder,
        seed,
        STEPS,
    )
    trained = folder / "trained"
    log(f"seed {seed}: rewards {training['rewards']}")

    stages = {}
    for stage, model_of_stage in (("before", published), ("warm", warm), ("after", trained)):
        stages[stage] = ask(model_of_stage, environment, spec, test, seed)
        log(f"seed {seed}, {stage}: {_shares(stages[stage])}")
    return {
        "seed": seed,
        "steps": STEPS,
        "seconds": round(time.monotonic() - started),
        "rewards": training["rewards"],
        "failed_in_training": training["failed"],
        **stages,
    }


def ask(model: Path, environment: Any, spec: Any, rows: Sequence[Any], seed: int) -> dict[str, str]:
    """Whether each held-out rollout called the tool, was right, and failed: a character a question."""
    import torch

    from agentic_prompting import PromptAgent

    agent = PromptAgent.from_pretrained(
        model, environment, spec, max_batch_size=64, dtype=torch.float32
    )
    rollouts = agent.answer_all(list(rows), seed=seed, progress=False)
    accepted = [rollout.row["answers"] for rollout in rollouts]
    scores = exact_match_reward([], [], rollouts, accepted)
    return {
        "called": "".join(str(int(bool(rollout.observations))) for rollout in rollouts),
        "right": "".join("-" if score is None else str(int(score)) for score in scores),
    }


# --- figures --------------------------------------------------------------------------------------


def _shares(stage: Mapping[str, str]) -> tuple[float, float]:
    scored = len(stage["right"]) - stage["right"].count("-")
    return stage["called"].count("1") / scored, stage["right"].count("1") / scored


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each seed: the three models, and what the rewards alone gained."""
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        stages = [record[stage] for stage in ("before", "warm", "after")]
        after = by_question(record["after"]["right"])
        gained = paired_difference(after, by_question(record["warm"]["right"])).difference
        right = record["after"]["right"]
        interval = wilson_interval(right.count("1"), len(right) - right.count("-"))
        failed = sum(stage["right"].count("-") for stage in stages) + record["failed_in_training"]
        cells = (
            " → ".join(f"{_shares(stage)[0]:.3f}" for stage in stages),
            " → ".join(f"{_shares(stage)[1]:.3f}" for stage in stages),
            f"[{interval.low:.3f}, {interval.high:.3f}]",
            f"{gained.mean:+.3f} [{gained.low:+.3f}, {gained.high:+.3f}]",
            str(failed),
            f"{record['seconds'] / 60:.1f}",
        )
        rows.append((str(record["seed"]), *cells))
    titles = ("seed", "called", "right", "95 % interval", "by rewards", "failed", "minutes")
    return markdown(titles, rows)


def main() -> None:
    parser = protocol_parser(
        __doc__, "runs/calculator", "calculator.jsonl.gz", tuning="seeds that are not reported"
    )
    parser.add_argument("--seeds", type=int, nargs="*", help="some of the seeds")
    options = parser.parse_args()
    records = open_records(options)
    if options.json:
        quiet()
        seeds = options.seeds or (TUNING_SEEDS if options.tuning else SEEDS)
        for (seed,) in records.missing(("seed",), [(seed,) for seed in seeds]):
            records.add(measure(seed, options.folder / str(seed)))
        print(json.dumps(records.read()))
    print(table(records.read()))


if __name__ == "__main__":
    main()
