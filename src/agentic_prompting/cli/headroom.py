"""`agentic-prompting headroom`: what can be gained on a task, before money is spent on gaining it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hub import check_agent, check_model, find_model
from .loader import SCORES, load_reward, load_score
from .option_parser import OptionParser
from .options import JSON_HELP, LargeLLM, ReferenceModel, TaskRows, Tracing, option
from .terminal import print_text, show_progress

if TYPE_CHECKING:
    from ..agent import PromptAgent
    from ..rollout import Environment


@dataclass
class HeadroomOptions(TaskRows, ReferenceModel, LargeLLM, Tracing):
    """The options of `headroom`: what to measure, and on which rows."""

    policy_model: str | None = option("Measure a better system prompt for this model, by its name.")
    policy_base_url: str | None = option("Its OpenAI-compatible endpoint.")
    prompt: str = option("Its system prompt so far, which others are compared with.", "")
    tried: int = option("How many prompts to compare; --reference-model writes them.", 12)
    untrained: str | None = option(
        "Measure the signal for GRPO in this model's rollouts: a folder, a hub id, or smollm2."
    )
    group_size: int = option("The group size of the planned training, num_generations.", 8)
    reward: str | None = option(
        "The reward of the planned training, a name or module:name. Default: --score."
    )
    repeats: int = option(
        "Answers of --environment-model to each request; 1 suffices at temperature 0.", 4
    )
    task: str = option(
        "The rows, if not --dataset. `agentic-prompting data list` has all.", "gsm8k"
    )
    score: str = option(
        f"How answers are compared: {', '.join(SCORES)}, or your own, module:name of score(answer, answers).",
        "exact_match",
    )
    calls: int = option("Calls of large LLMs in each part, at most.", 512)
    top_up_calls: int = option(
        "Calls of a second look at the prompts, if the first cannot tell.", 0
    )
    delta: float | None = option(
        "The smallest gain that is worth it. Default: 0.1, from 2,000 calls on 0.05."
    )
    seed: int = option("Of rows, ties and samples.", 0)
    output_dir: Path = option("Folder for headroom.json.", Path("runs/headroom"))
    json: bool = option(JSON_HELP, False)

    def check(self) -> None:
        """Raise `ValueError` unless there is something to measure, and all that it takes."""
        # The sandbox brings everything that is measured.
        if self.sandbox:
            return
        # Each of the three measurements needs a model.
        if not (self.policy_model or self.untrained or self.environment_model):
            raise ValueError(
                "say what to measure: --policy-model NAME (a better prompt), --untrained MODEL (a signal for GRPO) or "
                "--environment-model NAME (a ceiling), or --sandbox"
            )
        if self.untrained and not (self.environment_model or self.environment):
            raise ValueError(
                "--untrained needs somebody to ask: --environment-model NAME or --environment MODULE:NAME"
            )


SETTINGS = (HeadroomOptions,)


def headroom(arguments: Sequence[str]) -> int:
    """Measure what can be gained on a task, and whether the signal to gain it exists, before a run."""
    from ..evaluation.headroom import headroom as measure_headroom

    (options,) = OptionParser("headroom", SETTINGS, headroom.__doc__).parse(arguments)
    options.check()
    options.start_tracing()
    with ExitStack() as stack:
        # Scripted parts, or your rows and models at real endpoints.
        if options.sandbox:
            parts = _sandbox_parts(options)
        else:
            parts = _connect_parts(options, stack)
        # Measure, with no more calls in each part than the options allow.
        with show_progress("measuring"):
            measured = measure_headroom(
                **parts,
                tried=options.tried,
                group_size=options.group_size,
                repeats=options.repeats,
                calls=options.calls,
                top_up_calls=options.top_up_calls,
                delta=options.delta,
                seed=options.seed,
            )

    # Save and print what was measured.
    path = measured.save(options.output_dir)
    if options.json:
        print_text(json.dumps({**measured.to_json(), "file": str(path)}, ensure_ascii=False))
    else:
        print_text(measured.report())
        print(f"written to {path}")
        # What was measured before the stop is kept.
        if measured.stopped:
            print(f"agentic-prompting: stopped early: {measured.stopped}", file=sys.stderr)
    return 1 if measured.stopped else 0


def _sandbox_parts(options: HeadroomOptions) -> dict[str, Any]:
    """Puzzles, a scripted solver, and a scripted writer of prompts."""
    from ..evaluation.metrics import each
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, prompt_writer, score_puzzle

    return {
        "rows": make_puzzles(1000, options.seed),
        "policy": PuzzleSolver(options.seed),
        "prompts": [options.prompt],
        "reference": prompt_writer(),
        "metric": each(score_puzzle),
    }


def _connect_parts(options: HeadroomOptions, stack: ExitStack) -> dict[str, Any]:
    """Rows, and models at real endpoints that are charged to the budget."""
    from ..evaluation.metrics import each
    from ..llm import charge

    # One budget for all models, with its account beside the result.
    budget = options.budget(options.output_dir / "spending.sqlite")
    parts: dict[str, Any] = {
        "rows": list(options.load(options.task, options.seed)),
        "prompts": [options.prompt],
        "metric": each(load_score(options.score)),
        "reward": None if options.reward is None else load_reward(options.reward),
    }
    # Each part is measured only if its model is named.
    if options.policy_model:
        parts["policy"] = options.connect(stack, options.policy_model, options.policy_base_url)
        charge(budget, policy=parts["policy"])
    # The reference writes the prompts that are compared.
    if options.policy_model and options.reference_model:
        parts["reference"] = options.connect_reference(stack)
        charge(budget, reference=parts["reference"])
    if options.environment_model:
        parts["llm"] = options.connect(
            stack, options.environment_model, options.environment_base_url
        )
        charge(budget, requests=parts["llm"])
    # The untrained agent needs somebody to ask.
    if options.untrained:
        environment = options.open_environment(stack, budget)
        parts["agent"] = _load_untrained(options.untrained, environment)
    return parts


def _load_untrained(model: str, environment: Environment) -> PromptAgent:
    """The untrained agent: as it was saved by a trainer, else under the template of its environment."""
    # A wrong name is found before large packages are imported.
    model = find_model(model)
    check_agent(model)
    check_model(model)
    from ..agent import PromptAgent
    from ..rollout import SPEC_FILE, AgentSpec, TagGrammar
    from ..rollout.spec import template_for

    # A model without a spec is shown the default template of its environment.
    spec = None
    if not (Path(model) / SPEC_FILE).is_file():
        grammar = environment.grammar or TagGrammar()
        spec = AgentSpec(prompt_template=template_for(environment, grammar), grammar=grammar)
    with show_progress(f"loading {model}"):
        return PromptAgent.from_pretrained(model, environment, spec)
