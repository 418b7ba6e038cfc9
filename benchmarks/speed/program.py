"""Programs beside the native loop: the same gradient, the same tokens, and what a call costs.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --json  # some ten minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --json --quick  # under two minutes
    python -m benchmarks.speed.program --only gateway --only fork  # some parts
    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --model smollm2 --json  # a real model (`program_model.py`)

- *split*: rollouts in 1 to 3 token sequences against the same rollouts in one, by the native path: the largest
  difference of the gradient, relative to its largest component, over loss types, the KL term, accumulation, and two
  processes under DDP, ZeRO-3 and FSDP2. `--quick` leaves most of them out.
- *training*: the sandbox's policy trained by `LLMEnvironment` and by the script that does the same
  (`agent_programs.py`), with the same seeds, in turns. `same_rollouts` is the share with the same tokens; `wall_ratio`
  is of whole steps. The program runs in the trainer's process, or (`workers_...`) in one of its own, with `workers=1`;
  `cpu_ratio` is of the trainer's process alone.
- *gateway*: calls a second of one core, the policy being free; the client is another process. `long_ms` is a call
  that goes on from a history of 80,000 characters, `short_ms` from one of 800; `first_ms` is one that brings 80,000 new
  characters (most of it is the tokenizer's).
- *chat*: `OpenAIChat`'s milliseconds of processor time a call, and the wall time of 1,024 calls at once that take five
  seconds each, over five seconds (`in_flight_ratio`; not with `--quick`).
- *fork*: tokens of all sequences over those of one uninterrupted sequence, for a policy that writes its calls of tools
  otherwise than its template does and a framework that writes them anew. `prefix_rule_ratio` is what the usual rule
  makes of the same calls: a request whose ids do not begin with the ids before it begins a sequence.

The last line of `--json` holds what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

from agentic_prompting import LLMEnvironment, MultiTurnGRPOConfig, MultiTurnGRPOTrainer, OpenAIChat  # noqa: E402
from agentic_prompting.llm import run  # noqa: E402
from agentic_prompting.programs import Program  # noqa: E402
from agentic_prompting.rewards import exact_match_reward  # noqa: E402
from agentic_prompting.rollout import Limits, Rollout, Sample  # noqa: E402
from agentic_prompting.sandbox import Oracle  # noqa: E402
from agentic_prompting.sandbox.setup import prepare_sandbox  # noqa: E402
from benchmarks.lab import DEMO, log, model_folder, quiet, settings, train  # noqa: E402
from benchmarks.learning.agent_programs import asks, native_seeds  # noqa: E402
from benchmarks.speed import program_model  # noqa: E402
from benchmarks.speed.step_times import StepTimes  # noqa: E402
from support.crafted_rollouts import launched, split_errors  # noqa: E402
from support.policies import make_tiny_policy  # noqa: E402
from support.programs import ADD, byte_format, called, play_program  # noqa: E402

PEERS = "benchmarks.speed.program_peers"
SEED = 42  # the sandbox's own, for which a warm start is in the package
WIDE = Limits(max_turns=5, max_turn_tokens=400, max_tokens=400_000, max_context=400_000)


# --- the gradient -----------------------------------------------------------------------------------------------------


def measure_split(folder: Path, is_quick: bool) -> dict[str, Any]:
    policy = make_tiny_policy(folder / "tiny")
    losses, parts = (
        (("grpo", "dapo"), (4,)) if is_quick else (("grpo", "dapo", "dr_grpo", "cispo"), (1, 4))
    )
    found = {}
    for number, (loss, beta, part) in enumerate(product(losses, (0.0, 0.05), parts)):
        errors = split_errors(policy, folder / f"split-{number}", loss, part, beta)
        found[f"{loss}, beta {beta}, {part} parts"] = max(errors["whole"], errors["split"])
    for backend, loss in product(
        ("ddp",) if is_quick else ("ddp", "zero3", "fsdp2"), ("grpo",) if is_quick else losses
    ):
        place = folder / f"{backend}-{loss}"
        place.mkdir()
        found[f"{loss}, two processes, {backend}"] = launched(policy, place, loss, backend)[0]
    return {"split_error": max(found.values()), "split_errors": found}


# --- the same training, by the native loop and by a program -----------------------------------------------------------


def trained(
    folder: Path, sandbox: Any, environment: Any, steps: int
) -> tuple[StepTimes, dict[Any, Any]]:
    """Train for some steps: the seconds of those after the first, and each rollout's tokens by step and seed."""
    seen: dict[Any, Any] = {}

    def reward(rollout: Any, **columns: Any) -> list[float | None]:
        seen.update(
            {
                (len(clock.wall), episode.seed): (episode.prompt_ids, episode.ids, episode.mask)
                for episode in rollout
            }
        )
        return exact_match_reward(rollout=rollout, **columns)

    clock = StepTimes()
    args = MultiTurnGRPOConfig(
        **settings(
            DEMO,
            output_dir=str(folder),
            seed=SEED,
            max_steps=steps + 1,
            per_device_train_batch_size=64,
        )
    )
    train(
        MultiTurnGRPOTrainer,
        args,
        sandbox,
        environment,
        lambda trainer: trainer.add_callback(clock),
        reward_funcs=reward,
    )
    return clock.after_first(), seen


def measure_training(folder: Path, is_quick: bool) -> dict[str, Any]:
    quiet()
    sandbox = prepare_sandbox(folder, SEED)
    oracle = Oracle(seed=SEED)
    makes: dict[str, Callable[[], Any]] = {
        "native": lambda: LLMEnvironment(oracle),
        "program": lambda: Program(asks, llms={"oracle": oracle}),
        "workers": lambda: Program(asks, llms={"oracle": oracle}, workers=1),
    }
    times: dict[str, list[StepTimes]] = {name: [] for name in makes}
    seen: dict[str, dict[Any, Any]] = {}
    for turn, (name, make) in product(range(1 if is_quick else 3), makes.items()):
        environment = make()
        with native_seeds():
            clock, seen[name] = trained(
                folder / f"{name}-{turn}", sandbox, environment, 2 if is_quick else 4
            )
        times[name].append(clock)
        if isinstance(environment, Program):
            environment.close()
    middle = {
        (name, kind): statistics.median(value for clock in clocks for value in getattr(clock, kind))
        for name, clocks in times.items()
        for kind in ("wall", "cpu")
    }

    def ratio(name: str, kind: str) -> float:
        return round(middle[name, kind] / middle["native", kind], 3)

    native = seen.pop("native")
    same = [seen[name].get(place) == tokens for name in seen for place, tokens in native.items()]
    return {
        "same_rollouts": sum(same) / len(same),
        "rollouts": len(native),
        "wall_ratio": ratio("program", "wall"),
        "cpu_ratio": ratio("program", "cpu"),
        "workers_wall_ratio": ratio("workers", "wall"),
        "workers_cpu_ratio": ratio("workers", "cpu"),
        "step_s": {name: round(middle[name, "wall"], 3) for name in times},
    }


# --- a call -----------------------------------------------------------------------------------------------------------


def cost_of_calls(calls: int, turns: int, characters: int) -> float:
    """Seconds of this process for a call at the gateway, with a policy that costs nothing."""
    form = byte_format()
    ids = [*form.tokenizer("the town has 20 people .")["input_ids"], form.tokenizer.eos_token_id]
    cost: list[float] = []

    async def policy(request: Any) -> Sample:
        return Sample(ids, [-0.5] * len(ids))

    def agent(row: Any, base_url: str, api_key: str) -> str:
        for asked in (turns, calls):  # the first conversations find out how the template writes
            before = time.process_time()
            command = [
                sys.executable,
                "-m",
                PEERS,
                "client",
                base_url,
                *map(str, (asked, turns, characters)),
            ]
            made = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            cost[:] = [(time.process_time() - before) / made["calls"]]
        return "done"

    program = Program(agent, max_calls=10**7, max_sequences=10**7)
    rollout = Rollout([1], row={"question": "q"})
    run(program.play_episode(rollout, policy, form, WIDE))
    program.close()
    assert rollout.status == "answered", rollout.error
    return cost[0]


def measure_gateway(folder: Path, is_quick: bool) -> dict[str, Any]:
    calls = 1600 if is_quick else 4800
    costs = [cost_of_calls(calls, turns, 400) for turns in (1, 5)]
    # As many first calls in both: they cancel.
    ten, forty = (
        {size: n * cost_of_calls(16 * n, n, size) for size in (80_000, 800)} for n in (10, 40)
    )
    long, short = ((forty[size] - ten[size]) / 30 for size in ten)
    return {
        "calls_per_second": round(1 / max(costs)),
        "first_ms": round(1e3 * (ten[80_000] - 9 * long), 3),
        "long_ms": round(1e3 * long, 3),
        "short_ms": round(1e3 * short, 3),
    }


@contextmanager
def serving(delay: float) -> Iterator[str]:
    """The address of a server in another process."""
    command = [sys.executable, "-m", PEERS, "server", str(delay)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.stdin.close()


async def asked(chat: Any, calls: int) -> None:
    replies = await asyncio.gather(
        *(chat([{"role": "user", "content": f"number {i} ?"}]) for i in range(calls))
    )
    assert all(reply.error is None for reply in replies), next(
        reply.error for reply in replies if reply.error
    )


def measure_chat(folder: Path, is_quick: bool) -> dict[str, Any]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    with serving(0.0) as url, OpenAIChat("m", url, api_key="k", price=(1, 1)) as chat:
        run(asked(chat, 100))
        calls = 500 if is_quick else 2000
        before = time.process_time()
        run(asked(chat, calls))
        found: dict[str, Any] = {"chat_ms": round(1e3 * (time.process_time() - before) / calls, 3)}
    if not is_quick:
        seconds = 5.0
        with (
            serving(seconds) as url,
            OpenAIChat("m", url, api_key="k", price=(1, 1), max_concurrency=1024) as chat,
        ):
            before = time.perf_counter()
            run(asked(chat, 1024))
            found["in_flight_ratio"] = round((time.perf_counter() - before) / seconds, 3)
    return found


# --- forks ------------------------------------------------------------------------------------------------------------


def measure_fork(folder: Path, is_quick: bool) -> dict[str, Any]:
    turns = 8
    form = byte_format()
    sent = list[Any]()

    async def agent(row: Any, base_url: str, api_key: str) -> str:
        """Keeps its history as frameworks do: arguments are parsed and written again, thoughts are dropped."""
        from openai import AsyncOpenAI

        messages: list[Any] = [{"role": "user", "content": "add"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(turns):
                sent.append([dict(message) for message in messages])
                completion = await client.chat.completions.create(
                    model="agent", messages=messages, tools=[ADD]
                )  # type: ignore[list-item]
                said = completion.choices[0].message
                functions = [
                    (call.id, call.function)
                    for call in said.tool_calls or ()
                    if call.type == "function"
                ]
                written = [
                    {
                        "id": id,
                        "type": "function",
                        "function": {
                            "name": one.name,
                            "arguments": json.dumps(json.loads(one.arguments)),
                        },
                    }
                    for id, one in functions
                ]
                messages.append(
                    {
                        "role": "assistant",
                        "content": (said.content or "").strip(),
                        "tool_calls": written,
                    }
                )
                messages += [
                    {"role": "tool", "tool_call_id": id, "content": "2"} for id, _ in functions
                ]
        return "done"

    turn = "<think>\nhm \n</think>\n\n I add.\n\n" + called("add", '{"a":1,  "b":[1,2]}') + "  "
    rollout, policy = play_program(agent, lambda text, request: turn, limits=WIDE)
    assert rollout.status == "answered" and len(policy.requests) == turns, rollout.error
    written = len(form.tokenizer(turn)["input_ids"]) + 1
    lengths = [len(sequence.prompt_ids) + len(sequence.ids) for sequence in rollout.sequences]
    by_prefix = list[int]()
    before = list[int]()
    ends = [*form.tokenizer(turn)["input_ids"], form.tokenizer.eos_token_id]
    for messages in sent:
        history = [_with_objects(message) for message in messages]
        ids = form.tokenizer.apply_chat_template(
            history, tools=[ADD], add_generation_prompt=True, return_dict=False
        )
        if by_prefix and ids[: len(before)] == before:
            by_prefix.pop()
        before = [*ids, *ends]
        by_prefix.append(len(before))
    whole = max(len(request.context) for request in policy.requests) + written
    return {
        "fork_ratio": sum(lengths) / whole,
        "prefix_rule_ratio": round(sum(by_prefix) / whole, 2),
    }


def _with_objects(message: Any) -> Any:
    """A message as templates take it: arguments are objects."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "fork": measure_fork,
    "gateway": measure_gateway,
    "chat": measure_chat,
    "training": measure_training,
    "split": measure_split,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="fewer calls, steps and cases")
    parser.add_argument("--only", action="append", choices=PARTS, help="these parts only")
    parser.add_argument(
        "--model", help="measure the training of a real model instead: smollm2, a folder, a name"
    )
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    names = arguments.only or list(PARTS)
    if arguments.model:
        names = []
        quiet()
        with tempfile.TemporaryDirectory() as folder:
            found = program_model.measure_model(
                model_folder(arguments.model), Path(folder), arguments.quick
            )
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            part = PARTS[name](Path(folder), arguments.quick)
        found |= part
        log(f"{name}, {time.perf_counter() - started:.0f} s: {part}")
    print(
        json.dumps(found)
        if arguments.json
        else "\n".join(f"{name}: {value}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
