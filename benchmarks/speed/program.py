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
from itertools import chain, product
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
    losses = ["grpo", "dapo", "dr_grpo", "cispo"]
    accumulations = [1, 4]
    backends = ["ddp", "zero3", "fsdp2"]
    losses_of_two_processes = losses
    if is_quick:
        losses = ["grpo", "dapo"]
        accumulations = [4]
        backends = ["ddp"]
        losses_of_two_processes = ["grpo"]

    errors = {}
    for number, (loss, beta, parts) in enumerate(product(losses, (0.0, 0.05), accumulations)):
        split = split_errors(policy, folder / f"split-{number}", loss, parts, beta)
        errors[f"{loss}, beta {beta}, {parts} parts"] = max(split["whole"], split["split"])
    for backend, loss in product(backends, losses_of_two_processes):
        run_folder = folder / f"{backend}-{loss}"
        run_folder.mkdir()
        errors[f"{loss}, two processes, {backend}"] = launched(policy, run_folder, loss, backend)[0]
    return {"split_error": max(errors.values()), "split_errors": errors}


# --- the same training, by the native loop and by a program -----------------------------------------------------------


def trained(
    folder: Path, sandbox: Any, environment: Any, steps: int
) -> tuple[StepTimes, dict[Any, Any]]:
    """Train for some steps: the seconds of those after the first, and each rollout's tokens by step and seed."""
    seen: dict[Any, Any] = {}

    def reward(rollout: Any, **columns: Any) -> list[float | None]:
        step = len(clock.wall)
        for episode in rollout:
            seen[step, episode.seed] = (episode.prompt_ids, episode.ids, episode.mask)
        return exact_match_reward(rollout=rollout, **columns)

    clock = StepTimes()
    options = settings(
        DEMO,
        output_dir=str(folder),
        seed=SEED,
        max_steps=steps + 1,
        per_device_train_batch_size=64,
    )
    train(
        MultiTurnGRPOTrainer,
        MultiTurnGRPOConfig(**options),
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
    rollouts: dict[str, dict[Any, Any]] = {}
    repeats, steps = (1, 2) if is_quick else (3, 4)
    for repeat, (name, make) in product(range(repeats), makes.items()):
        environment = make()
        with native_seeds():
            run_folder = folder / f"{name}-{repeat}"
            clock, rollouts[name] = trained(run_folder, sandbox, environment, steps)
        times[name].append(clock)
        if isinstance(environment, Program):
            environment.close()

    # Median seconds of a step, by name and clock.
    medians = {}
    for name, clocks in times.items():
        medians[name, "wall"] = statistics.median(chain.from_iterable(c.wall for c in clocks))
        medians[name, "cpu"] = statistics.median(chain.from_iterable(c.cpu for c in clocks))

    def ratio(name: str, clock: str) -> float:
        return round(medians[name, clock] / medians["native", clock], 3)

    # Rollouts with the same tokens as the native loop's, by step and seed.
    native = rollouts.pop("native")
    same = []
    for others in rollouts.values():
        same += [others.get(key) == tokens for key, tokens in native.items()]
    return {
        "same_rollouts": sum(same) / len(same),
        "rollouts": len(native),
        "wall_ratio": ratio("program", "wall"),
        "cpu_ratio": ratio("program", "cpu"),
        "workers_wall_ratio": ratio("workers", "wall"),
        "workers_cpu_ratio": ratio("workers", "cpu"),
        "step_s": {name: round(medians[name, "wall"], 3) for name in times},
    }


# --- a call -----------------------------------------------------------------------------------------------------------


def cost_of_calls(calls: int, turns: int, characters: int) -> float:
    """Seconds of this process for a call at the gateway, with a policy that costs nothing."""
    chat_format = byte_format()
    tokenizer = chat_format.tokenizer
    ids = [*tokenizer("the town has 20 people .")["input_ids"], tokenizer.eos_token_id]
    seconds_per_call = 0.0

    async def policy(request: Any) -> Sample:
        return Sample(ids, [-0.5] * len(ids))

    def agent(row: Any, base_url: str, api_key: str) -> str:
        nonlocal seconds_per_call
        # The first conversations find out how the template writes: the last ones count.
        for call_count in (turns, calls):
            before = time.process_time()
            client = [sys.executable, "-m", PEERS, "client", base_url]
            numbers = [str(call_count), str(turns), str(characters)]
            process = subprocess.run(
                [*client, *numbers], capture_output=True, text=True, check=True
            )
            made = json.loads(process.stdout)["calls"]
            seconds_per_call = (time.process_time() - before) / made
        return "done"

    program = Program(agent, max_calls=10**7, max_sequences=10**7)
    rollout = Rollout([1], row={"question": "q"})
    run(program.play_episode(rollout, policy, chat_format, WIDE))
    program.close()
    assert rollout.status == "answered", rollout.error
    return seconds_per_call


def cost_of_conversation(turns: int, characters: int) -> float:
    """Seconds of this process for a conversation of so many calls."""
    return turns * cost_of_calls(16 * turns, turns, characters)


def measure_gateway(folder: Path, is_quick: bool) -> dict[str, Any]:
    calls = 1600 if is_quick else 4800
    costs = [cost_of_calls(calls, turns, 400) for turns in (1, 5)]
    ten_long = cost_of_conversation(10, 80_000)
    ten_short = cost_of_conversation(10, 800)
    forty_long = cost_of_conversation(40, 80_000)
    forty_short = cost_of_conversation(40, 800)
    # As many first calls in both: they cancel.
    long = (forty_long - ten_long) / 30
    short = (forty_short - ten_short) / 30
    return {
        "calls_per_second": round(1 / max(costs)),
        "first_ms": round(1e3 * (ten_long - 9 * long), 3),
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


async def make_calls(chat: Any, calls: int) -> None:
    """Make so many calls at once; none may fail."""
    pending = [chat([{"role": "user", "content": f"number {i} ?"}]) for i in range(calls)]
    replies = await asyncio.gather(*pending)
    errors = [reply.error for reply in replies if reply.error is not None]
    assert not errors, errors[0]


def measure_chat(folder: Path, is_quick: bool) -> dict[str, Any]:
    # Enough open files for a thousand connections.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = min(hard_limit, 8192) if hard_limit > 0 else 8192
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    with serving(0.0) as url, OpenAIChat("m", url, api_key="k", price=(1, 1)) as chat:
        run(make_calls(chat, 100))
        calls = 500 if is_quick else 2000
        before = time.process_time()
        run(make_calls(chat, calls))
        seconds_per_call = (time.process_time() - before) / calls
    measured: dict[str, Any] = {"chat_ms": round(1e3 * seconds_per_call, 3)}
    if not is_quick:
        seconds = 5.0
        with (
            serving(seconds) as url,
            OpenAIChat("m", url, api_key="k", price=(1, 1), max_concurrency=1024) as chat,
        ):
            before = time.perf_counter()
            run(make_calls(chat, 1024))
            measured["in_flight_ratio"] = round((time.perf_counter() - before) / seconds, 3)
    return measured


# --- forks ------------------------------------------------------------------------------------------------------------


def measure_fork(folder: Path, is_quick: bool) -> dict[str, Any]:
    turns = 8
    chat_format = byte_format()
    tokenizer = chat_format.tokenizer
    requests: list[Any] = []

    async def agent(row: Any, base_url: str, api_key: str) -> str:
        """Keeps its history as frameworks do: arguments are parsed and written again, thoughts are dropped."""
        from openai import AsyncOpenAI

        messages: list[Any] = [{"role": "user", "content": "add"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(turns):
                requests.append([dict(message) for message in messages])
                completion = await client.chat.completions.create(
                    model="agent",
                    messages=messages,
                    tools=[ADD],  # type: ignore[list-item]
                )
                reply = completion.choices[0].message
                calls = [call for call in reply.tool_calls or () if call.type == "function"]
                messages.append(
                    {
                        "role": "assistant",
                        "content": (reply.content or "").strip(),
                        "tool_calls": [_written_anew(call) for call in calls],
                    }
                )
                for call in calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        return "done"

    turn = "<think>\nhm \n</think>\n\n I add.\n\n" + called("add", '{"a":1,  "b":[1,2]}') + "  "
    rollout, policy = play_program(agent, lambda text, request: turn, limits=WIDE)
    assert rollout.status == "answered" and len(policy.requests) == turns, rollout.error
    turn_ids = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
    lengths = [len(sequence.prompt_ids) + len(sequence.ids) for sequence in rollout.sequences]

    # The same requests by the usual rule: one that does not go on from the ids before it begins a sequence.
    lengths_by_prefix: list[int] = []
    ids_before: list[int] = []
    for messages in requests:
        history = [_with_objects(message) for message in messages]
        ids = tokenizer.apply_chat_template(
            history, tools=[ADD], add_generation_prompt=True, return_dict=False
        )
        if lengths_by_prefix and ids[: len(ids_before)] == ids_before:
            lengths_by_prefix.pop()
        ids_before = [*ids, *turn_ids]
        lengths_by_prefix.append(len(ids_before))

    uninterrupted = max(len(request.context) for request in policy.requests) + len(turn_ids)
    return {
        "fork_ratio": sum(lengths) / uninterrupted,
        "prefix_rule_ratio": round(sum(lengths_by_prefix) / uninterrupted, 2),
    }


def _written_anew(call: Any) -> dict[str, Any]:
    """A tool call as a framework keeps it: its arguments are parsed and written again."""
    arguments = json.dumps(json.loads(call.function.arguments))
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _with_objects(message: Any) -> Any:
    """A message as templates take it: arguments are objects."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
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
    measured: dict[str, Any] = {}
    names = arguments.only or list(PARTS)
    if arguments.model:
        names = []
        quiet()
        with tempfile.TemporaryDirectory() as folder:
            measured = program_model.measure_model(
                model_folder(arguments.model), Path(folder), arguments.quick
            )
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            part = PARTS[name](Path(folder), arguments.quick)
        measured |= part
        log(f"{name}, {time.perf_counter() - started:.0f} s: {part}")
    if arguments.json:
        print(json.dumps(measured))
    else:
        for name, value in measured.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
