"""Rollouts with turns of very different length against slow replies: four loops and the limit, side
by side in one run.

    python -m benchmarks.speed.rollout --json  # about 9 minutes: every time divided by eight
    python -m benchmarks.speed.rollout --json --quick  # under 3 minutes: 64 rollouts, times divided by 16

The same questions, numbers of interactions, reply latencies and turn lengths for all:

- *ours*: [`play_all`] over an [`Engine`], which turns join and leave between two tokens;
- *lock-step*: sample all to the end, ask all, wait for all, as a loop over turns does;
- *TRL's asynchronous loop*: `_AsyncRolloutLoop` of TRL 1.16, its own code for a conversation, over
  the same engine;
- *TRL's tool loop*: `GRPOTrainer._generate` with an asynchronous tool, in the first setting only:
  it takes long.

Tokens are not computed but waited for: a decoding step lasts 12 ms and 0.03 ms for each row at
work, so that nothing but waiting is measured, and what each loop adds. Turns have a log-normal
number of tokens, replies a log-normal latency. All times are scaled down alike, so what a loop
itself costs counts for more here than on a cluster.

The limit no loop can beat is the longest chain of one rollout alone: its turns and its replies. The
last line of `--json` holds `worst_to_limit` and `median_lockstep_over_ours` over the grid,
`async_loop_over_ours` (its median) and `trl_over_ours`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentic_prompting.llm import gather
from agentic_prompting.rollout import (
    ChatFormat,
    Engine,
    Limits,
    Observation,
    PendingRequest,
    Rollout,
    Sample,
    SampleRequest,
    TagGrammar,
    play_all,
    run_with_engine,
)

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

MAX_INTERACTIONS = 3
# Seconds of one decoding step, and of each row in it.
STEP = 12e-3
STEP_PER_ROW = 3e-5
TURNS = {"60, sigma 0.4": (60, 0.4), "150, sigma 0.6": (150, 0.6), "400, sigma 0.8": (400, 0.8)}
REPLIES = {"0.5 s": 0.5, "2 s": 2.0, "5 s": 5.0}  # sigma 0.6 each


@dataclass(frozen=True)
class Workload:
    """What every loop is given.

    Args:
        latencies (`list[list[float]]`): Per rollout, the seconds of each of its replies.
        lengths (`list[list[int]]`): Per rollout, the tokens of each of its turns, one more than
            replies.
        scale (`float`): What all times are multiplied by.
    """

    latencies: list[list[float]]
    lengths: list[list[int]]
    scale: float

    @classmethod
    def draw(
        cls, n: int, tokens: float, sigma: float, reply: float, scale: float, seed: int
    ) -> Workload:
        """2 or 3 interactions each, as the sandbox's questions of two and three hops take."""
        rng = random.Random(f"{seed} {n} {tokens} {reply}")

        def draw_latency() -> float:
            return reply * rng.lognormvariate(0.0, 0.6)

        def draw_length() -> int:
            return max(1, int(tokens * rng.lognormvariate(0.0, sigma)))

        counts = [rng.randint(2, MAX_INTERACTIONS) for _ in range(n)]
        latencies = []
        for count in counts:
            latencies.append([draw_latency() for _ in range(count)])
        lengths = []
        for count in counts:
            lengths.append([draw_length() for _ in range(count + 1)])
        return cls(latencies, lengths, scale)

    @property
    def limit(self) -> float:
        """The longest chain of one rollout, alone."""
        rollouts = zip(self.latencies, self.lengths, strict=True)
        return self.scale * max(
            sum(replies) + sum(turns) * (STEP + STEP_PER_ROW) for replies, turns in rollouts
        )

    def asks(self, rollout: int, turn: int) -> bool:
        return turn < len(self.latencies[rollout])

    async def reply(self, rollout: int, turn: int) -> str:
        await asyncio.sleep(self.scale * self.latencies[rollout][turn])
        return "noted"


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and Qwen3's own chat template, which TRL's tool loop knows how to parse."""
    import trl

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {byte: number for number, byte in enumerate(sorted(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    fast.chat_template = template.read_text(encoding="utf-8")
    return fast


@dataclass(frozen=True)
class SampledTurn:
    """A turn at work: its request, the tokens it will have, and the step at which it ends."""

    job: PendingRequest[SampleRequest, Sample]
    ids: list[int]
    end: int


class Clock(Engine[SampleRequest, Sample]):
    """An engine whose tokens are waited for.

    Which turn of which rollout a context is in is read off its text.
    """

    def __init__(self, workload: Workload, write: Callable[[list[int]], tuple[list[int], int]]):
        super().__init__(on_callers_thread=True)
        self.workload = workload
        self.write = write
        self.rows: list[SampledTurn] = []
        self.steps = 0
        self.due = 0.0

    @property
    def active_count(self) -> int:
        return len(self.rows)

    def drop(self) -> list[PendingRequest[SampleRequest, Sample]]:
        rows = self.rows
        self.rows = []
        return [row.job for row in rows]

    def step(self, arrived: list[PendingRequest[SampleRequest, Sample]]) -> None:
        now = time.perf_counter()
        if not self.rows:
            self.due = now  # nothing was at work
        for job in arrived:
            ids, length = self.write(job.request.context)
            self.rows.append(SampledTurn(job, ids, self.steps + length))
        self.steps += 1
        self.due += self.workload.scale * (STEP + STEP_PER_ROW * len(self.rows))
        time.sleep(max(0.0, self.due - time.perf_counter()))
        finished = [(row.job, Sample(row.ids)) for row in self.rows if row.end <= self.steps]
        self.rows = [row for row in self.rows if row.end > self.steps]
        self.finish(finished)


def numbers(text: str, reply_mark: str) -> tuple[int, int]:
    """Which rollout, and which of its turns: each reply in the text has the mark."""
    rollout = re.search(r"rollout (\d+)", text)
    assert rollout is not None
    return int(rollout[1]), text.count(reply_mark)


def prompts_of(workload: Workload) -> list[list[dict[str, str]]]:
    """The conversations that its rollouts begin with."""
    numbers = range(len(workload.latencies))
    return [[{"role": "user", "content": f"rollout {number}"}] for number in numbers]


def check(interactions: list[int], workload: Workload) -> None:
    """Every loop must have done the same work."""
    expected = [len(latencies) for latencies in workload.latencies]
    if interactions != expected:
        raise AssertionError(
            f"a loop played {sum(interactions)} interactions, the workload has {sum(expected)}"
        )


# --- our loop, and the same turns in lock-step ----------------------------------------------------


class Tags:
    """Turns in our tags, and the environment that answers them."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.format = ChatFormat(byte_tokenizer(), TagGrammar())
        self.asking = self.format.turn_ids(
            "<think> go on </think>\n<interaction_prompt> more </interaction_prompt>"
        )
        self.answering = self.format.turn_ids("<think> done </think>\n<answer> noted </answer>")
        self.rollouts = []
        for number, prompt in enumerate(prompts_of(workload)):
            prompt_ids = self.format.prompt_ids(prompt)
            self.rollouts.append(Rollout(prompt_ids, row={"number": number}, seed=number))

    def write(self, context: list[int]) -> tuple[list[int], int]:
        rollout, turn = numbers(byte_tokenizer().decode(context), "<interaction_response>")
        ids = self.asking if self.workload.asks(rollout, turn) else self.answering
        return ids, self.workload.lengths[rollout][turn]

    async def step(self, rollout: Rollout) -> Observation:
        return Observation(await self.workload.reply(rollout.row["number"], len(rollout.turns) - 1))


def play_ours(workload: Workload) -> float:
    tags = Tags(workload)
    limits = Limits(max_turns=MAX_INTERACTIONS + 1)
    started = time.perf_counter()
    play_all(tags.rollouts, Clock(workload, tags.write), tags, tags.format, limits)
    seconds = time.perf_counter() - started
    check([len(rollout.turns) - 1 for rollout in tags.rollouts], workload)
    return seconds


def play_in_lockstep(workload: Workload) -> float:
    """Sample all, ask all, wait for all.

    A batch ends with its longest turn; who has ended costs nothing more.
    """
    tags = Tags(workload)
    running = tags.rollouts
    started = time.perf_counter()

    async def ask(rollouts: list[Rollout]) -> list[Observation]:
        return await asyncio.gather(*map(tags.step, rollouts))

    while running:
        turns = [tags.write(rollout.context) for rollout in running]
        lengths = [length for _, length in turns]
        seconds = max(lengths) * STEP + sum(lengths) * STEP_PER_ROW
        time.sleep(workload.scale * seconds)
        for rollout, (turn_ids, _) in zip(running, turns, strict=True):
            rollout.add_turn(Sample(turn_ids), tags.format.parse(turn_ids))
        running = [rollout for rollout in running if rollout.turns[-1].kind == "act"]
        observations = asyncio.run(ask(running))
        for rollout, observation in zip(running, observations, strict=True):
            ids = tags.format.observation_ids(observation.text, after=rollout.ids)
            rollout.add_observation(observation, ids)
    seconds = time.perf_counter() - started
    check([len(rollout.turns) - 1 for rollout in tags.rollouts], workload)
    return seconds


# --- TRL's two loops ------------------------------------------------------------------------------


class ToolCalls:
    """Turns as tool calls, and the tool that answers them."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.asked = [0] * len(workload.latencies)

    def write(self, context: list[int]) -> tuple[list[int], int]:
        tokenizer = byte_tokenizer()
        rollout, turn = numbers(tokenizer.decode(context), "noted")
        text = "all is said"
        if self.workload.asks(rollout, turn):
            call = {"name": "ask", "arguments": {"rollout": rollout, "turn": turn}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        return ids, self.workload.lengths[rollout][turn]

    def tool(self) -> Callable[..., Any]:
        async def ask(rollout: int, turn: int) -> str:
            """Ask the large model.

            Args:
                rollout: Which rollout asks.
                turn: Which of its turns this is.
            """
            self.asked[rollout] += 1
            return await self.workload.reply(rollout, turn)

        return ask


def make_trl_loop(
    loop_class: type[_AsyncRolloutLoop], tool: Callable[..., Any], **options: Any
) -> _AsyncRolloutLoop:
    """An `_AsyncRolloutLoop` of which only `_generate_one` is called."""
    from datasets import Dataset

    spawn = multiprocessing.get_context("spawn")
    finished = spawn.Queue()
    raised = spawn.Queue(1)
    metrics = spawn.Queue()
    # Nothing reads them, and the process must not wait at its end for a reader.
    for queue in (finished, raised, metrics):
        queue.cancel_join_thread()
    return loop_class(
        model_name="policy",
        dataset=Dataset.from_list([{"prompt": []}]),
        reward_funcs=[lambda **columns: [0.0]],
        processing_class=byte_tokenizer(),
        eos_token_ids=[byte_tokenizer().eos_token_id],
        rollout_buffer=finished,
        model_version_value=spawn.Value("i", 0),
        heartbeat_value=spawn.Value("d", 0.0),
        failed_event=spawn.Event(),
        exception_info_queue=raised,
        metrics_queue=metrics,
        tools=[tool],
        max_inflight_tasks=1024,
        max_tool_calling_iterations=MAX_INTERACTIONS,
        **options,
    )


def play_trl_async(workload: Workload) -> float:
    """`_AsyncRolloutLoop`: a conversation is its `_generate_one`; only the request to the server is
    the engine's.
    """
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    calls = ToolCalls(workload)
    engine = Clock(workload, calls.write)
    tool = calls.tool()

    class Loop(_AsyncRolloutLoop):
        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            sample = await engine(SampleRequest(prompt_ids, 10**6, 0))
            return sample.ids, [0.0] * len(sample.ids)

    loop = make_trl_loop(Loop, tool)
    prompts = prompts_of(workload)
    started = time.perf_counter()
    episodes = (loop._generate_one(prompt, {"ask": tool}, [tool]) for prompt in prompts)
    run_with_engine(engine, gather(episodes))
    seconds = time.perf_counter() - started
    check(calls.asked, workload)
    return seconds


def play_trl(workload: Workload) -> float:
    """`GRPOTrainer._generate` of TRL with an asynchronous tool."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    calls = ToolCalls(workload)
    tokenizer = byte_tokenizer()
    tool = calls.tool()

    def sample(
        contexts: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        turns = [calls.write(context) for context in contexts]
        lengths = [length for _, length in turns]
        time.sleep(workload.scale * (max(lengths) * STEP + sum(lengths) * STEP_PER_ROW))
        return [ids for ids, _ in turns], None

    # A model that is never computed with, and a trainer around it.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config)
    training_rows = [{"prompt": prompts_of(workload)[0]}] * 8
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=GRPOConfig(
                folder,
                use_cpu=True,
                bf16=False,
                report_to="none",
                max_completion_length=8192,
                per_device_train_batch_size=8,
                max_tool_calling_iterations=MAX_INTERACTIONS,
            ),
            train_dataset=Dataset.from_list(training_rows),
            tools=[tool],
        )

        # What `train` would prepare.
        trainer._generate_single_turn = sample
        prompts = prompts_of(workload)
        trainer._sync_tool_dicts = [{} for _ in prompts]
        trainer._async_tool_dicts = [{"ask": tool} for _ in prompts]
        started = time.perf_counter()
        trainer._generate(prompts)
        seconds = time.perf_counter() - started
    check(calls.asked, workload)
    return seconds


# --- the comparison -------------------------------------------------------------------------------


def measure(
    n: int, turns: str, replies: str, scale: float, seed: int, with_trl: bool
) -> dict[str, Any]:
    tokens, sigma = TURNS[turns]
    workload = Workload.draw(n, tokens, sigma, REPLIES[replies], scale, seed)
    row = {
        "n": n,
        "tokens": turns,
        "replies": replies,
        "limit_s": workload.limit,
        "ours_s": play_ours(workload),
        "lockstep_s": play_in_lockstep(workload),
        "async_loop_s": play_trl_async(workload),
        "trl_s": play_trl(workload) if with_trl else None,
    }
    ours = row["ours_s"]
    row |= {
        "to_limit": ours / workload.limit,
        "lockstep_over_ours": row["lockstep_s"] / ours,
        "async_loop_over_ours": row["async_loop_s"] / ours,
    }
    for name, value in row.items():
        if isinstance(value, float):
            row[name] = round(value, 3)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    titles = (
        "rollouts",
        "tokens a turn",
        "replies",
        "limit",
        "ours",
        "lock-step",
        "TRL's async loop",
        "TRL's tool loop",
        "ours / limit",
        "lock-step / ours",
        "async loop / ours",
    )
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    seconds = ("limit_s", "ours_s", "lockstep_s", "async_loop_s", "trl_s")
    ratios = ("to_limit", "lockstep_over_ours", "async_loop_over_ours")
    for row in rows:
        cells = [str(row[name]) for name in ("n", "tokens", "replies")]
        cells += ["" if row[name] is None else f"{row[name]:.2f} s" for name in seconds]
        cells += [f"{row[name]:.2f}" for name in ratios]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 rollouts only, every time divided by sixteen"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of interactions, lengths and latencies"
    )
    arguments = parser.parse_args()
    scale = 1 / 16 if arguments.quick else 1 / 8
    rollout_counts = (64,) if arguments.quick else (64, 256)
    cells = list(product(rollout_counts, TURNS, REPLIES))
    # A first run of each imports and starts threads.
    for play in (play_ours, play_trl_async):
        play(Workload.draw(8, 20, 0.4, 0.1, scale, 0))
    rows = [measure(*cell, scale, arguments.seed, with_trl=cell is cells[0]) for cell in cells]
    print(table(rows))
    if arguments.json:
        lockstep_over_ours = statistics.median(row["lockstep_over_ours"] for row in rows)
        async_loop_over_ours = statistics.median(row["async_loop_over_ours"] for row in rows)
        result = {
            "worst_to_limit": max(row["to_limit"] for row in rows),
            "median_lockstep_over_ours": round(lockstep_over_ours, 2),
            "async_loop_over_ours": round(async_loop_over_ours, 2),
            "trl_over_ours": round(rows[0]["trl_s"] / rows[0]["ours_s"], 1),
            "scale": scale,
        }
        print(json.dumps(result | {"settings": rows}))


if __name__ == "__main__":
    main()
