"""`agentic-prompting evolve`: a better system prompt for a model whose weights stay as they are
(E-SPL's evolution).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evolution import (
    EvolveConfig,
    EvolveResult,
    LeastBudget,
    Member,
    StepLog,
    evolve as run_evolution,
)
from ..evolution.operators import FAILURES_IN_WORDS
from ..evolution.run_files import PROMPT_FILE
from ..llm import Budget, LLMError, Usage
from ..llm.guard import describe, raised_in
from ..llm.numbers import count_in_words, format_usd
from ..llm.types import cost_in_words
from ..records import atomic_write, only_writer
from ..rollout import TagGrammar
from .client_settings import client_help
from .headroom_pointer import point_to_headroom
from .loader import REWARDS, load_reward, register_selection
from .option_parser import OptionParser
from .options import (
    JSON_HELP,
    REFERENCE_OPTIONS,
    ReferenceModel,
    Spending,
    Tracing,
    option,
    refuse_options,
)
from .script import INTERRUPTED, print_error
from .task_rows import ROW_OPTIONS, HeldOutRows
from .terminal import print_json, print_text

if TYPE_CHECKING:
    from ..evaluation.intervals import Estimate

NOTHING_LEARNED = 3
"""The exit status of `evolve` when it has no new prompt to show."""


@dataclass
class EvolveOptions(HeldOutRows, Spending, ReferenceModel, Tracing):
    """The options of `evolve` beside those of [`EvolveConfig`]: the models, the rows and the
    reward.
    """

    policy_model: str | None = option(
        "The model that solves the problems, by its name at its endpoint."
    )
    policy_base_url: str | None = option("The policy's OpenAI-compatible endpoint.")
    policy_client: str | None = option(client_help("the policy"))
    sandbox: bool = option("A tiny agent and a scripted reflector: no key.", False)
    task: str = option("The task to solve. `agentic-prompting data list` has all.", "gsm8k")
    reward: str = option(
        f"How answers are judged: {', '.join(REWARDS)}, or your own as module:name.", "exact_match"
    )
    initial_prompt: str = option(
        "The prompt to begin with; lines [G0]. ... are its principles.", ""
    )
    warm_start_steps: int = option("Supervised steps of the tiny agent in the sandbox.", 450)
    output_dir: Path = option("Folder for state and best prompt.", Path("runs/evolve"))
    json: bool = option(JSON_HELP, False)


@dataclass
class EvolveSettings(EvolveConfig):
    """[`EvolveConfig`] with a grammar that is named by a word, and a selection rule that may be
    named by module:name.
    """

    grammar: str = option(
        "Where a reply's answer is: between tags; free, the whole reply; marked, after 'Answer:'.",
        "tags",
    )

    def __post_init__(self) -> None:
        # A rule of your own has to be known before its name is checked.
        register_selection(self.selection)
        super().__post_init__()


SETTINGS = (EvolveOptions, EvolveSettings)  # the parser returns an object of each

NOT_IN_SANDBOX = (
    "policy_model",
    "policy_base_url",
    "policy_client",
    *REFERENCE_OPTIONS,
    "replay_cache",
    "task",
    *ROW_OPTIONS,
    "eval_task",
    "reward",
    "initial_prompt",
)
"""The options of models, rows and reward, which the sandbox has of its own."""


def check_options(options: EvolveOptions, config: EvolveConfig) -> None:
    """Raise `ValueError` for options that would have no effect."""
    if not options.sandbox:
        refuse_options(options, ("warm_start_steps",), "it is for --sandbox, whose agent is made")
        if options.dataset:
            refuse_options(options, ("task",), "--dataset names the rows; leave one of them out")
        options.check_rows()
        return
    reason = "the sandbox has its own; leave it out"
    refuse_options(options, NOT_IN_SANDBOX, reason)
    refuse_options(
        config,
        ("reflect_on", "prompt_template", "policy_sampling", "reference_sampling"),
        reason,
    )
    # The word was replaced by the grammar itself.
    if not isinstance(config.grammar, TagGrammar):
        raise ValueError(f"--grammar would have no effect: {reason}")


def evolve(arguments: Sequence[str]) -> int:
    """Evolve the system prompt of a closed model (E-SPL without weights); run again, a stopped run
    goes on.
    """
    options, config = OptionParser("evolve", SETTINGS, evolve.__doc__).parse(arguments)
    folder = options.output_dir
    check_options(options, config)
    options.start_tracing()
    # Evolve, with a line for each step unless one JSON object is wanted.
    try:
        result = evolve_in_folder(options, config, None if options.json else _print_step)
    except KeyboardInterrupt:
        print_error(f"stopped; the same command goes on from {folder}")
        return INTERRUPTED
    except (ValueError, OSError, LLMError):
        # `run_script` prints these errors on one line.
        raise
    except Exception as error:
        # The reward is the only code of the user's that may raise here.
        place = raised_in(error)
        if place:
            raise ValueError(f"{options.reward} failed{place}: {describe(error)}") from error
        # It returned something else than numbers.
        if isinstance(error, TypeError) and str(error).startswith("the reward"):
            raise ValueError(str(error)) from error
        raise

    if options.json:
        print_json(_record(result, folder))
    elif result.steps:
        _print_result(result, options)
    # Why the run stopped was logged by the evolution itself.
    if result.stopped and not result.is_without_answers:
        return 1
    if not result.why_nothing_learned:
        return 0
    # The evolution has logged this before the summary: repeat it where the eye is.
    if not options.json:
        print_error(f"nothing was learned: {result.why_nothing_learned}")
    return NOTHING_LEARNED


def evolve_in_folder(
    options: EvolveOptions,
    config: EvolveConfig,
    on_step: Callable[[StepLog], None] | None = None,
) -> EvolveResult:
    """Evolve, and write `system_prompt.txt` and `state.json` into the output folder; a stopped run
    is resumed.
    """
    folder = options.output_dir
    with ExitStack() as stack:
        # `run_evolution` locks the folder, too; the sandbox must not write beside a run before
        # that.
        with only_writer(folder / "state.json"):
            if options.sandbox:
                parts = _sandbox_parts(options, config)
            else:
                parts = _connect_parts(options, config, stack)

        def announce(least: LeastBudget) -> None:
            """Print what the run costs at least, and point to `headroom`, before anything is spent."""
            if on_step is not None:
                print(f"the least useful budget: {least}", flush=True)
                if parts["eval_rows"]:
                    calls = len(parts["eval_rows"]) * config.num_generations
                    prompts = (
                        "every rated prompt" if config.eval_all else "the first and the best prompt"
                    )
                    print(
                        f"the held-out rows, at the end: {count_in_words(calls, 'call')} of the "
                        f"policy under each of {prompts}, from the same budget",
                        flush=True,
                    )
            # A run that goes on has spent already.
            if not (folder / "state.json").exists():
                # With --json standard output has one JSON object and nothing else.
                stream = sys.stderr if options.json else sys.stdout
                point_to_headroom(folder, _headroom_options(options), stream)

        # The sandbox spends nothing.
        budget = options.budget(folder / "spending.sqlite")
        result = run_evolution(
            **parts,
            on_step=on_step,
            checkpoint=folder / "state.json",
            budget=budget,
            on_start=None if options.sandbox else announce,
        )
    atomic_write(folder / PROMPT_FILE, result.best.text)
    return replace(result, usage=_complete_usage(result.usage, budget))


def _complete_usage(usage: Mapping[str, Usage], budget: Budget) -> dict[str, Usage]:
    """The usage of each role, with that of a judge and of steps that were interrupted.

    The state of a run has the complete steps only, its account every call. The account may have
    been deleted.
    """
    complete = dict(usage)
    for role, spent in budget.by_account().items():
        if spent.tokens > complete.get(role, Usage()).tokens:
            complete[role] = spent
    return complete


def _headroom_options(options: EvolveOptions) -> dict[str, Any]:
    """The options with which `headroom` measures the same models on the same rows."""
    return {
        "policy-model": options.policy_model,
        "output-dir": options.output_dir,
        "policy-base-url": options.policy_base_url,
        "policy-client": options.policy_client,
        "reference-model": options.reference_model,
        "reference-base-url": options.reference_base_url,
        "reference-client": options.reference_client,
        "dataset": options.dataset,
        "task": None if options.dataset else options.task,
        "columns": options.columns,
        "held-out": options.held_out,
        "prompt": options.initial_prompt,
        "budget-usd": options.budget_usd,
        "budget-tokens": options.budget_tokens,
    }


def _describe_usage(usage: Usage) -> str:
    """The tokens and the cost of a model on one line."""
    text = f"{usage.prompt_tokens:,} tokens read, {usage.completion_tokens:,} written"
    if usage.estimated_tokens:
        text += f" ({usage.estimated_tokens:,} of them estimated)"
    return f"{text}, {cost_in_words(usage.cost_usd, was_used=usage.tokens > 0)}"


def _connect_parts(
    options: EvolveOptions, config: EvolveConfig, stack: ExitStack
) -> dict[str, Any]:
    """The arguments of [`evolution.evolve`], with models at real endpoints."""
    # One model solves the task, the other one reflects on its answers.
    if not (options.policy_model and options.reference_model):
        raise ValueError(
            "name both models: --policy-model NAME --reference-model NAME, or try --sandbox"
        )
    return {
        "policy": options.connect_role(stack, "policy"),
        "reference": options.connect_role(stack, "reference"),
        "rows": list(options.load(options.task, config.seed)),
        "reward": load_reward(options.reward),
        "prompt": options.initial_prompt,
        "config": config,
        "eval_rows": options.load_held_out(options.task, config.seed),
    }


def _sandbox_parts(options: EvolveOptions, config: EvolveConfig) -> dict[str, Any]:
    """The arguments of [`evolution.evolve`], with a tiny agent of fixed weights and a scripted
    reflector.
    """
    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..rewards import exact_match_reward
    from ..sandbox import GuardedReflector
    from ..sandbox.setup import ROOT, AgentChat, Transcript, prepare_guarded

    sandbox = prepare_guarded(
        options.output_dir, config.seed, warm_start_steps=options.warm_start_steps
    )
    # The agent asks the oracle of the sandbox.
    environment = LLMEnvironment(sandbox.oracle)
    agent = PromptAgent.from_pretrained(sandbox.model, environment, max_batch_size=256)
    # The tiny agent writes in a format of its own, and its mistakes are what is reflected on.
    config = replace(
        config,
        reflect_on="imperfect",
        prompt_template=sandbox.spec.prompt_template,
        grammar=Transcript(),
    )
    return {
        "policy": AgentChat(agent, config.seed),
        "reference": GuardedReflector(seed=config.seed),
        "rows": list(sandbox.train),
        "reward": exact_match_reward,
        "prompt": ROOT,
        "config": config,
        "eval_rows": list(sandbox.test)[: options.eval_task_rows or 32],
    }


def _record(result: EvolveResult, folder: Path) -> dict[str, Any]:
    """The record that `--json` prints."""
    from ..evaluation.held_out_gain import measure_held_out_gain

    # Held-out scores by step, where there was an evaluation.
    held_out = {log.step: log.held_out for log in result.steps if log.held_out is not None}
    # Members of the population have their own held-out scores.
    first, best = _first_and_best(result)
    gain = measure_held_out_gain(first, best)
    return {
        "prompt": result.best.text,
        "steps": len(result.steps),
        "attempts": result.attempts,
        "held_out": held_out,
        "first_held_out": first.held_out,
        "best_held_out": best.held_out,
        # The best prompt minus the first one, paired by question.
        "held_out_gain": None if gain is None else asdict(gain),
        "usage": {name: asdict(usage) for name, usage in result.usage.items()},
        "cost_usd": sum(usage.cost_usd for usage in result.usage.values()),
        "stopped": result.stopped,
        "output_dir": str(folder),
    }


def _print_result(result: EvolveResult, options: EvolveOptions) -> None:
    """Print the best prompt, its held-out score, what each model has used, and the files."""
    prompt = result.best.text if result.best.text.strip() else "(it is empty)"
    print_text(f"\nthe best of {len(result.population.members)} prompts, by rating:\n{prompt}\n")
    if result.attempts:
        print_text(_describe_attempts(result.attempts))
    held_out = _describe_held_out(result)
    if held_out:
        print_text(held_out)
    elif result.stopped and (options.held_out or options.eval_task):
        print_text(
            "held out: not measured, because the run stopped early; the same command with "
            f"--steps {len(result.steps)} measures these prompts, under a higher limit if the "
            "budget is spent"
        )
    for name, usage in result.usage.items():
        print_text(f"{name}: {_describe_usage(usage)}")
    total = sum(usage.cost_usd for usage in result.usage.values())
    if total:
        print_text(f"together: ${format_usd(total)}")
    print_text(f"written to {options.output_dir}: system_prompt.txt, state.json")


def _first_and_best(result: EvolveResult) -> tuple[Member, Member]:
    """The members with the first prompt and with the best one."""
    members = result.population.members
    best = next(member for member in members if member.prompt.text == result.best.text)
    return members[0], best


def _describe_attempts(attempts: Mapping[str, int]) -> str:
    """How many attempts made a prompt, proposed no change, and failed, on one line."""
    failures = {
        reason: count for reason, count in attempts.items() if reason not in ("child", "no_change")
    }
    parts = [
        count_in_words(attempts.get("child", 0), "new prompt"),
        f"no change proposed in {attempts.get('no_change', 0)}",
    ]
    # Why the other ones made no prompt.
    failed = f"without a usable edit {sum(failures.values())}"
    if failures:
        reasons = ", ".join(
            f"{FAILURES_IN_WORDS.get(reason, reason)} {count}" for reason, count in failures.items()
        )
        failed += f" ({reasons})"
    parts.append(failed)
    return f"{count_in_words(sum(attempts.values()), 'attempt')}: {', '.join(parts)}"


def _describe_held_out(result: EvolveResult) -> str:
    """The mean reward of the first and of the best prompt on held-out rows, and their difference;
    empty without such rows.
    """
    from ..evaluation.held_out_gain import describe_held_out_gain, estimate_held_out

    first, best = _first_and_best(result)
    first_score = estimate_held_out(first)
    best_score = estimate_held_out(best)
    if first_score is None or best_score is None:
        return ""
    text = (
        f"held out ({count_in_words(best_score.n, 'row')}): the first prompt "
        f"{_describe_score(first_score)}"
    )
    if first is not best:
        text += f", the best one {_describe_score(best_score)}"
    gain = describe_held_out_gain(first, best)
    return f"{text}\n{gain}" if gain else text


def _describe_score(score: Estimate) -> str:
    """A mean reward with its 95 % interval over the rows."""
    return f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]"


def _print_step(log: StepLog) -> None:
    """One line about a step: the prompts' values, the children, the held-out score."""
    # Only the prompts that have a value.
    values = []
    for prompt, value in zip(log.prompts, log.values, strict=True):
        if value is not None:
            values.append(f"{prompt}: {value:.2f}")
    line = f"step {log.step + 1}: prompt {', '.join(values)}"
    # Children that were born in the step.
    children = [
        str(operator["child"]) for operator in log.operators if operator["child"] is not None
    ]
    if children:
        line += f"; born: {', '.join(children)}"
    if log.held_out is not None:
        line += f"; held out: {log.held_out:.2f}"
    print(line, flush=True)
