"""`headroom --config FILE`: the task of a training run, in the form in which it would train."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..agent import PromptAgent
from ..environments import LLMEnvironment
from ..evaluation.metrics import each
from ..llm import Budget, charge
from ..rewards import PromptR1Reward
from ..rollout import Environment, as_environment
from ..sandbox.library import brief_answer_reward
from ..sandbox.setup import prepare_sandbox
from ..trainers import ESPLTrainer, MultiTurnGRPOConfig, PromptR1Trainer
from ..trainers.resolve_spec import SpecOptions
from .headroom_options import SCRIPT_OPTIONS, HeadroomOptions
from .hub import check_model, find_model
from .loader import load_reward, load_score, text_or_file
from .options import REFERENCE_OPTIONS, MissingOption, given_options, refuse_options
from .terminal import show_progress
from .train_espl import ESPLArguments
from .train_prompt_r1 import PromptR1Arguments

RunArguments = PromptR1Arguments | ESPLArguments


def connect_run(options: HeadroomOptions, stack: ExitStack) -> dict[str, Any]:
    """The rows and fields of [`HeadroomSettings`] for a training run: its agent, reward and large
    LLM.

    Raises:
        `ValueError`: If the run cannot be measured, or an option is wrong or missing.
    """
    script, args, model = options.run.parse()
    if not isinstance(script, RunArguments):
        raise ValueError(
            "headroom --config measures the runs of `train prompt-r1` and `train espl`; for an "
            "agent program name --untrained MODEL and --program MODULE:NAME"
        )
    if not isinstance(script, ESPLArguments):
        refuse_options(
            options,
            (*REFERENCE_OPTIONS, "tried", "top_up_calls"),
            f"{options.config} is a run of `train {options.run.method}`, which has no reference "
            "LLM",
        )
    if isinstance(script, PromptR1Arguments) and (script.real or script.sandbox):
        refuse_options(
            options, ("untrained",), f"the run of {options.config} brings a model of its own"
        )
    # Options of the command line come before those of the file.
    for name in given_options(options):
        if name in SCRIPT_OPTIONS:
            setattr(script, name, getattr(options, name))
    script.check(args)
    # Every reply is recorded, also where the run itself would record none.
    script.replay_cache = options.replay_cache
    budget = options.open_budget()
    if isinstance(script, PromptR1Arguments) and script.real:
        settings_fields = _library_settings(script, args, model.model_name_or_path, options.folder)
    elif isinstance(script, PromptR1Arguments) and script.sandbox:
        settings_fields = _sandbox_settings(script, args, options.folder, stack)
    else:
        settings_fields = _own_settings(
            script, args, options.untrained or model.model_name_or_path, stack
        )

    # All that the large LLM costs is charged.
    environment: Environment | None = settings_fields["agent"].environment
    if environment is not None:
        charge(budget, environment=environment)
    if isinstance(script, ESPLArguments) and script.reference_model:
        settings_fields |= _prompt_settings(script, settings_fields["agent"], stack, budget)
    budget.warn_if_it_limits_nothing()
    if options.reward is not None:
        settings_fields["reward"] = load_reward(options.reward)
    # Rewards score rollouts, and a metric the answers of models and prompts.
    if options.metric:
        settings_fields["metric"] = options.metric[0]
    elif options.score != HeadroomOptions.score:
        settings_fields["metric"] = each(load_score(options.score))
    settings_fields["group_size"] = options.group_size or args.num_generations
    return settings_fields


def _library_settings(
    script: PromptR1Arguments, args: MultiTurnGRPOConfig, model: str | None, folder: Path
) -> dict[str, Any]:
    """The run of a real small model that looks invented facts up, after its warm start."""
    run = script.prepare_library(folder, find_model(model) if model else None, args.seed)
    agent = _load_agent(PromptR1Trainer, run.model, run.environment, args, SpecOptions())
    return {"agent": agent, "rows": list(run.train), "reward": brief_answer_reward}


def _sandbox_settings(
    script: PromptR1Arguments, args: MultiTurnGRPOConfig, folder: Path, stack: ExitStack
) -> dict[str, Any]:
    """The demonstration of Prompt-R1: its warm start and its oracle."""
    environment = script.connect_large_llm(args.seed, stack, sandbox=True)
    sandbox = prepare_sandbox(folder, args.seed, script.n_test, script.supervised_steps)
    options = SpecOptions(prompt_template=sandbox.spec.prompt_template)
    agent = _load_agent(PromptR1Trainer, str(sandbox.model), environment, args, options)
    return {"agent": agent, "rows": list(sandbox.train), "reward": PromptR1Reward()}


def _own_settings(
    script: RunArguments, args: MultiTurnGRPOConfig, model: str | None, stack: ExitStack
) -> dict[str, Any]:
    """A run on rows of one's own, or of a task."""
    # Check everything before the model is loaded.
    if isinstance(script, ESPLArguments) and script.is_in_sandbox:
        raise ValueError(
            "headroom --config does not measure E-SPL's sandbox: try `agentic-prompting headroom "
            "--sandbox`"
        )
    if script.tools or script.environment_factory:
        raise ValueError(
            "headroom --config measures runs with an environment, not with --tools or "
            "--environment_factory"
        )
    if len(script.reward) > 1:
        raise ValueError(
            f"headroom measures one reward, and the run has {', '.join(script.reward)}: name one "
            "with --reward"
        )
    if not model:
        raise MissingOption("name the model to train", "--untrained FOLDER or a name on the hub")
    model = find_model(model)
    check_model(model)
    environment = as_environment(script.build_environment(args.seed, stack)["environment"])
    if environment is not None:
        environment.check()
    rows = list(script.load(script.task, args.seed))

    # The form of the agent is that of the training.
    trainer = ESPLTrainer if isinstance(script, ESPLArguments) else PromptR1Trainer
    spec_options = SpecOptions(**script.agent_form())
    agent = _load_agent(trainer, model, environment, args, spec_options)
    # Prompt-R1's own reward has the gate of the configuration.
    (reward_name,) = script.reward
    reward = load_reward(reward_name)
    if isinstance(reward, PromptR1Reward):
        reward = replace(reward, gate=getattr(args, "gate", reward.gate))
    settings_fields = {"agent": agent, "rows": rows, "reward": reward}
    # The large LLM is also measured by itself: its score is the ceiling of one request.
    if isinstance(environment, LLMEnvironment):
        settings_fields["llm"] = environment.chat
    return settings_fields


def _prompt_settings(
    script: ESPLArguments, agent: PromptAgent, stack: ExitStack, budget: Budget
) -> dict[str, Any]:
    """E-SPL also searches for a system prompt: the gain of a better one for the untrained agent."""
    reference = script.connect_role(stack, "reference")
    charge(budget, reference=reference)
    start = text_or_file(script.initial_prompt) or ""
    return {"policy": agent, "prompts": [start], "reference": reference}


def _load_agent(
    trainer: type[Any],
    model: str,
    environment: Environment | None,
    args: MultiTurnGRPOConfig,
    options: SpecOptions,
) -> PromptAgent:
    """The untrained agent, with the prompt, limits and sampling of the run."""
    spec = trainer.untrained_spec(model, environment, args, options)
    with show_progress(f"loading {model}"):
        return PromptAgent.from_pretrained(model, environment, spec)
