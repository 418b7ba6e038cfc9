"""Train a Prompt-R1 agent: the same script for the sandbox on a laptop and for Qwen3-4B on eight GPUs.

    accelerate launch --quiet examples/train_prompt_r1.py --config examples/configs/sandbox.yaml
    accelerate launch --quiet --config_file examples/accelerate/ddp.yaml examples/train_prompt_r1.py \\
        --config examples/configs/qwen3_4b.yaml --environment_model gpt-4o-mini --budget_usd 200

Every option of `PromptR1Config`, TRL's `ModelConfig` and `ScriptArguments` below can stand in the YAML file or on the
command line, where it wins.
"""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field

from trl import ModelConfig, TrlParser, get_peft_config

from agentic_prompting import (
    LLMEnvironment,
    LLMError,
    OpenAIChat,
    PromptR1Config,
    PromptR1Trainer,
    ReplayCache,
    TrainingStopped,
    load_task,
)
from agentic_prompting.report.sandbox_run import report_sandbox_run
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.server import OracleServer
from agentic_prompting.sandbox.setup import prepare_sandbox


@dataclass
class ScriptArguments:
    sandbox: bool = field(default=False, metadata={"help": "Train the tiny policy in the sandbox; no model, no key."})
    warm_start_steps: int = field(default=350, metadata={"help": "Sandbox: supervised steps before GRPO."})
    n_test: int = field(default=256, metadata={"help": "Sandbox: held-out questions."})
    task: str = field(default="prompt_r1", metadata={"help": "A task of load_task."})
    task_split: str = field(default="train", metadata={"help": "Its split."})
    task_rows: int | None = field(default=None, metadata={"help": "Sample this many rows; all by default."})
    data_files: str | None = field(default=None, metadata={"help": "Local files instead of the hub."})
    environment_model: str | None = field(default=None, metadata={"help": "The large LLM's name at its endpoint."})
    environment_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    environment_temperature: float | None = field(default=None, metadata={"help": "Sent with every call."})
    environment_max_tokens: int | None = field(default=None, metadata={"help": "Of a reply; sent with every call."})
    replay_cache: str | None = field(default=None, metadata={"help": "SQLite file to record replies to and reuse."})


def main() -> None:
    started = time.perf_counter()
    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    script, args, model_args = TrlParser((ScriptArguments, PromptR1Config, ModelConfig)).parse_args_and_config()
    with ExitStack() as stack:
        if script.sandbox and not script.environment_base_url:
            # The embedded default, through the real client: the oracle as an OpenAI-compatible server on loopback.
            script.environment_base_url = stack.enter_context(OracleServer(Oracle(seed=args.seed))).base_url
            script.environment_model = script.environment_model or "sandbox-oracle"
        if not script.environment_model:
            raise SystemExit(
                "say which large LLM the agent talks to: --environment_model NAME [--environment_base_url URL]"
            )
        chat = OpenAIChat(
            script.environment_model,
            base_url=script.environment_base_url,
            cache=ReplayCache(script.replay_cache) if script.replay_cache else None,
        )
        stack.enter_context(chat)
        sampling = {"temperature": script.environment_temperature, "max_tokens": script.environment_max_tokens}
        environment = LLMEnvironment(chat, **{name: value for name, value in sampling.items() if value is not None})

        sandbox = None
        if script.sandbox:
            environment.check()  # a wrong address or key is found before the warm start, not after it
            sandbox = prepare_sandbox(args.output_dir, args.seed, script.n_test, script.warm_start_steps)
        trainer = PromptR1Trainer(
            model=str(sandbox.model) if sandbox else model_args.model_name_or_path,
            environment=environment,
            args=args,
            train_dataset=sandbox.train
            if sandbox
            else load_task(script.task, script.task_split, script.task_rows, args.seed, data_files=script.data_files),
            prompt_template=sandbox.spec.prompt_template if sandbox else None,
            peft_config=get_peft_config(model_args),
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model(args.output_dir)
        if sandbox and trainer.accelerator.is_main_process:
            report_sandbox_run(sandbox, environment, trainer, time.perf_counter() - started)
        trainer.accelerator.end_training()  # closes trackers and the process group; without it gloo may abort at exit


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError, LLMError, TrainingStopped) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None  # one line that says what to do
