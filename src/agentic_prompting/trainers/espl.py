"""E-SPL: system prompts evolve while the weights learn (arXiv 2602.14697, Algorithm 1).

Each problem of a batch is attempted N times under each of M system prompts. The rollouts serve twice: TRL's group
baseline over the N of one (problem, prompt) is the paper's V_i for the policy gradient, and the mean rewards rank the
prompts, whose ratings and children come of it. Who writes the children, and when, is in `reflecting.py`.

Every process holds the same population and does the same to it.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset

from ..evolution import (
    Attempt,
    EvolutionJournal,
    Outcome,
    Population,
    ProblemResult,
    PromptResult,
    SystemPrompt,
    attempt_records,
    best_result,
    journal_beside,
    load_state,
    question_of,
    scores_of,
    truth_of,
)
from ..llm import ChatModel
from ..records import atomic_write
from ..rollout import AgentSpec, Environment, Rollout
from .config import ESPLConfig
from .multi_turn_grpo import MultiTurnGRPOTrainer
from .reflecting import PolicyReflector, ReferenceReflector, ReflectionJob, transcript
from .stopping import stop
from .trl_batch import warm_start

logger = logging.getLogger(__name__)

_OF_A_LESSON = (  # what distillation takes from the trainer's arguments
    "learning_rate", "lr_scheduler_type", "adam_beta2", "weight_decay", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16", "use_cpu", "seed", "disable_tqdm",
)  # fmt: skip

POPULATION_FILE, PROMPT_FILE = "population.json", "system_prompt.txt"


class ESPLTrainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] under an evolving population of system prompts.

    Args:
        model (`str` or `PreTrainedModel`): The policy.
        reward_funcs (`Callable` or `list[Callable]`): As in [`MultiTurnGRPOTrainer`].
        args ([`ESPLConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`): Columns `question` and `answers`.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same, held out.
        reference ([`ChatModel`], *optional*): π_ref: summarises, criticises and edits. Not needed in mode `rl` and with
            `reflector="policy"`.
        initial_prompt ([`SystemPrompt`] or `str`, *optional*, defaults to `""`): The root of the evolution. A text with
            lines `[G0]. ...` is read as principles, any other as a preamble that principles are added to; for free text
            pass `SystemPrompt(text)`.
        population ([`Population`], *optional*): Instead of `initial_prompt`: a population of your own, with your own
            selection rule. The settings that make one (`window`, `selection`, ...) must then be left as they are.
        environment ([`Environment`], *optional*): What the policy may ask. Without one each rollout is a single turn,
            whose text is the answer.
        **kwargs: As in [`MultiTurnGRPOTrainer`]; `grammar` defaults to free text without an environment.

    Attributes:
        population ([`Population`]): Every system prompt that ever lived.

    Raises:
        `ValueError`: For arguments that cannot work; says which numbers would.
    """

    _name = "E-SPL"
    _config = ESPLConfig
    _default_output = "espl_output"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: ESPLConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        *,
        reference: ChatModel | None = None,
        initial_prompt: SystemPrompt | str = "",
        population: Population | None = None,
        environment: Environment | None = None,
        **kwargs: Any,
    ):
        args = self._checked(args)
        if args.evolves and reference is None and args.reflector == "reference":
            raise ValueError(
                f"mode={args.mode!r} needs a reference LLM to reflect: pass reference=, or use mode='rl', or "
                "reflector='policy' to let the policy do it"
            )
        if args.evolves and reference is not None and args.reflector == "policy":
            raise ValueError("with reflector='policy' the reference LLM would never be asked: pass reference=None")
        if args.eval_all and eval_dataset is None:
            raise ValueError("eval_all=True needs an eval_dataset: the rows that every prompt is tried on in the end")
        self.reference = reference
        self.population = _population(population, initial_prompt, args)
        self._playing = [self.population.best()]  # until the first batch draws its own
        self._pending: list[ReflectionJob] = []
        self._batches = 0  # training batches generated so far: the clock of the evolution
        self._journal = EvolutionJournal(journal_beside(Path(args.output_dir) / POPULATION_FILE))
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=100)  # attempts that a full disk has not taken
        self._held_out: list[float] = []  # rewards of the evaluation going on
        self._tried: SystemPrompt | None = None  # its prompt, if that is not the best one
        self._played: list[Rollout] | None = None  # this process's rollouts under the prompt that is being distilled
        self._distilled = False
        super().__init__(
            model=model,
            environment=environment,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self._reflector = ReferenceReflector(self) if args.reflector == "reference" else PolicyReflector(self)
        if args.baseline == "marginalize":
            # One group per problem, over all prompts: the mean over its M·N rollouts is then TRL's own baseline.
            self.num_generations = args.prompts_per_step * args.num_generations

    def roles(self, environment: Environment | None, functions: Sequence[Any]) -> dict[str, Any]:
        return {**super().roles(environment, functions), "reference": self.reference}

    # --- row -> prompt -------------------------------------------------------------------------------------------

    def rollouts_per_row(self) -> int:
        """M·N instead of N."""
        return self.args.prompts_per_step * self.args.num_generations

    def metadata(self, index: int) -> dict[str, Any]:
        """The system prompt of this slot of the batch; in evaluation the best one, or none after [`distill`]."""
        if not self.model.training:
            return {"system_prompt": (self._tried or self.final_prompt()).id}
        return {"system_prompt": self._playing[self._slot(index)].id}

    def prompt_under(self, row: Mapping[str, Any], notes: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """The row's conversation under that system prompt."""
        if notes["system_prompt"] is None:
            return super().prompt_under(row, notes)
        prompt = self.population.members[notes["system_prompt"]].prompt
        return self.chat_format.prompt(prompt.messages(self.spec.messages(row), self.args.prompt_place))

    def _slot(self, index: int) -> int:
        return (index // self.args.num_generations) % self.args.prompts_per_step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self._let_children_join()
            self._playing = self._drawn()
        return super()._generate_and_score_completions(inputs)

    def _drawn(self) -> list[SystemPrompt]:
        """The prompts of the next batch; in a phase of the weights the best one alone."""
        size = self.args.prompts_per_step
        if self.args.mode == "alternating" and self._mode() == "rl":
            return [self.population.best()] * size
        return self.population.select(size)

    def _mode(self) -> str:
        return self.args.mode_at(self.state.global_step)

    def final_prompt(self) -> SystemPrompt:
        """The prompt that the agent is evaluated and used under: the best one, or none after [`distill`]."""
        return SystemPrompt("") if self._distilled else self.population.best()

    # --- rewards -> ratings -> children --------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        totals = self.total_rewards(rewards)
        if self.model.training:
            self._evolve([None if reward != reward else reward for reward in totals.tolist()], inputs)
        else:
            self._held_out += totals[~totals.isnan()].tolist()
            if self._played is not None:
                self._played += [row["rollout"] for row in inputs if row["rollout"].status != "failed"]
        return rewards

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s, under the best prompt, of which the mean reward is noted. Of several data sets the
        last one's counts."""
        self._held_out = []
        metrics = super().evaluate(*args, **kwargs)
        if (prompt := self._tried or self.final_prompt()).id is not None:
            self.population.note_held_out(prompt, self._held_out)
        return metrics

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s; with `eval_all` every prompt that played is tried in the end, and with
        `distill_epochs` the best one is then left out."""
        self._distilled = False
        output = super().train(*args, **kwargs)
        if self.args.eval_all:
            self.evaluate_prompts()
        if self.args.distill_epochs:
            self.distill(num_train_epochs=self.args.distill_epochs)
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL's, but for a prompt that is only tried, which is no point of the run's curve."""
        if self._tried is None:
            super().log(logs, *args, **kwargs)
        else:
            self._metrics["eval"].clear()

    def evaluate_prompts(self, prompts: Sequence[SystemPrompt] | None = None, **kwargs: Any) -> dict[int, float]:
        """Try system prompts on the held-out rows, under the weights as they are (Figure 8).

        Args:
            prompts (`Sequence[SystemPrompt]`, *optional*): Members of the population; all that were rated by default.
            **kwargs: Of [`~transformers.Trainer.evaluate`].

        Returns:
            `dict[int, float]`: The mean reward by id, where there is one; also kept as `held_out` of the [`Member`].
        """
        members, scores = self.population.members, {}
        for prompt in prompts or [member.prompt for member in members if member.matches]:
            self._tried = prompt
            try:
                self.evaluate(**kwargs)
            finally:
                self._tried = None
            if self._held_out:
                scores[prompt.id or 0] = sum(self._held_out) / len(self._held_out)
        return scores

    def distill(self, rows: Dataset | None = None, **sft_arguments: Any) -> None:
        """Context distillation: put into the weights what the best prompt brings about, and leave the prompt out.

        The policy plays the rows under its best prompt, `num_generations_eval` times each, and then imitates its own
        turns in the same conversations without that prompt. That is the likelihood of samples of the teacher, a
        student's forward KL but for a constant. From then on the agent is evaluated, saved and used without the prompt.

        Args:
            rows (`Dataset`, *optional*): By default all of `train_dataset`.
            **sft_arguments: Of [`~trl.SFTConfig`]: `num_train_epochs`, `learning_rate`, ... By default the trainer's
                own rate, schedule and batches, and one epoch.

        Raises:
            `ValueError`: The weights are cut into shards (DeepSpeed, FSDP), or no rollout could be played to its end.
        """
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError("distill needs whole weights on every process, without DeepSpeed or FSDP")
        prompt, self._played, self._distilled = self.population.best(), [], False
        try:
            super().evaluate(self.train_dataset if rows is None else rows, metric_key_prefix="distill")
            bare = [self.chat_format.prompt_ids(prompt.left_out(rollout.row["prompt"])) for rollout in self._played]
            lessons = [replace(rollout, prompt_ids=ids) for rollout, ids in zip(self._played, bare, strict=True)]
        finally:
            self._played = None
        same = {name: getattr(self.args, name) for name in _OF_A_LESSON}
        warm_start(
            self.model,
            self.chat_format.tokenizer,
            gather_object(lessons),
            Path(self.args.output_dir) / "distill",
            **{**same, "num_train_epochs": 1, **sft_arguments},
        )
        self._distilled = True

    def _evolve(self, rewards: Sequence[float | None], rows: Sequence[Mapping[str, Any]]) -> None:
        """Rate the prompts of the batch, and have the next generation written."""
        if self._batches == 0 and self.accelerator.is_main_process:
            self._journal.keep_before(0)  # of another run in the same folder
        # In mode `rl` nobody reads them, and the texts of a batch are megabytes.
        told, evolves = [("", "", "")] * len(rewards), self._mode() != "rl"
        if evolves:
            told = gather_object([(question_of(row), truth_of(row), transcript(row["rollout"])) for row in rows])
        best: PromptResult | None = None
        most: list[PromptResult] = []  # of the largest cohort, whose best is reflected on
        means: list[float] = []
        for results in self._results(rewards, told, gather_object(self._notes)):
            values = self.population.record([result.prompt for result in results], [result.row for result in results])
            means += [value for value in values if value is not None]
            if not most or len(results[0].row) >= len(most[0].row):
                best, most = best_result(results, values), results
        self._log_population(means)
        if evolves and best is not None:
            # Drawn on every process alike, whether or not there is anything to cross: the generators stay in step.
            crosses = self.args.mode != "reflection" and self.population.rng.random() < self.args.p_crossover
            ratings = {result.prompt.id or 0: self.population.rating(result.prompt) for result in most}
            self._pending.append(
                ReflectionJob(self._batches, best, most if crosses else None, scores_of(most), ratings)
            )
            self._reflector.begin(self._pending[-1])
        self._batches += 1

    def _results(
        self, rewards: Sequence[float | None], told: Sequence[tuple[str, str, str]], notes: Sequence[Mapping[str, Any]]
    ) -> list[list[PromptResult]]:
        """The batch as the operators read it: per prompt, per problem, the N attempts (the order of the sampler). Apart
        for problems that were played under other prompts, as their groups were started earlier: only under matched
        conditions do rewards say which prompt is better. The latest drawn come last."""
        n, rows, members = self.args.num_generations, self.rollouts_per_row(), self.population.members
        cells: dict[tuple[int, ...], list[list[ProblemResult]]] = {}
        for first in range(0, len(rewards), rows):
            starts = range(first, first + rows, n)
            drawn = tuple(notes[start]["system_prompt"] for start in starts)
            question, truth, _ = told[first]  # in the same words for every prompt: a row's own `prompt` has the slot's
            for slot, start in zip(cells.setdefault(drawn, [[] for _ in starts]), starts, strict=True):
                attempts = tuple(Attempt(told[i][2], rewards[i]) for i in range(start, start + n))
                slot.append(ProblemResult(question, truth, attempts))
        return [
            [PromptResult(members[name].prompt, tuple(row)) for name, row in zip(drawn, slots, strict=True)]
            for drawn, slots in cells.items()
        ]

    def _let_children_join(self) -> None:
        """Add the children that are due: those of the batch `evolution_lag` before the last one, and older.

        Due by the clock, not by the wall: a run does not depend on how fast the reference LLM is, and training waits
        where it is slower than `evolution_lag` steps.
        """
        while self.args.evolves and self._pending and self._pending[0].batch < self._batches - self.args.evolution_lag:
            job = self._pending.pop(0)
            outcomes = self._reflector.finish(job)
            fatal = next((o.error for o in outcomes if o.error is not None and o.error.fatal), None)
            if fatal is not None and self.args.reflector == "reference":
                self._pending.insert(0, job)  # asked for again when training goes on
                stop(self, f"the reference LLM failed for good with {fatal.kind}: {fatal}")
            self._join(job, outcomes)

    def _join(self, job: ReflectionJob, outcomes: Sequence[Outcome]) -> None:
        """With the rating that Algorithm 1 gives a child: of its parents at the batch it was made from."""
        children = []
        for outcome in outcomes:
            self._log_outcome(outcome)
            child = outcome.child and replace(outcome.child, born_at=self._batches)
            children.append(child and self.population.add(child, self.population.child_rating(child, job.ratings)))
        if self.accelerator.is_main_process:
            self._note(attempt_records(job.batch, outcomes, children, job.scores, self.population))

    def _note(self, attempts: Sequence[dict[str, Any]]) -> None:
        """Into the journal. What a full disk does not take waits for the next time: no reason to end a run."""
        late = bool(self._unwritten)
        self._unwritten.extend(attempts)
        try:
            if late:  # some of it may be there
                self._journal.keep_before(self._unwritten[0]["step"])
            self._journal.append(list(self._unwritten))
            self._unwritten.clear()
        except OSError as error:
            if not late:
                logger.warning("%s cannot be written, training goes on without: %s", self._journal.path, error)

    # --- logs, saving, resuming ----------------------------------------------------------------------------------

    def _log_population(self, values: Sequence[float]) -> None:
        best = self.population.rating(self.population.best())
        metrics = {
            "population/size": float(len(self.population.members)),
            "population/diversity": self.population.diversity(),
            "population/best_mu": best.mu,
            "population/best_sigma": best.sigma,
        }
        if values:
            metrics |= {"population/value_best": max(values), "population/value_worst": min(values)}
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _log_outcome(self, outcome: Outcome) -> None:
        logged = self._metrics["train"]
        logged[f"evolution/{outcome.operator}_children"].append(float(outcome.child is not None))
        logged[f"evolution/{outcome.operator}_failed"].append(float(outcome.failed))
        logged["evolution/calls"].append(float(outcome.counts["calls"]))
        logged["evolution/failed_calls"].append(float(outcome.counts["failed_calls"]))
        logged["evolution/cost_usd"].append(outcome.usage.cost_usd)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One step; in the modes and phases that train no weights the rollouts and ratings of one, without a backward
        pass."""
        if self._mode() in ("joint", "rl"):
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self._timed_inputs(inputs)
        return self._pass_over()

    def state_dict(self) -> dict[str, Any]:
        """The evolution as plain JSON: population, clock, and what the reference LLM is still at work on."""
        return {
            "population": self.population.state_dict(),
            "batches": self._batches,
            "pending": [job.to_json() for job in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`ESPLTrainer.state_dict`]. Unfinished reflections are asked for again when they are due."""
        self.population.load_state_dict(state["population"])
        self._batches = state["batches"]
        self._pending = [ReflectionJob.from_json(saved) for saved in state["pending"]]

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        atomic_write(folder / PROMPT_FILE, self.final_prompt().text)
        state = self.state_dict()
        if self.staging is None:  # a model, which may be shared; what is at work holds rows and rollouts
            state["pending"] = []
        atomic_write(folder / POPULATION_FILE, json.dumps(state, indent=1, ensure_ascii=False))

    def saved_spec(self) -> AgentSpec:
        """As in evaluation here: under the best prompt, or none after [`distill`]."""
        prompt = self.final_prompt()
        if not prompt.text:
            return self.spec
        if self.args.prompt_place == "user":
            return replace(self.spec, prompt_template=f"{prompt.text}\n\n{self.spec.prompt_template}")
        if self.args.prompt_place == "after":
            return replace(self.spec, prompt_template=f"{self.spec.prompt_template}\n\n{prompt.text}")
        own = self.spec.system_prompt
        text = f"{prompt.text}\n\n{own}" if own else prompt.text
        return replace(self.spec, system_prompt=text, join_system_prompt=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / POPULATION_FILE
        if checkpoint is not None and path.exists():
            load_state(path, self.load_state_dict)
            if self.args.evolves and self.state.global_step < self.state.max_steps:
                for job in self._pending:
                    self._reflector.begin(job)
        if self.accelerator.is_main_process:  # what a life that was lost did after this will be done again
            self._journal.keep_before(self._pending[0].batch if self._pending else self._batches)


def _population(population: Population | None, initial_prompt: SystemPrompt | str, args: ESPLConfig) -> Population:
    """The population to train with: the given one, or a new one from the root that `initial_prompt` is."""
    if population is not None:
        if initial_prompt:
            raise ValueError("initial_prompt would be ignored: population= brings its own prompts")
        if args.mode == "reflection" and population.window != 1:
            raise ValueError("mode='reflection' needs a Population with window=1")
        args.check_own_population()
        return population
    return args.population(SystemPrompt.of(initial_prompt), args.seed, window=1 if args.mode == "reflection" else None)
