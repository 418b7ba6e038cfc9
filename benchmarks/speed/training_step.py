"""The training step: the gain of leaving observations out of the head, and our trainer's cost
beside plain GRPO.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.training_step --json  # about 3 minutes on a CPU
    OMP_NUM_THREADS=1 python -m benchmarks.speed.training_step --json --quick  # under 50 s
    OMP_NUM_THREADS=1 python -m benchmarks.speed.training_step --model smollm2  # a real model on a CPU, about 6 minutes

The model has random weights and Qwen3-0.6B's ratio of head to body; the conversations are 70 %
observation.

- *head*: the loss and its gradients with observation tokens labelled as TRL labels them, and as we
  do, on the same batch in turns. TRL's head skips unlabelled positions only where Triton is
  installed, on a GPU. On a CPU that branch is forced here (its kernels fall back to torch), and the
  CPU's own branch is measured as well, where our loss gives the head the scored positions alone.
  Memory is the largest growth of a fresh process, on a GPU the peak that torch counts.
- *overhead*: medians of whole training steps of `MultiTurnGRPOTrainer`, whose sampler and
  environment answer at once, and of `trl.GRPOTrainer` with the same tokens from a `rollout_func`,
  in turns. The head's gain is left out.

`--model` takes `smollm2`, or the folder of another real model, and measures the loss and its
gradients on a CPU with the head at every position and at the scored ones alone, LoRA and all
weights, bfloat16 autocast and float32. Seconds are those of the processor, the least of three
alternating runs (`--quick`: one run of two conversations).

The last line of `--json` holds `head_ratio, head_ratio_cpu, memory_ratio, loss_difference,
gradient_difference, overhead, observed`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from agentic_prompting import LLMEnvironment, MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import BatchEngine, Sample, SampleRequest
from agentic_prompting.sandbox.policy import keep_freed_memory, world_tokenizer
from agentic_prompting.trainers import loss_inputs as loss_of_trainer
from agentic_prompting.trainers.loss_inputs import ScoredTokensModel, prepare_loss_inputs
from benchmarks.lab import model_folder
from benchmarks.speed.model_tables import updates_table

WORDS = ["country", "city", "capital", "airport", "currency", "language", "continent"]
REPLY = " ".join(["country"] * 92)
GROUP = 4


def build_model(tokenizer: Any, layers: int) -> Qwen3ForCausalLM:
    """Head to body as in Qwen3-0.6B, 156 M parameters to 440 M, the head tied; on a GPU its width,
    too.
    """
    width = 4 if torch.cuda.is_available() else 1
    config = Qwen3Config(
        vocab_size=1500 * width * layers,
        hidden_size=256 * width,
        intermediate_size=768 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32 * width,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def settings(folder: Path, steps: int) -> dict[str, Any]:
    """The settings of both trainers."""
    on_cpu = not torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP,
        "max_steps": steps,
        "max_completion_length": 1024,
        "learning_rate": 1e-6,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.0,
    }


def rows() -> Dataset:
    questions = [f"which country {number} ?" for number in range(8)]
    return Dataset.from_list(
        [{"question": question, "answers": ["Kenya"]} for question in questions]
    )


def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


class Script:
    """A sampler that asks three times and then answers, without delay.

    Each conversation has words of its own, because equal ones would cancel each other's gradients.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer):
        self.chat_format = trainer.chat_format
        self.opening = trainer.chat_format.tokenizer.convert_tokens_to_ids("<interaction_response>")

    def __call__(self, requests: list[SampleRequest]) -> list[Sample]:
        return [Sample(self.chat_format.turn_ids(self.turn(request))) for request in requests]

    def turn(self, request: SampleRequest) -> str:
        thought = " ".join(random.Random(request.seed).choices(WORDS, k=24))
        if request.context.count(self.opening) == 3:
            return f"<think> {thought} </think> <answer> Kenya </answer>"
        request_text = "<interaction_prompt> which country ? </interaction_prompt>"
        return f"<think> {thought} </think> {request_text}"


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def our_trainer(folder: Path, layers: int, steps: int = 2) -> MultiTurnGRPOTrainer:
    tokenizer = world_tokenizer()
    trainer = MultiTurnGRPOTrainer(
        model=build_model(tokenizer, layers),
        environment=LLMEnvironment(ScriptedChat(lambda *_: REPLY)),
        reward_funcs=reward,
        args=MultiTurnGRPOConfig(**settings(folder, steps), max_turns=4, max_turn_tokens=64),
        train_dataset=rows(),
        processing_class=tokenizer,
    )
    trainer.policy = BatchEngine(Script(trainer), on_callers_thread=True)
    return trainer


def make_batch(trainer: MultiTurnGRPOTrainer) -> dict[str, Any]:
    """The inputs of one training step."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    dataset = rows()
    batch_rows = [dict(dataset[number // GROUP]) for number in range(2 * GROUP)]
    return trainer._generate_and_score_completions(batch_rows)


# --- the head -------------------------------------------------------------------------------------


def loss_as_trl_does(trainer: MultiTurnGRPOTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """The loss with every token of the conversation labelled."""
    trainer_class = type(trainer)
    ours = trainer_class._get_per_token_logps_and_entropies
    trainer_class._get_per_token_logps_and_entropies = (
        GRPOTrainer._get_per_token_logps_and_entropies
    )
    try:
        return GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    finally:
        trainer_class._get_per_token_logps_and_entropies = ours


def loss_as_we_do(trainer: MultiTurnGRPOTrainer, batch: dict[str, Any]) -> torch.Tensor:
    return trainer._compute_loss(trainer.model, prepare_loss_inputs(batch))


@dataclass
class Update:
    """The loss of a batch, its gradients, and the seconds of both."""

    seconds: float
    loss: float
    gradients: list[torch.Tensor]


def compute_update(
    loss_of: Callable[..., torch.Tensor], trainer: MultiTurnGRPOTrainer, batch: dict[str, Any]
) -> Update:
    trainer.model.zero_grad(set_to_none=True)
    _wait()
    started = time.perf_counter()
    loss = loss_of(trainer, batch)
    loss.backward()
    _wait()
    seconds = time.perf_counter() - started
    gradients = [
        parameter.grad.clone()
        for parameter in trainer.model.parameters()
        if parameter.grad is not None
    ]
    return Update(seconds, loss.item(), gradients)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def skip_unlabelled(skip: bool) -> None:
    """Choose whether TRL's head takes the branch for GPUs."""
    trl_utils._use_triton = lambda device: skip


class ResidentPeak:
    """The largest size of this process in bytes while the context lasts, sampled every millisecond."""

    def __enter__(self) -> ResidentPeak:
        self.before = self._now()
        self.largest = self.before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.largest = max(self.largest, self._now())


def put_peak_mb(name: str, layers: int, queue: Any) -> None:
    """The peak memory of one batch's loss and gradients, in addition to the memory used before; put
    into the queue.
    """
    torch.set_num_threads(1)
    skip_unlabelled(True)
    loss_of = globals()[name]
    with tempfile.TemporaryDirectory() as folder:
        trainer = our_trainer(Path(folder), layers)
        batch = make_batch(trainer)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compute_update(loss_of, trainer, batch)
            peak_bytes = torch.cuda.max_memory_allocated() - before
        else:
            with ResidentPeak() as peak:
                compute_update(loss_of, trainer, batch)
            peak_bytes = peak.largest - peak.before
        queue.put(peak_bytes / 1e6)


def measure_memory(layers: int) -> dict[str, float]:
    """MB of each loss, by its function's name, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name in ("loss_as_trl_does", "loss_as_we_do"):
        queue = context.Queue()
        process = context.Process(target=put_peak_mb, args=(name, layers, queue))
        process.start()
        peaks[name] = queue.get(timeout=300)
        process.join()
    return peaks


def measure_head(folder: Path, layers: int, repeats: int) -> dict[str, Any]:
    trainer = our_trainer(folder, layers)
    batch = make_batch(trainer)
    token_count = batch["completion_mask"].sum()
    agent_count = (batch["completion_mask"] * batch["tool_mask"]).sum()
    result: dict[str, Any] = {
        "observed": round(float(1 - agent_count / token_count), 3),
        "tokens": int(token_count),
    }
    on_gpu = torch.cuda.is_available()
    for skips in [True] if on_gpu else [True, False]:
        if not on_gpu:
            skip_unlabelled(skips)

        # Both losses in turns.
        compute_update(loss_as_trl_does, trainer, batch)  # warms up
        trl_updates = []
        our_updates = []
        for _ in range(repeats):
            trl_updates.append(compute_update(loss_as_trl_does, trainer, batch))
            our_updates.append(compute_update(loss_as_we_do, trainer, batch))
        trl_s = statistics.median(update.seconds for update in trl_updates)
        ours_s = statistics.median(update.seconds for update in our_updates)
        suffix = "" if skips else "_cpu"
        result[f"trl_s{suffix}"] = round(trl_s, 3)
        result[f"ours_s{suffix}"] = round(ours_s, 3)
        result[f"head_ratio{suffix}"] = round(trl_s / ours_s, 2)
        if skips:
            plain = trl_updates[0]
            ours = our_updates[0]
            result["loss_difference"] = abs(plain.loss - ours.loss)
            result["gradient_difference"] = relative_difference(plain.gradients, ours.gradients)
    return result


def relative_difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """The largest difference of a component, relative to the largest component."""
    largest = max(float(gradient.abs().max()) for gradient in expected)
    pairs = zip(expected, actual, strict=True)
    difference = max(float((first - second).abs().max()) for first, second in pairs)
    return difference / largest


# --- a real model on a CPU ------------------------------------------------------------------------


@dataclass
class Conversations:
    """Rows of a batch: ids and attention mask of whole rows, and a mask of the response that marks
    the agent's tokens.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    agent_mask: torch.Tensor


def two_turns(
    rows: int = 8, prompt: int = 100, turn: int = 24, observation: int = 80
) -> Conversations:
    """Random conversations with two turns; later rows end earlier."""
    agent_mask = torch.tensor([[1] * turn + [0] * observation + [1] * turn] * rows)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 1000, (rows, prompt + agent_mask.shape[1]), generator=generator)
    attention_mask = torch.ones_like(ids)
    for row in range(1, rows):
        missing = 4 * row % turn
        attention_mask[row, ids.shape[1] - missing :] = 0
        agent_mask[row, agent_mask.shape[1] - missing :] = 0
    return Conversations(ids, attention_mask, agent_mask)


def time_update(
    model: torch.nn.Module, precision: str, batch: Conversations
) -> tuple[float, float]:
    """Seconds of the processor for the loss of a batch and its gradients, and the loss."""
    agent_mask = batch.agent_mask
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True, mixed_precision=precision))
    model.zero_grad(set_to_none=True)
    started = time.process_time()
    score = GRPOTrainer._get_per_token_logps_and_entropies
    logps, _, _ = score(
        trainer,
        ScoredTokensModel(model, agent_mask),
        batch.ids,
        batch.attention_mask,
        agent_mask.shape[1],
    )
    advantages = torch.linspace(-1, 1, len(batch.ids)).unsqueeze(1)
    loss = -(logps * agent_mask * advantages).sum() / agent_mask.sum()
    loss.backward()
    return time.process_time() - started, loss.item()


def load_model(folder: str, way: str) -> torch.nn.Module:
    """A real model that trains in one way, with TRL's head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_fused_lm_head(model)
    if way == "lora":
        lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora)
    model.train()
    return model


def measure_updates(folder: str, quick: bool = False) -> list[dict[str, Any]]:
    """One row for each way of training and precision."""
    batch = two_turns(rows=2 if quick else 8)
    repeats = 1 if quick else 3
    selectable_backbone = loss_of_trainer.selectable_backbone
    # Without a backbone of its own the head takes every position.
    backbones = {"every": lambda model: None, "scored": selectable_backbone}
    rows = []
    for way, precision in itertools.product(("lora", "full"), ("bf16", "no")):
        AcceleratorState._reset_state(True)
        model = load_model(folder, way)
        seconds: dict[str, list[float]] = {"every": [], "scored": []}
        losses: dict[str, float] = {}
        for _, positions in itertools.product(range(repeats), backbones):
            loss_of_trainer.selectable_backbone = backbones[positions]
            update_s, losses[positions] = time_update(model, precision, batch)
            seconds[positions].append(update_s)
        loss_of_trainer.selectable_backbone = selectable_backbone
        every_s = min(seconds["every"])
        scored_s = min(seconds["scored"])
        rows.append(
            {
                "way": way,
                "precision": "float32" if precision == "no" else precision,
                "every_position_s": round(every_s, 2),
                "scored_positions_s": round(scored_s, 2),
                "ratio": round(every_s / scored_s, 2),
                "loss_difference": abs(losses["every"] - losses["scored"]),
            }
        )
    return rows


# --- the trainer around it ------------------------------------------------------------------------


def plain_trainer(folder: Path, layers: int, steps: int, tokens: dict[str, Any]) -> GRPOTrainer:
    """TRL's own trainer with the tokens of our rollouts."""
    tokenizer = world_tokenizer()
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in rows()]
    return GRPOTrainer(
        model=build_model(tokenizer, layers),
        reward_funcs=reward,
        args=GRPOConfig(**settings(folder, steps)),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: dict(tokens),
    )


def capture_tokens(folder: Path, layers: int) -> dict[str, Any]:
    """The tokens of a batch of our rollouts, as our trainer gives them to TRL."""
    from agentic_prompting.trainers.rollouts import Batch

    captured: dict[str, Any] = {}
    to_trl = Batch.to_trl

    def capture(*args: Any, **kwargs: Any) -> dict[str, Any]:
        captured.update(to_trl(*args, **kwargs))
        return dict(captured)

    Batch.to_trl = capture  # type: ignore[method-assign]
    make_batch(our_trainer(folder, layers))
    Batch.to_trl = to_trl  # type: ignore[method-assign]
    captured.pop("rollout")
    return captured


def measure_overhead(folder: Path, layers: int, rounds: int, steps: int) -> dict[str, Any]:
    tokens = capture_tokens(folder / "first", layers)
    if not torch.cuda.is_available():
        skip_unlabelled(False)
    ours = StepTimes()
    plain = StepTimes()
    for number in range(rounds):
        run_folder = folder / f"{number}"
        for times in (ours, plain) if number % 2 else (plain, ours):
            trainer: GRPOTrainer
            if times is ours:
                trainer = our_trainer(run_folder, layers, steps)
            else:
                trainer = plain_trainer(run_folder, layers, steps, tokens)
            trainer.add_callback(times)
            trainer.train()
            del times.seconds[-steps]  # the first step of a run allocates
    ours_s = statistics.median(ours.seconds)
    plain_s = statistics.median(plain.seconds)
    return {
        "step_s": round(ours_s, 3),
        "plain_step_s": round(plain_s, 3),
        "overhead": round(ours_s / plain_s, 3),
    }


def measure_random_model(arguments: argparse.Namespace) -> None:
    """Print the figures of the head and of the whole step, for a model of random weights."""
    layers = 2 if arguments.quick else 8
    repeats = 3 if arguments.quick else 9
    rounds = 2 if arguments.quick else 6
    steps = 4 if arguments.quick else 6
    with tempfile.TemporaryDirectory() as folder:
        result = measure_head(Path(folder), layers, repeats)
        peaks = measure_memory(layers)
        trl_mb = peaks["loss_as_trl_does"]
        ours_mb = peaks["loss_as_we_do"]
        result["trl_mb"] = round(trl_mb)
        result["ours_mb"] = round(ours_mb)
        result["memory_ratio"] = round(trl_mb / ours_mb, 2)
        result |= measure_overhead(Path(folder), layers, rounds, steps)
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print("| " + " | ".join(result) + " |")
    print("|" + "---|" * len(result))
    print("| " + " | ".join(map(str, result.values())) + " |")
    if arguments.json:
        print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the layers, fewer repeats"
    )
    parser.add_argument(
        "--model", help="measure the update of a real model on a CPU instead: smollm2, or a folder"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    if arguments.model:
        updates = measure_updates(model_folder(arguments.model), arguments.quick)
        print(updates_table(updates))
        if arguments.json:
            result = {
                "updates": updates,
                "ratio": min(row["ratio"] for row in updates),
                "loss_difference": max(row["loss_difference"] for row in updates),
            }
            print(json.dumps(result))
        return
    measure_random_model(arguments)


if __name__ == "__main__":
    main()
