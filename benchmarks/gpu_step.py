"""Step time and peak memory of GRPO over long conversations on one GPU, with a model of random weights.

    pip install -e ".[deepspeed]"
    python benchmarks/gpu_step.py           # 0.6B Qwen3 shape, bf16, ZeRO-3 of one process, LoRA, 8k, 5 turns
    python benchmarks/gpu_step.py --tiny    # the same on a CPU in a minute, to see that it runs

Every episode has five turns and fills the context, whatever the random model writes, because the environment has fixed
replies and continues until the last turn. So the figures depend on the shape, not on what the model has learned. Prints
one line of JSON; the means leave out the first step, which compiles and allocates.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.rollout import Observation, Rollout, TagGrammar
from agentic_prompting.rollout.grammar import Turn
from agentic_prompting.sandbox.policy import world_tokenizer

SHAPES = {  # Qwen3-0.6B's config.json; and something that fits anywhere
    "full": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1_024},
}  # fmt: skip


@dataclass(frozen=True)
class EverythingAsks(TagGrammar):
    """A grammar in which every turn is a request and ends only at its length limit."""

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def parse(self, text: str) -> Turn:
        return Turn(text, "act", True, request=text)


class FixedReplies:
    """An environment that replies at once, with `tokens` words."""

    grammar = EverythingAsks()

    def __init__(self, tokens: int):
        self.text = "Nairobi " * tokens

    async def step(self, rollout: Rollout) -> Observation:
        return Observation(text=self.text)


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        _wait()
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        _wait()
        self.seconds[-1] += time.perf_counter()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def saved_model(folder: Path, shape: dict[str, int]) -> Path:
    """A model of random weights with the sandbox's tokenizer, whose tokens are the first of the vocabulary."""
    tokenizer = world_tokenizer()
    config = Qwen3Config(
        **shape, max_position_embeddings=40_960, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def use_deepspeed() -> None:
    """Set the environment variables that `accelerate launch` with a ZeRO-3 configuration sets for one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, **dict.fromkeys(batch, "auto")}
    path = Path(tempfile.mkstemp(suffix=".json")[1])
    path.write_text(json.dumps(config))
    os.environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "RANK": "0",
        "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if not torch.cuda.is_available():
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise compiled first, which takes a minute


def run(tiny: bool, context: int, turns: int, rollouts: int, steps: int) -> dict[str, Any]:
    use_deepspeed()
    on_gpu = torch.cuda.is_available()
    folder = Path(tempfile.mkdtemp())
    turn = context // (2 * turns)  # half of the context is sampled, half observed
    args = MultiTurnGRPOConfig(
        str(folder / "out"), max_turns=turns, max_turn_tokens=turn, max_completion_length=context - 64,
        num_generations=rollouts, per_device_train_batch_size=1, gradient_accumulation_steps=rollouts, max_steps=steps,
        bf16=True, gradient_checkpointing=True, use_cpu=not on_gpu, report_to=[], save_strategy="no", logging_steps=1,
        learning_rate=1e-5, rollouts_max_mb=0,
    )  # fmt: skip
    times = StepTimes()
    trainer = MultiTurnGRPOTrainer(
        model=str(saved_model(folder, SHAPES["tiny" if tiny else "full"])),
        environment=FixedReplies(turn - 24),
        reward_funcs=lambda rollout, **columns: [float(sum(one.ids) % 7) for one in rollout],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Kenya"}]}] * 64),
        peft_config=LoraConfig(r=32, target_modules="all-linear"),
        callbacks=[times],
    )
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    later = times.seconds[1:] or times.seconds
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "type": trainer.accelerator.distributed_type.name,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
        "context": context,
        "turns": log[-1]["rollout/turns"],
        "tokens_per_rollout": log[-1]["rollout/agent_tokens"] + log[-1]["rollout/observation_tokens"],
        "rollouts": rollouts,
        "step_seconds": round(sum(later) / len(later), 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters and a context of 512")
    parser.add_argument("--context", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    context = options.context or (512 if options.tiny else 8192)
    print(json.dumps(run(options.tiny, context, options.turns, options.rollouts, options.steps)))


if __name__ == "__main__":
    main()
