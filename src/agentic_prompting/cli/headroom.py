"""`agentic-prompting headroom`: what can be gained on a task, before money is spent on gaining it."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loader import SCORES, load_reward, load_score
from .options import (
    AsJson,
    LargeLLM,
    ReferenceModel,
    TaskRows,
    Tracing,
    busy,
    check_agent,
    check_model,
    say,
    setting,
)

if TYPE_CHECKING:
    from ..evaluation.headroom import Headroom


@dataclass
class Measuring(TaskRows, ReferenceModel, LargeLLM):
    """What to measure, and on which rows."""

    policy_model: str | None = setting(
        "Measure a better system prompt for this model, by its name."
    )
    policy_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    prompt: str = setting("Its system prompt so far, which others are compared with.", "")
    tried: int = setting("How many prompts to compare; --reference-model writes them.", 12)
    untrained: str | None = setting(
        "Measure the signal for GRPO in this model's rollouts: a folder or a hub id."
    )
    group_size: int = setting("The group size of the planned training, num_generations.", 8)
    reward: str | None = setting(
        "The reward of the planned training, a name or module:name. Default: --score."
    )
    repeats: int = setting(
        "Answers of --environment-model to each request; 1 suffices at temperature 0.", 4
    )
    task: str = setting(
        "The rows, if not --dataset. `agentic-prompting data list` has all.", "gsm8k"
    )
    score: str = setting(
        f"How answers are compared: {', '.join(SCORES)}, or your own, module:name of score(answer, answers).",
        "exact_match",
    )
    calls: int = setting("Calls of large LLMs in each part, at most.", 512)
    top_up_calls: int = setting(
        "Calls of a second look at the prompts, if the first cannot tell.", 0
    )
    delta: float | None = setting(
        "The smallest gain that is worth it. Default: 0.1, from 2,000 calls on 0.05."
    )
    seed: int = setting("Of rows, ties and samples.", 0)
    output_dir: Path = setting("Folder for headroom.json.", Path("runs/headroom"))

    def check(self) -> None:
        """Raise `ValueError` unless there is something to measure, and all that it takes."""
        if self.sandbox:
            return
        if not (self.policy_model or self.untrained or self.environment_model):
            raise ValueError(
                "say what to measure: --policy-model NAME (a better prompt), --untrained MODEL (a signal for GRPO) or "
                "--environment-model NAME (a ceiling), or --sandbox"
            )
        if self.untrained and not (self.environment_model or self.environment):
            raise ValueError(
                "--untrained needs somebody to ask: --environment-model NAME or --environment MODULE:NAME"
            )

    def parts_in_sandbox(self) -> dict[str, Any]:
        """The arguments of [`headroom`]: puzzles, a scripted solver, and a scripted writer of prompts."""
        from ..sandbox.puzzles import PuzzleSolver, make_puzzles, prompt_writer, score_puzzle

        return {
            "rows": make_puzzles(1000, self.seed),
            "policy": PuzzleSolver(self.seed),
            "prompts": [self.prompt],
            "reference": prompt_writer(),
            "metric": _each(score_puzzle),
        }

    def parts(self, stack: ExitStack) -> dict[str, Any]:
        """The arguments of [`headroom`], with models at real endpoints, charged to the budget."""
        from ..llm import charge

        budget = self.budget(self.output_dir / "spending.sqlite")
        parts: dict[str, Any] = {
            "rows": list(self.load(self.task, self.seed)),
            "prompts": [self.prompt],
            "metric": _each(load_score(self.score)),
            "reward": None if self.reward is None else load_reward(self.reward),
        }
        if self.policy_model:
            parts["policy"] = self.connect(stack, self.policy_model, self.policy_base_url)
            charge(budget, policy=parts["policy"])
        if self.policy_model and self.reference_model:
            parts["reference"] = self.reference(stack)
            charge(budget, reference=parts["reference"])
        if self.environment_model:
            parts["llm"] = self.connect(stack, self.environment_model, self.environment_base_url)
            charge(budget, requests=parts["llm"])
        if self.untrained:
            parts["agent"] = self._load_agent(self.untrained, self.opened(stack, budget))
        return parts

    def _load_agent(self, model: str, environment: Any) -> Any:
        """The untrained agent: as it was saved by a trainer, else under the template of its environment."""
        check_agent(model)
        check_model(model)
        from ..agent import PromptAgent
        from ..rollout import SPEC_FILE, AgentSpec, TagGrammar
        from ..rollout.spec import template_for

        grammar = environment.grammar or TagGrammar()
        is_saved = (Path(model) / SPEC_FILE).is_file()
        spec = (
            None
            if is_saved
            else AgentSpec(prompt_template=template_for(environment, grammar), grammar=grammar)
        )
        with busy(f"loading {model}"):
            return PromptAgent.from_pretrained(model, environment, spec)


def headroom(script: Measuring, tracing: Tracing, as_json: AsJson = False) -> int:
    """Measure what can be gained on a task, and whether the signal to gain it exists, before a run."""
    from ..evaluation.headroom import headroom as measure_headroom

    script.check()
    tracing.start()
    with ExitStack() as stack:
        parts = script.parts_in_sandbox() if script.sandbox else script.parts(stack)
        options = {name: getattr(script, name) for name in _PASSED_ON}
        with busy("measuring"):
            found = measure_headroom(**parts, **options)
    path = found.save(script.output_dir)
    _show(found, path, as_json)
    return 1 if found.stopped else 0


_PASSED_ON = ("tried", "group_size", "repeats", "calls", "top_up_calls", "delta", "seed")


def _show(found: Headroom, path: Path, as_json: bool) -> None:
    if as_json:
        say(json.dumps({**found.to_json(), "file": str(path)}, ensure_ascii=False))
        return
    say(found.report())
    print(f"written to {path}")
    if found.stopped:
        print(f"agentic-prompting: stopped early: {found.stopped}", file=sys.stderr)


def _each(score: Any) -> Any:
    """A score of one answer as a metric of many."""
    from ..evaluation.metrics import each

    return each(score)
