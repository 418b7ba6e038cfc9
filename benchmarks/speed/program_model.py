"""A program beside the native loop on a real model, for `program.py --model`: how much longer a
training step takes.

The environment of both asks nothing of the model's text, so that the episodes are alike whatever it
writes: two turns of at most 24 tokens, and a fixed observation between them. The program is a
script around the `openai` client. Both train a LoRA adapter in float32, 16 rollouts a step
(`--quick`: 8), with the same seeds, in turns.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from peft import LoraConfig

from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.programs import Program
from agentic_prompting.rollout import Rollout, Turn
from agentic_prompting.sandbox.library import town_facts
from benchmarks.lab import log
from benchmarks.learning.agent_programs import native_seeds, shared
from benchmarks.speed.step_times import StepTimes

OBSERVATION = "The expert does not know. Write one word."
TURN_TOKENS = 24
SEED = 5


@dataclass(frozen=True)
class AnyText:
    """Turns that all ask, whatever they say."""

    stops: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        return Turn(text, "act", True, request=text)

    def escape(self, text: str) -> str:
        return text


class FixedReply:
    """An environment with one observation for all."""

    grammar = AnyText()
    prompt_template = "{question}"

    def step(self, rollout: Rollout) -> str:
        return OBSERVATION


async def two_calls(row: Mapping[str, Any], base_url: str, api_key: str) -> str:
    """The same two turns, as a script of its own."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared())
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    first = await client.chat.completions.create(model="agent", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": OBSERVATION}]
    last = await client.chat.completions.create(model="agent", messages=messages)
    return last.choices[0].message.content or "nothing"


def train(
    model: str, folder: Path, environment: Any, rollouts: int, steps: int
) -> tuple[StepTimes, dict[Any, Any]]:
    """Train for some steps: their seconds after the first one, and each rollout's tokens by step
    and seed.
    """
    times = StepTimes()
    tokens: dict[Any, Any] = {}

    def reward(rollout: Any, **columns: Any) -> list[float]:
        for episode in rollout:
            tokens[len(times.wall), episode.seed] = (
                episode.prompt_ids,
                episode.ids,
                episode.mask,
            )
        # Any two rollouts differ, so that each step has a gradient.
        return [sum(episode.ids) % 7 / 7 + len(episode.ids) / 100 for episode in rollout]

    args = MultiTurnGRPOConfig(
        str(folder),
        seed=SEED,
        max_steps=steps + 1,
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=rollouts // 8,
        max_turns=2,
        max_turn_tokens=TURN_TOKENS,
        max_completion_length=128,
        learning_rate=1e-5,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        rollouts_max_mb=0,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = [{"question": fact.question} for fact in town_facts(SEED, 24)]
    trainer = MultiTurnGRPOTrainer(
        model, reward, args, rows, environment=environment, peft_config=lora
    )
    trainer.add_callback(times)
    trainer.train()
    return times.after_first(), tokens


def measure_model(model: str, folder: Path, is_quick: bool) -> dict[str, Any]:
    """The ratio of the program's step to the native loop's, in wall and processor seconds."""
    rollouts = 8 if is_quick else 16
    rounds = 1 if is_quick else 2
    steps = 1 if is_quick else 3
    times: dict[str, list[StepTimes]] = {"native": [], "program": []}
    tokens: dict[str, dict[Any, Any]] = {}
    for number in range(rounds):
        run_folders = {name: folder / f"{name}-{number}" for name in times}
        for name, run_folder in run_folders.items():
            environment: Any = FixedReply() if name == "native" else Program(two_calls)
            with native_seeds():
                step_times, tokens[name] = train(model, run_folder, environment, rollouts, steps)
            times[name].append(step_times)
            if isinstance(environment, Program):
                environment.close()
            log(f"{name}: steps of {', '.join(f'{seconds:.1f} s' for seconds in step_times.wall)}")
            gc.collect()

    # The medians over the steps of all rounds.
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, runs in times.items():
        wall[name] = statistics.median(chain.from_iterable(run.wall for run in runs))
        cpu[name] = statistics.median(chain.from_iterable(run.cpu for run in runs))

    native_tokens = tokens["native"]
    same = [tokens["program"].get(key) == ids for key, ids in native_tokens.items()]
    return {
        "wall_ratio": round(wall["program"] / wall["native"], 3),
        "cpu_ratio": round(cpu["program"] / cpu["native"], 3),
        "same_rollouts": sum(same) / len(same),
        "rollouts": len(native_tokens),
        "step_s": {name: round(seconds, 2) for name, seconds in wall.items()},
    }
