"""Programs beside the native loop: the same gradient, the same tokens, and what a call costs.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --json  # some ten minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --json --quick  # under two minutes
    python -m benchmarks.speed.program --only gateway --only fork  # some parts
    OMP_NUM_THREADS=1 python -m benchmarks.speed.program --model smollm2 --json  # a real model (`program_model.py`)

- *split*: rollouts in 1 to 3 token sequences against the same rollouts in one, by the native path:
  the largest difference of the gradient, relative to its largest component, over loss types, the KL
  term, accumulation, and two processes under DDP, ZeRO-3 and FSDP2. `--quick` leaves most of them
  out.
- *training*: the sandbox's policy trained by `LLMEnvironment` and by the script that does the same
  (`agent_programs.py`), with the same seeds, in turns. `same_rollouts` is the share with the same
  tokens; `wall_ratio` is of whole steps. The program runs in the trainer's process, or
  (`workers_...`) in one of its own, with `workers=1`; `cpu_ratio` is of the trainer's process
  alone.
- *gateway*: calls a second of one core, the policy being free; the client is another process.
  `long_ms` is a call that goes on from a history of 80,000 characters, `short_ms` from one of 800;
  `first_ms` is one that brings 80,000 new characters (most of it is the tokenizer's).
- *chat*: `OpenAIChat`'s milliseconds of processor time a call, and the wall time of 1,024 calls at
  once that take five seconds each, over five seconds (`in_flight_ratio`; not with `--quick`).
- *fork*: tokens of all sequences over those of one uninterrupted sequence, for a policy that writes
  its calls of tools otherwise than its template does and a framework that writes them anew.
  `prefix_rule_ratio` is what the usual rule makes of the same calls: a request whose ids do not
  begin with the ids before it begins a sequence.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

from agentic_prompting import LLMEnvironment, MultiTurnGRPOConfig, MultiTurnGRPOTrainer, OpenAIChat  # noqa: E402
from agentic_prompting.llm import run  # noqa: E402
from agentic_prompting.programs import Program  # noqa: E402
from agentic_prompting.rewards import exact_match_reward  # noqa: E402
from agentic_prompting.rollout import Limits, Rollout, Sample, SampleRequest  # noqa: E402
from agentic_prompting.sandbox import Oracle  # noqa: E402
from agentic_prompting.sandbox.setup import SandboxRun, prepare_sandbox  # noqa: E402
from benchmarks.lab import DEMO, log, model_folder, quiet, settings, train  # noqa: E402
from benchmarks.learning.agent_programs import asks, native_seeds  # noqa: E402
from benchmarks.speed import program_model  # noqa: E402
from benchmarks.speed.step_times import StepTimes  # noqa: E402
from support.crafted_rollouts import launched, split_errors  # noqa: E402
from support.policies import make_tiny_policy  # noqa: E402
from support.programs import ADD, byte_format, called, play_program  # noqa: E402

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageFunctionToolCall

PEERS = "benchmarks.speed.program_peers"
SEED = 42  # the sandbox's own, for which a warm start is in the package
WIDE = Limits(max_turns=5, max_turn_tokens=400, max_tokens=400_000, max_context=400_000)


# --- the gradient ---------------------------------------------------------------------------------


def measure_split(folder: Path, is_quick: bool) -> dict[str, Any]:
    policy = make_tiny_policy(folder / "tiny")
    losses: tuple[str, ...] = ("grpo", "dapo", "dr_grpo", "cispo")
    part_counts: tuple[int, ...] = (1, 4)
    launched_losses = losses
    backends: tuple[str, ...] = ("ddp", "zero3", "fsdp2")
    if is_quick:
        losses = ("grpo", "dapo")
        part_counts = (4,)
        launched_losses = ("grpo",)
        backends = ("ddp",)

    # One process.
    split_errors_of: dict[str, float] = {}
    cases = product(losses, (0.0, 0.05), part_counts)
    for number, (loss, beta, part_count) in enumerate(cases):
        errors = split_errors(policy, folder / f"split-{number}", loss, part_count, beta)
        case = f"{loss}, beta {beta}, {part_count} parts"
        split_errors_of[case] = max(errors["whole"], errors["split"])

    # Two processes.
    for backend, loss in product(backends, launched_losses):
        run_folder = folder / f"{backend}-{loss}"
        run_folder.mkdir()
        error, *_ = launched(policy, run_folder, loss, backend)
        split_errors_of[f"{loss}, two processes, {backend}"] = error
    return {"split_error": max(split_errors_of.values()), "split_errors": split_errors_of}


# --- the same training, by the native loop and by a program ---------------------------------------


# The prompt, the response and its mask, by step and by the rollout's seed.
TokensOfRollouts = dict[tuple[int, int], tuple[list[int], list[int], list[int]]]


def train_steps(
    folder: Path, sandbox: SandboxRun, environment: Any, steps: int
) -> tuple[StepTimes, TokensOfRollouts]:
    """Train for some steps: the seconds of those after the first, and each rollout's tokens."""
    step_times = StepTimes()
    tokens: TokensOfRollouts = {}

    def reward(rollout: list[Rollout], **columns: Any) -> list[float | None]:
        for episode in rollout:
            step = len(step_times.wall)
            tokens[step, episode.seed] = (episode.prompt_ids, episode.ids, episode.mask)
        return exact_match_reward(rollout=rollout, **columns)

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
        lambda trainer: trainer.add_callback(step_times),
        reward_funcs=reward,
    )
    return step_times.after_first(), tokens


def measure_training(folder: Path, is_quick: bool) -> dict[str, Any]:
    quiet()
    rounds = 1 if is_quick else 3
    steps = 2 if is_quick else 4
    sandbox = prepare_sandbox(folder, SEED)
    oracle = Oracle(seed=SEED)
    factories: dict[str, Callable[[], Any]] = {
        "native": lambda: LLMEnvironment(oracle),
        "program": lambda: Program(asks, llms={"oracle": oracle}),
        "workers": lambda: Program(asks, llms={"oracle": oracle}, workers=1),
    }

    # Train by each, in turns. The tokens are those of the last round.
    times: dict[str, list[StepTimes]] = {name: [] for name in factories}
    tokens: dict[str, TokensOfRollouts] = {}
    for number, (name, make_environment) in product(range(rounds), factories.items()):
        environment = make_environment()
        with native_seeds():
            run_folder = folder / f"{name}-{number}"
            step_times, tokens[name] = train_steps(run_folder, sandbox, environment, steps)
        times[name].append(step_times)
        if isinstance(environment, Program):
            environment.close()

    # The medians over the steps of all rounds.
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, runs in times.items():
        wall[name] = statistics.median(chain.from_iterable(run.wall for run in runs))
        cpu[name] = statistics.median(chain.from_iterable(run.cpu for run in runs))

    native_tokens = tokens.pop("native")
    same: list[bool] = []
    for program_tokens in tokens.values():
        same += [program_tokens.get(key) == ids for key, ids in native_tokens.items()]
    return {
        "same_rollouts": sum(same) / len(same),
        "rollouts": len(native_tokens),
        "wall_ratio": round(wall["program"] / wall["native"], 3),
        "cpu_ratio": round(cpu["program"] / cpu["native"], 3),
        "workers_wall_ratio": round(wall["workers"] / wall["native"], 3),
        "workers_cpu_ratio": round(cpu["workers"] / cpu["native"], 3),
        "step_s": {name: round(seconds, 3) for name, seconds in wall.items()},
    }


# --- a call ---------------------------------------------------------------------------------------


def cost_of_calls(calls: int, turns: int, characters: int) -> float:
    """Seconds of this process for a call at the gateway, with a policy that costs nothing."""
    form = byte_format()
    ids = [*form.tokenizer("the town has 20 people .")["input_ids"], form.tokenizer.eos_token_id]
    seconds_per_call = 0.0

    async def policy(request: SampleRequest) -> Sample:
        return Sample(ids, [-0.5] * len(ids))

    def agent(row: Mapping[str, Any], base_url: str, api_key: str) -> str:
        nonlocal seconds_per_call
        client = [sys.executable, "-m", PEERS, "client", base_url]
        # The first conversations find out how the template writes; the second run counts.
        for call_count in (turns, calls):
            command = [*client, str(call_count), str(turns), str(characters)]
            before = time.process_time()
            finished = subprocess.run(command, capture_output=True, text=True, check=True)
            made_calls = json.loads(finished.stdout)["calls"]
            seconds_per_call = (time.process_time() - before) / made_calls
        return "done"

    program = Program(agent, max_calls=10**7, max_sequences=10**7)
    rollout = Rollout([1], row={"question": "q"})
    run(program.play_episode(rollout, policy, form, WIDE))
    program.close()
    assert rollout.status == "answered", rollout.error
    return seconds_per_call


def cost_of_conversation(turns: int, characters: int) -> float:
    """Seconds of this process for all calls of a conversation with so many turns."""
    return turns * cost_of_calls(16 * turns, turns, characters)


def measure_gateway(folder: Path, is_quick: bool) -> dict[str, Any]:
    calls = 1600 if is_quick else 4800
    costs = [cost_of_calls(calls, turns, 400) for turns in (1, 5)]

    # Conversations of 10 and of 40 turns have as many first calls: in the difference they cancel.
    ten_turns_long = cost_of_conversation(10, 80_000)
    ten_turns_short = cost_of_conversation(10, 800)
    forty_turns_long = cost_of_conversation(40, 80_000)
    forty_turns_short = cost_of_conversation(40, 800)
    long_call = (forty_turns_long - ten_turns_long) / 30
    short_call = (forty_turns_short - ten_turns_short) / 30
    return {
        "calls_per_second": round(1 / max(costs)),
        "first_ms": round(1e3 * (ten_turns_long - 9 * long_call), 3),
        "long_ms": round(1e3 * long_call, 3),
        "short_ms": round(1e3 * short_call, 3),
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


async def call_at_once(chat: OpenAIChat, calls: int) -> None:
    """Make so many calls at once, none of which may fail."""
    messages = [[{"role": "user", "content": f"number {number} ?"}] for number in range(calls)]
    replies = await asyncio.gather(*map(chat, messages))
    errors = [reply.error for reply in replies if reply.error is not None]
    assert not errors, errors[0]


def measure_chat(folder: Path, is_quick: bool) -> dict[str, Any]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = min(hard, 8192) if hard > 0 else 8192
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    # Processor time of a call.
    calls = 500 if is_quick else 2000
    with serving(0.0) as url, OpenAIChat("m", url, api_key="k", price=(1, 1)) as chat:
        run(call_at_once(chat, 100))
        before = time.process_time()
        run(call_at_once(chat, calls))
        figures = {"chat_ms": round(1e3 * (time.process_time() - before) / calls, 3)}
    if is_quick:
        return figures

    # Wall time of many slow calls.
    delay = 5.0
    with (
        serving(delay) as url,
        OpenAIChat("m", url, api_key="k", price=(1, 1), max_concurrency=1024) as chat,
    ):
        before = time.perf_counter()
        run(call_at_once(chat, 1024))
        figures["in_flight_ratio"] = round((time.perf_counter() - before) / delay, 3)
    return figures


# --- forks ----------------------------------------------------------------------------------------


def measure_fork(folder: Path, is_quick: bool) -> dict[str, Any]:
    turns = 8
    form = byte_format()
    histories: list[list[dict[str, Any]]] = []

    async def agent(row: Mapping[str, Any], base_url: str, api_key: str) -> str:
        """Keeps its history as frameworks do: arguments are parsed and written again, thoughts are
        dropped.
        """
        from openai import AsyncOpenAI

        messages: list[Any] = [{"role": "user", "content": "add"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(turns):
                histories.append([dict(message) for message in messages])
                completion = await client.chat.completions.create(
                    model="agent",
                    messages=messages,
                    tools=[ADD],  # type: ignore[list-item]
                )
                message = completion.choices[0].message
                calls = [call for call in message.tool_calls or () if call.type == "function"]
                messages.append(
                    {
                        "role": "assistant",
                        "content": (message.content or "").strip(),
                        "tool_calls": [_write_again(call) for call in calls],
                    }
                )
                for call in calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        return "done"

    # Each turn has a thought, spaces and a form of the arguments that are lost when it is written
    # again.
    turn = "<think>\nhm \n</think>\n\n I add.\n\n" + called("add", '{"a":1,  "b":[1,2]}') + "  "
    turn_ids = [*form.tokenizer(turn)["input_ids"], form.tokenizer.eos_token_id]
    rollout, policy = play_program(agent, lambda text, request: turn, limits=WIDE)
    assert rollout.status == "answered" and len(policy.requests) == turns, rollout.error
    lengths = [len(sequence.prompt_ids) + len(sequence.ids) for sequence in rollout.sequences]
    uninterrupted = max(len(request.context) for request in policy.requests) + len(turn_ids)

    # The sequences that the usual rule makes of the same calls.
    prefix_rule_lengths: list[int] = []
    sequence_ids: list[int] = []
    for messages in histories:
        ids = form.tokenizer.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=[ADD],
            add_generation_prompt=True,
            return_dict=False,
        )
        if prefix_rule_lengths and ids[: len(sequence_ids)] == sequence_ids:
            prefix_rule_lengths.pop()
        sequence_ids = [*ids, *turn_ids]
        prefix_rule_lengths.append(len(sequence_ids))
    return {
        "fork_ratio": sum(lengths) / uninterrupted,
        "prefix_rule_ratio": round(sum(prefix_rule_lengths) / uninterrupted, 2),
    }


def _write_again(call: ChatCompletionMessageFunctionToolCall) -> dict[str, Any]:
    """A call of a tool as frameworks send it back: its arguments are parsed and written again."""
    arguments = json.dumps(json.loads(call.function.arguments))
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
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
    figures: dict[str, Any] = {}
    if arguments.model:
        quiet()
        model = model_folder(arguments.model)
        with tempfile.TemporaryDirectory() as folder:
            figures = program_model.measure_model(model, Path(folder), arguments.quick)
    else:
        for name in arguments.only or PARTS:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                part = PARTS[name](Path(folder), arguments.quick)
            figures |= part
            log(f"{name}, {time.perf_counter() - started:.0f} s: {part}")
    if arguments.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
