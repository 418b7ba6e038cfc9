"""One cell of the league: a method in a world, with a reflector, on a seed.

`league.py` says which cells there are.

A cell is trained, asks its agent the held-out questions and returns a record. It depends on nothing
but these four and the code: any cell can be run by itself, in any order.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab import ESPL, REPOSITORY, ask, correct, quiet, settings, share, train

if TYPE_CHECKING:
    import torch

    from agentic_prompting import ESPLTrainer
    from agentic_prompting.evolution import SystemPrompt
    from agentic_prompting.llm import ChatModel, Message, Reply
    from agentic_prompting.sandbox.setup import GuardedRun
    from agentic_prompting.trainers.rollouts import Batch

WARM_STARTS = REPOSITORY / "runs" / "warm_starts"
MAX_CALLS = 3000
TEMPERATURE = 0.7
GEPA_VALIDATION = 64
IMITATION_EPOCHS = 3
# Held-out questions that each rated prompt is asked in the end.
RATED_QUESTIONS = 128
# The accuracy of each reflector; `easy` is GuardedReflector.
ACCURACY = {"easy": None, ".7": 0.7}
ONE_CALL = {"reflection": "one_call", "p_crossover": 0.0}

# Phases: a mode of the trainer, `gepa` or `imitate`; its share of the rollouts; options that differ
# from the file's.
METHODS: dict[str, list[tuple[str, float, dict[str, Any]]]] = {
    "joint": [("joint", 1.0, {})],
    "one call": [("joint", 1.0, ONE_CALL)],
    "GEPA, then GRPO": [("gepa", 0.5, {}), ("rl", 0.5, {})],
    "rl": [("rl", 1.0, {})],
    "joint, then imitation": [("joint", 1.0, {}), ("imitate", 0.5, {})],
}
# What gained nothing left the library; the cells are in records/, and these are the last commits
# that run them.
GONE = {
    "one call, paired": "67bdbf9",
    "joint, then on-policy": "67bdbf9",
    "joint, then fixed teacher": "7ab8f68",
}


class CountedChat:
    """A [`ChatModel`] that counts its calls and refuses those beyond its budget."""

    def __init__(self, chat: ChatModel, max_calls: int):
        self.chat = chat
        self.max_calls = max_calls
        self.calls = 0

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        from agentic_prompting.llm import BudgetExceeded, Reply

        self.calls += 1
        if self.calls > self.max_calls:
            message = f"{self.max_calls} calls are what every method gets"
            return Reply(error=BudgetExceeded(message))
        return await self.chat(messages, **options)


def prepare(world: str, seed: int) -> GuardedRun:
    """The sandbox with its warm start, made once for each recipe and the code that trains by it, by
    one process.
    """
    from filelock import FileLock

    from agentic_prompting.sandbox.setup import guarded_recipe, prepare_guarded

    quiet()
    folder = WARM_STARTS / f"{guarded_recipe(seed, world=world).fingerprint}-{training_code()}"
    WARM_STARTS.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), redirect_stdout(io.StringIO()):
        return prepare_guarded(folder, seed, world=world)


def training_code() -> str:
    """Changes with the code and the libraries that make a warm start of a recipe."""
    package = REPOSITORY / "src" / "agentic_prompting"
    files = ("sandbox/recipe.py", "sandbox/policy.py", "trainers/warm_start.py")
    parts = [(package / name).read_text(encoding="utf-8") for name in files]
    parts += [version(name) for name in ("torch", "transformers", "trl")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def make_reflector(sandbox: GuardedRun, reflector: str, seed: int) -> ChatModel:
    """A reflector of `ACCURACY`, by its name."""
    from agentic_prompting.sandbox import GuardedReflector, HonestReflector

    accuracy = ACCURACY[reflector]
    if accuracy is None:
        return GuardedReflector(sandbox.mistakes, seed)
    return HonestReflector(accuracy, seed)


def run(
    world: str, reflector: str, seed: int, method: str, folder: Path, steps: int = 30
) -> dict[str, Any]:
    """Train a method, ask its agent the held-out questions, and return the record.

    Returns:
        `dict`: Besides the arguments `correct` (`1` or `0` for each held-out question), `ends` (the
            relation that each of them ends on), `guarded` (the relations with a word), `rollouts`,
            `calls`, `curve` (calls so far and mean exact match of each training batch), `rated`
            (rating, held-out exact match and id of each prompt that was rated), the final `prompt`,
            `others` (exact match of the warm start and the trained weights under the first and the
            final prompt, where `correct` is not that); `leaks` in the cells of `joint`.
    """
    if method in GONE:
        raise ValueError(
            f"{method!r} is not in the library any more: commit {GONE[method]} runs it"
        )
    started = time.perf_counter()
    sandbox = prepare(world, seed)
    chat = CountedChat(make_reflector(sandbox, reflector, seed), MAX_CALLS)
    agent = Agent(sandbox, seed, Path(sandbox.model), sandbox.root, chat)

    # The phases, each with a folder of its own.
    name = method.replace(", ", "-").replace(" ", "-")
    for number, (mode, portion, changes) in enumerate(METHODS[method]):
        agent.output = folder / world / reflector / str(seed) / f"{name}-{number}"
        phase_steps = max(1, round(steps * portion))
        with redirect_stdout(io.StringIO()):
            if mode == "gepa":
                agent.optimise_with_gepa(phase_steps)
            elif mode == "imitate":
                agent.imitate(phase_steps)
            else:
                agent.train(phase_steps, mode=mode, **changes)

    record = {
        "world": world,
        "reflector": reflector,
        "seed": seed,
        "method": method,
        "steps": steps,
        "correct": answers(sandbox, agent.model, agent.prompt),
        "ends": _ends(sandbox),
        "guarded": list(sandbox.oracle.rules),
        "rollouts": agent.rollouts,
        "calls": min(chat.calls, MAX_CALLS),
        "curve": agent.curve,
        "rated": agent.rated(),
        "prompt": agent.prompt.text,
        "others": agent.other_scores(),
    }
    if method == "joint":
        record["leaks"] = leaks(world, seed)
    record["seconds"] = round(time.perf_counter() - started)
    return record


@dataclass
class Agent:
    """The state that a method's phases pass on: weights, their prompt, and what was spent."""

    sandbox: GuardedRun
    seed: int
    model: Path
    prompt: SystemPrompt
    reflector: CountedChat
    output: Path = Path()
    rollouts: int = 0
    trainer: ESPLTrainer | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    def train(self, steps: int, **changes: Any) -> None:
        """Train with E-SPL's trainer, in one of its modes."""
        from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward

        options = {
            "max_steps": steps,
            "seed": self.seed,
            "output_dir": str(self.output),
            # A cell that was killed leaves a folder behind; it begins again.
            "overwrite": True,
            "per_device_eval_batch_size": 96,
            **changes,
        }
        args = ESPLConfig(**settings(ESPL, **options))
        self.trainer = train(
            ESPLTrainer,
            args,
            self.sandbox,
            LLMEnvironment(self.sandbox.oracle),
            before=self._watch,
            model=str(self.model),
            reward_funcs=PromptR1Reward(),
            reference=self.reflector if args.evolves else None,
            initial_prompt=self.prompt,
        )
        self._take_over(steps * args.generation_batch_size)

    def _watch(self, trainer: ESPLTrainer) -> None:
        """Add to the curve the calls so far and the exact match of each training batch."""
        after_rewards = trainer._after_rewards

        def add_to_curve(batch: Batch, totals: torch.Tensor) -> None:
            if batch.position.is_training:
                self.curve.append((self.reflector.calls, round(share(correct(batch.rollouts)), 4)))
            after_rewards(batch, totals)

        trainer._after_rewards = add_to_curve

    def imitate(self, steps: int) -> None:
        """Distill the prompt into the weights, with the rollouts of `steps` steps."""
        args = self.trainer.args
        row_count = steps * args.generation_batch_size // args.num_generations
        rows = self.sandbox.train.select(range(row_count))
        self.trainer.distill(
            rows, num_train_epochs=IMITATION_EPOCHS, per_device_train_batch_size=32
        )
        self._take_over(len(rows) * args.num_generations)

    def _take_over(self, rollouts: int) -> None:
        """Save the trainer's weights; take them and its prompt to the next phase."""
        self.trainer.save_model(str(self.output))
        self.model = self.output
        self.prompt = self.trainer.final_prompt()
        self.rollouts += rollouts

    def optimise_with_gepa(self, steps: int) -> None:
        """Optimise the prompt with the authors' package, for the rollouts of `steps` steps and one
        iteration.
        """
        import gepa

        from agentic_prompting import LLMEnvironment, PromptAgent, PromptR1Reward
        from agentic_prompting.evolution import SystemPrompt
        from agentic_prompting.interop.gepa import AgentAdapter
        from agentic_prompting.llm import complete
        from agentic_prompting.rollout import AgentSpec

        batch = settings(ESPL)["per_device_train_batch_size"]
        spec = replace(AgentSpec.load(self.model), sampling={"temperature": TEMPERATURE})
        agent = PromptAgent.from_pretrained(
            self.model, LLMEnvironment(self.sandbox.oracle), spec, max_batch_size=256
        )
        rows = list(self.sandbox.train)
        optimised = gepa.optimize(
            {"system_prompt": self.prompt.text},
            trainset=rows[GEPA_VALIDATION:],
            valset=rows[:GEPA_VALIDATION],
            adapter=AgentAdapter(agent, PromptR1Reward()),
            reflection_lm=lambda request: complete(self.reflector, request).text,
            max_metric_calls=steps * batch,
            seed=self.seed,
        )
        self.prompt = SystemPrompt.of(optimised.best_candidate["system_prompt"])
        self.rollouts += optimised.total_metric_calls

    def rated(self) -> list[tuple[float, float, int]]:
        """Rating, exact match on some held-out questions and id of each prompt that was rated,
        under these weights.
        """
        if self.trainer is None or self.trainer.prompts.is_distilled:
            return []
        rated = []
        for member in self.trainer.population.members:
            if member.matches:
                correct_flags = answers(self.sandbox, self.model, member.prompt, RATED_QUESTIONS)
                rating = round(member.rating.mu, 6)
                rated.append((rating, share(correct_flags), member.prompt.id))
        return rated

    def other_scores(self) -> dict[str, float]:
        """The table's other three cells: the value of the final prompt, and of the weights."""
        start = Path(self.sandbox.model)
        first_prompt = self.sandbox.root
        pairs = {
            "base, first": (start, first_prompt),
            "base, final": (start, self.prompt),
            "trained, first": (self.model, first_prompt),
        }
        scores = {}
        for name, (model, prompt) in pairs.items():
            scores[name] = round(share(answers(self.sandbox, model, prompt)), 4)
        return scores


def answers(
    sandbox: GuardedRun, model: Path, prompt: SystemPrompt, questions: int | None = None
) -> str:
    """`1` or `0` for each held-out question, sampled at the temperature that all methods share."""
    from agentic_prompting import LLMEnvironment

    rows = list(sandbox.test)[:questions]
    changes = {"system_prompt": prompt.text, "sampling": {"temperature": TEMPERATURE}}
    return correct(ask(model, LLMEnvironment(sandbox.oracle), rows, **changes))


def _ends(sandbox: GuardedRun) -> list[str]:
    """The relation that each held-out question ends on."""
    from agentic_prompting.sandbox import parse_question

    world = sandbox.oracle.world
    return [parse_question(row["question"], world).chain[-1] for row in sandbox.test]


def leaks(world: str, seed: int) -> int:
    """Facts about held-out countries that the policy was shown before: what docs/evidence.md
    forbids.
    """
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.leaks import leaks as find_leaks

    return len(find_leaks(world, seed))
