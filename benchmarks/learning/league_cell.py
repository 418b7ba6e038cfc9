"""One cell of the league: a method in a world, with a reflector, on a seed. `league.py` says which cells there are.

A cell is trained, asks its agent the held-out questions and returns a record. It depends on nothing but these four and
the code: any cell can be run by itself, in any order.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.lab import ESPL, REPOSITORY, ask, correct, quiet, settings, share, train

WARM_STARTS = REPOSITORY / "runs" / "warm_starts"
MAX_CALLS = 3000
TEMPERATURE = 0.7
GEPA_VALIDATION = 64
IMITATION_EPOCHS = 3
RATED_QUESTIONS = 128  # held-out questions that each rated prompt is asked in the end
ACCURACY = {"easy": None, ".7": 0.7}  # of the reflectors; `easy` is GuardedReflector
ONE_CALL = {"reflection": "one_call", "p_crossover": 0.0}

# Phases: a mode of the trainer, `gepa` or `imitate`; its share of the rollouts; options that differ from the file's.
METHODS: dict[str, list[tuple[str, float, dict[str, Any]]]] = {
    "joint": [("joint", 1.0, {})],
    "one call": [("joint", 1.0, ONE_CALL)],
    "GEPA, then GRPO": [("gepa", 0.5, {}), ("rl", 0.5, {})],
    "rl": [("rl", 1.0, {})],
    "joint, then imitation": [("joint", 1.0, {}), ("imitate", 0.5, {})],
}
# What gained nothing left the library; the cells are in records/, and these are the last commits that run them.
GONE = {
    "one call, paired": "67bdbf9",
    "joint, then on-policy": "67bdbf9",
    "joint, then fixed teacher": "7ab8f68",
}


class Counted:
    """A [`ChatModel`] that counts its calls and refuses those beyond its budget."""

    def __init__(self, chat: Any, most: int):
        self.chat = chat
        self.most = most
        self.calls = 0

    async def __call__(self, messages: Any, **options: Any) -> Any:
        from agentic_prompting.llm import BudgetExceeded, Reply

        self.calls += 1
        if self.calls > self.most:
            return Reply(error=BudgetExceeded(f"{self.most} calls are what every method gets"))
        return await self.chat(messages, **options)


def prepare(world: str, seed: int) -> Any:
    """The sandbox with its warm start, made once for each recipe and the code that trains by it, by one process."""
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


def reflector_of(sandbox: Any, kind: str, seed: int) -> Any:
    """A reflector of `ACCURACY`, by its name."""
    from agentic_prompting.sandbox import GuardedReflector, HonestReflector

    accuracy = ACCURACY[kind]
    return (
        GuardedReflector(sandbox.mistakes, seed)
        if accuracy is None
        else HonestReflector(accuracy, seed)
    )


def run(
    world: str, reflector: str, seed: int, method: str, folder: Path, steps: int = 30
) -> dict[str, Any]:
    """Train a method, ask its agent the held-out questions, and return the record.

    Returns:
        `dict`: Besides the arguments `correct` (`1` or `0` for each held-out question), `ends` (the relation that each
            of them ends on), `guarded` (the relations with a word), `rollouts`, `calls`, `curve` (calls so far and mean
            exact match of each training batch), `rated` (rating, held-out exact match and id of each prompt that was
            rated), the final `prompt`, `others` (exact match of the warm start and the trained weights under the first
            and the final prompt, where `correct` is not that); `leaks` in the cells of `joint`.
    """
    if method in GONE:
        raise ValueError(
            f"{method!r} is not in the library any more: commit {GONE[method]} runs it"
        )
    started = time.perf_counter()
    sandbox = prepare(world, seed)
    counted = Counted(reflector_of(sandbox, reflector, seed), MAX_CALLS)
    agent = Agent(sandbox, seed, Path(sandbox.model), sandbox.root, counted)
    name = method.replace(", ", "-").replace(" ", "-")
    for number, (kind, portion, changes) in enumerate(METHODS[method]):
        own = {"gepa": agent.gepa, "imitate": agent.imitate}
        phase = own.get(kind, agent.train)
        agent.output = folder / world / reflector / str(seed) / f"{name}-{number}"
        with redirect_stdout(io.StringIO()):
            phase(max(1, round(steps * portion)), mode=kind, **changes)
    return {
        **{"world": world, "reflector": reflector, "seed": seed, "method": method, "steps": steps},
        **{"correct": answers(sandbox, agent.model, agent.prompt), "ends": _ends(sandbox)},
        **{
            "guarded": list(sandbox.oracle.rules),
            "rollouts": agent.rollouts,
            "calls": min(counted.calls, MAX_CALLS),
        },
        **{"curve": agent.curve, "rated": agent.rated(), "prompt": agent.prompt.text},
        **{"others": agent.others()},
        **({"leaks": leaks(world, seed)} if method == "joint" else {}),
        **{"seconds": round(time.perf_counter() - started)},
    }


@dataclass
class Agent:
    """The state that a method's phases pass on: weights, their prompt, and what was spent."""

    sandbox: Any
    seed: int
    model: Path
    prompt: Any
    reflector: Counted
    output: Path = Path()
    rollouts: int = 0
    trainer: Any = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    def train(self, steps: int, **changes: Any) -> None:
        """Train with E-SPL's trainer, in one of its modes."""
        from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward

        # `exist_ok` of a folder that a cell left behind when it was killed: it is begun anew.
        options = {
            "max_steps": steps,
            "seed": self.seed,
            "output_dir": str(self.output),
            "overwrite": True,
        }
        args = ESPLConfig(**settings(ESPL, **options, per_device_eval_batch_size=96, **changes))
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
        self._learned(steps * args.generation_batch_size)

    def _watch(self, trainer: Any) -> None:
        """Keep the calls so far and the exact match of each training batch."""
        after = trainer._after_rewards

        def kept(batch: Any, totals: Any) -> None:
            if batch.position.is_training:
                self.curve.append((self.reflector.calls, round(share(correct(batch.rollouts)), 4)))
            after(batch, totals)

        trainer._after_rewards = kept

    def imitate(self, steps: int, mode: str) -> None:
        """Distill the prompt into the weights, with the rollouts of `steps` steps."""
        args = self.trainer.args
        rows = self.sandbox.train.select(
            range(steps * args.generation_batch_size // args.num_generations)
        )
        batch = {"per_device_train_batch_size": 32}
        self.trainer.distill(rows, num_train_epochs=IMITATION_EPOCHS, **batch)
        self._learned(len(rows) * args.num_generations)

    def _learned(self, rollouts: int) -> None:
        self.trainer.save_model(str(self.output))
        self.model = self.output
        self.prompt = self.trainer.final_prompt()
        self.rollouts += rollouts

    def gepa(self, steps: int, mode: str) -> None:
        """Optimise the prompt with the authors' package, for the rollouts of `steps` steps and one iteration."""
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
            reflection_lm=lambda asked: complete(self.reflector, asked).text,
            max_metric_calls=steps * batch,
            seed=self.seed,
        )
        self.prompt = SystemPrompt.of(optimised.best_candidate["system_prompt"])
        self.rollouts += optimised.total_metric_calls

    def rated(self) -> list[tuple[float, float, int]]:
        """Rating, exact match on some held-out questions and id of each prompt that was rated, under these weights."""
        if self.trainer is None or self.trainer.prompts.is_distilled:
            return []
        members = [member for member in self.trainer.population.members if member.matches]
        return [
            (
                round(one.rating.mu, 6),
                share(answers(self.sandbox, self.model, one.prompt, RATED_QUESTIONS)),
                one.prompt.id,
            )
            for one in members
        ]

    def others(self) -> dict[str, float]:
        """The value of the final prompt, and of the weights. The table's other three cells."""
        start = Path(self.sandbox.model)
        first = self.sandbox.root
        final = self.prompt
        pairs = {
            "base, first": (start, first),
            "base, final": (start, final),
            "trained, first": (self.model, first),
        }
        return {name: round(share(answers(self.sandbox, *pair)), 4) for name, pair in pairs.items()}


def answers(sandbox: Any, model: Path, prompt: Any, questions: int | None = None) -> str:
    """`1` or `0` for each held-out question, sampled at the temperature that all methods share."""
    from agentic_prompting import LLMEnvironment

    rows = list(sandbox.test)[:questions]
    changes = {"system_prompt": prompt.text, "sampling": {"temperature": TEMPERATURE}}
    return correct(ask(model, LLMEnvironment(sandbox.oracle), rows, **changes))


def _ends(sandbox: Any) -> list[str]:
    from agentic_prompting.sandbox import parse_question

    return [parse_question(row["question"], sandbox.oracle.world).chain[-1] for row in sandbox.test]


def leaks(world: str, seed: int) -> int:
    """Facts about held-out countries that the policy was shown before: what docs/evidence.md forbids."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.leaks import leaks as found

    return len(found(world, seed))
