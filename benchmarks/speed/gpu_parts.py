"""The parts of `gpu_day.py`.

Each measures in this process and prints its figures as a line of JSON, again when it knows more, so
that one that is killed leaves what it had found.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig

    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from support.vllm_server import VLLMServer

GIB = 2**30
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
# Of Qwen3's config.json files; and one that fits anywhere.
SHAPES = {
    "0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1_024,
    },
}


def saved_model(folder: Path, shape: str) -> Path:
    """A model of random weights with the sandbox's tokenizer, whose tokens are the first of the
    vocabulary.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentic_prompting.sandbox.policy import world_tokenizer

    tokenizer = world_tokenizer()
    config = Qwen3Config(
        **SHAPES[shape],
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def engine(folder: Path, shape: str, tokens: int = 80) -> None:
    """The policy's engine against whole batches, bf16, and what keys and values kept between turns
    save.
    """
    from types import SimpleNamespace

    import torch

    from agentic_prompting.local import Sampling
    from agentic_prompting.rollout import AgentSpec
    from benchmarks.speed.engine import (
        NEVER_SAMPLED,
        Bench,
        compare,
        compare_prefix,
        mixed_lengths,
    )

    model = saved_model(folder, shape)
    bench = Bench(SimpleNamespace(model=model, train=[], spec=AgentSpec()))
    bench.model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    options: dict[str, Any] = {"sampling": Sampling(), "end_of_turn_ids": [NEVER_SAMPLED]}
    figures: dict[str, Any] = {}
    for name, lengths in (("uniform", [[tokens]] * 64), ("mixed", mixed_lengths(tokens))):
        figures[name] = compare(
            bench.turns(lengths),
            partial(bench.engine, **options),
            partial(bench.batches, **options),
            repeats=1,
        )
        print(json.dumps(figures), flush=True)
    prefix = compare_prefix(bench, repeats=1)
    figures["kept_wall_ratio"] = prefix["wall_ratio"]
    figures["kept_read_ratio"] = prefix["read_ratio"]
    print(json.dumps(figures), flush=True)


def beside_trl(folder: Path, flags: tuple[str, ...] = ()) -> None:
    """The loss and the whole step beside TRL's."""
    command = [sys.executable, "-m", "benchmarks.speed.training_step", "--json", *flags]
    subprocess.run(command, check=True)


def step(
    folder: Path,
    shape: str,
    context: int = 8192,
    turns: int = 5,
    sampled: float = 0.25,
    lora: bool = True,
    backend: str = "",
    vllm: str = "",
    predict: bool = False,
) -> None:
    """Seconds and memory of a training step of two rollouts, beside what `plan` predicts.

    Args:
        folder (`Path`): For the model and the run.
        shape (`str`), context (`int`), turns (`int`): The policy, and what each episode fills.
        sampled (`float`): The share of the context that the policy writes; the rest is observed.
        lora (`bool`): Whether adapters learn, or all weights.
        backend (`str`): `zero3` or `fsdp2`, of one process.
        vllm (`str`): `colocate`, or how the weights reach a server: `adapter` or `nccl`.
        predict (`bool`): Whether to ask `plan` first.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    model = saved_model(folder, shape)
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        # The back end is chosen before the trainer's modules are imported.
        if backend:
            stack.enter_context(sharded(backend, folder))
        from agentic_prompting import MultiTurnGRPOTrainer

        # The policy writes its share in equal turns; the environment's replies fill the rest.
        turn_tokens = int(context * sampled / turns)
        reply_words = int((context - 64) / turns) - turn_tokens - 24
        peft = LoraConfig(r=32, target_modules="all-linear") if lora else None
        options = vllm_options(vllm, model, folder, context, stack)
        options["model_init_kwargs"] = {"dtype": "bfloat16" if lora else "float32"}
        args = step_args(folder, context, turns, turn_tokens, options)
        if predict:
            figures["predicted_gib"] = predict_memory(args, model, peft)
            print(json.dumps(figures), flush=True)

        # Rewards differ within a group, so that each step has a gradient.
        prompt = [{"role": "user", "content": "Kenya"}]
        trainer = MultiTurnGRPOTrainer(
            model=str(model),
            environment=fixed_replies(reply_words),
            args=args,
            reward_funcs=lambda rollout, **columns: [
                float(sum(episode.ids) % 7) for episode in rollout
            ],
            peft_config=peft,
            train_dataset=Dataset.from_list([{"prompt": prompt}] * 64),
        )
        watch = Watch(trainer)
        trainer.train()

    log = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    differences = {}
    for name, value in log.items():
        if "logp_difference/" in name:
            differences[name.rpartition("/")[2]] = value
    figures |= {
        "type": trainer.accelerator.distributed_type.name,
        "turns": log["rollout/turns"],
        "tokens": log["rollout/agent_tokens"] + log["rollout/observation_tokens"],
        **watch.figures(log["rollout/agent_tokens"] * 2),
        "sampler_and_trainer_differ_by": differences,
    }
    if predict and torch.cuda.is_available():
        predicted = figures["predicted_gib"]
        largest = max(gib for moment, gib in predicted.items() if moment != "sampling")
        figures["error_of_training_peak"] = round(largest / figures["peak_gib"]["training"] - 1, 4)
    print(json.dumps(figures), flush=True)


def step_args(
    folder: Path, context: int, turns: int, turn_tokens: int, options: dict[str, Any]
) -> MultiTurnGRPOConfig:
    """The settings of two steps of two rollouts that fill the context."""
    import torch

    from agentic_prompting import MultiTurnGRPOConfig

    return MultiTurnGRPOConfig(
        str(folder / "out"),
        max_turns=turns,
        max_turn_tokens=turn_tokens,
        max_completion_length=context - 64,
        max_context=context,
        num_generations=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=2,
        bf16=True,
        gradient_checkpointing=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-5,
        rollouts_max_mb=0,
        disable_tqdm=True,
        **options,
    )


def vllm_options(
    vllm: str, model: Path, folder: Path, context: int, stack: ExitStack
) -> dict[str, Any]:
    """The trainer's options for vLLM; starts a server, which ends with `stack`, where one is
    needed.
    """
    if not vllm:
        return {}
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_max_model_length": context,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_mode": "colocate" if vllm == "colocate" else "server",
    }
    if vllm in ("adapter", "nccl"):
        server = stack.enter_context(served(model, folder, context, vllm))
        options["vllm_sync"] = vllm
        options["vllm_server_base_url"] = server.url
    return options


def predict_memory(
    args: MultiTurnGRPOConfig, model: Path, peft: LoraConfig | None
) -> dict[str, float]:
    """GiB of each moment of a step, as `plan` predicts them."""
    import torch

    from agentic_prompting.planning import plan

    memory = 80.0
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / GIB
    predicted = plan(vars(args), str(model), gpus=1, gpu_memory=memory, peft_config=peft, seconds=1)
    return {moment: round(sum(parts.values()), 3) for moment, parts in predicted.moments.items()}


def fixed_replies(words: int) -> Any:
    """An environment that answers every turn with so many words at once, until the last turn."""
    from agentic_prompting.rollout import Observation, TagGrammar
    from agentic_prompting.rollout.grammar import Turn

    class EverythingAsks(TagGrammar):
        stops = ()

        def parse(self, text: str) -> Turn:
            return Turn(text, "act", True, request=text)

    class FixedReplies:
        grammar = EverythingAsks()

        async def step(self, rollout: Any) -> Any:
            return Observation(text="Nairobi " * words)

    return FixedReplies()


class Watch:
    """Seconds and peaks of sampling, weight sync and the rest of a trainer's last step."""

    def __init__(self, trainer: MultiTurnGRPOTrainer):
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self.last_mark = self._now()
        next_batch = trainer.batch_source.next_batch

        def watched_next_batch(*args: Any, **kwargs: Any) -> Any:
            self.mark("training")  # of the step before
            batch = next_batch(*args, **kwargs)
            self.mark("sampling")
            return batch

        trainer.batch_source.next_batch = watched_next_batch
        generation = getattr(trainer, "vllm_generation", None)
        sync_weights = getattr(generation, "sync_weights", None)
        if sync_weights is not None:

            def watched_sync_weights(*args: Any, **kwargs: Any) -> Any:
                started = self._now()
                try:
                    return sync_weights(*args, **kwargs)
                finally:
                    self.seconds["weight_sync"] = self._now() - started

            generation.sync_weights = watched_sync_weights

    def _now(self) -> float:
        if self.cuda:
            self.cuda.synchronize()
        return time.perf_counter()

    def mark(self, phase: str) -> None:
        """Book the time and memory since the last mark under this phase."""
        now = self._now()
        self.seconds[phase] = now - self.last_mark
        self.last_mark = now
        if self.cuda:
            self.peaks[phase] = self.cuda.max_memory_allocated() / GIB
            self.cuda.reset_peak_memory_stats()

    def figures(self, tokens: float) -> dict[str, Any]:
        """The figures of the step that has just ended, in which the policy wrote so many tokens."""
        self.mark("training")
        figures: dict[str, Any] = {}
        for phase, seconds in self.seconds.items():
            figures[f"{phase}_s"] = round(seconds, 3)
        figures["sampled_tokens_per_s"] = round(tokens / self.seconds["sampling"])
        if self.peaks:
            figures["peak_gib"] = {phase: round(gib, 3) for phase, gib in self.peaks.items()}
        return figures


def sharded(backend: str, folder: Path) -> AbstractContextManager[None]:
    """The environment that `accelerate launch` sets for one process of a back end; a context
    manager.
    """
    import torch

    from agentic_prompting.planning.fake_gpu import fsdp2_environment, fsdp_on_a_cpu

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    on_gpu = torch.cuda.is_available()
    variables = fsdp2_environment(1) | {"MASTER_PORT": str(port)}
    if on_gpu:
        variables.pop("ACCELERATE_TORCH_DEVICE")
    if backend == "fsdp2":
        os.environ |= variables
        return nullcontext() if on_gpu else fsdp_on_a_cpu()

    # ZeRO-3: deepspeed takes the sizes of the batch from the trainer's arguments.
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    config_file = folder / "zero3.json"
    config_file.write_text(json.dumps(config))
    os.environ |= {name: value for name, value in variables.items() if "FSDP" not in name}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config_file)
    if not on_gpu:
        import deepspeed

        # Otherwise it is compiled first, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return nullcontext()


def served(model: Path, folder: Path, context: int, sync: str) -> VLLMServer:
    """A vLLM server of the policy, on the second GPU where NCCL pushes the weights: it refuses one
    GPU for both.
    """
    from support.vllm_server import VLLMServer

    flags = ["--max-model-len", str(context), "--gpu-memory-utilization", "0.4"]
    if sync == "adapter":
        flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32"]
        return VLLMServer(model, folder, *flags)
    flags += ["--weight-transfer-config", '{"backend": "nccl"}', "--max-logprobs", "-1"]
    return VLLMServer(model, folder, *flags, gpu="1")
