"""Arguments of [`ESPLTrainer`]."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..evolution import Reflection
from .config import MultiTurnGRPOConfig

_MODES = ("joint", "rl", "evolution", "reflection")


@dataclass
class ESPLConfig(MultiTurnGRPOConfig):
    """Arguments of [`ESPLTrainer`], with the paper's values (Appendix A and B, eq 1-4) as defaults.

    Args:
        mode (`str`, *optional*, defaults to `"joint"`):
            `joint`: prompts evolve and weights learn. `rl`: weights only, under the initial prompt. `evolution`:
            prompts only. `reflection`: prompts only, a population of one, no crossover.
        prompts_per_step (`int`, *optional*, defaults to `3`):
            M: system prompts tried in each batch.
        baseline (`str`, *optional*, defaults to `"normal"`):
            What is subtracted from a rollout's reward: `normal`, the mean over the N rollouts of the same problem
            under the same prompt (eq 1-2); `marginalize`, the mean over all M·N rollouts of the problem.
        window (`int`, *optional*, defaults to `10`):
            K: only the latest so many prompts are drawn.
        selection (`str`, *optional*, defaults to `"top_plus_random"`):
            How the M prompts are drawn; see `evolution/selection.py`.
        exploration (`float`, *optional*, defaults to `2.0`):
            λ of eq 3.
        delta_sigma (`float`, *optional*, defaults to `1.0`):
            Δσ: uncertainty added for a child.
        tie_tolerance (`float`, *optional*, defaults to `0.01`):
            Mean rewards this close are a tie.
        p_crossover (`float`, *optional*, defaults to `0.2`):
            Probability of a crossover after a batch.
        max_ops (`int`, *optional*, defaults to `2`):
            K_ops: edits per problem.
        reflect_on (`str`, *optional*, defaults to `"mixed"`):
            The problems a mutation looks at: `mixed`, those with differing rewards (the paper); `imperfect`, also
            those at which every attempt failed.
        editor (`str`, *optional*, defaults to `"reference"`):
            Who reflects: `reference`, the fixed LLM passed to the trainer (better, by Figure 15); or `current`, the
            policy being trained, in turns of `max_turn_tokens`, when its children are due: nothing overlaps then.
        evolution_lag (`int`, *optional*, defaults to `1`):
            A child joins so many batches later than in Algorithm 1, so that the reference LLM works while the weights
            are updated. 0 is the exact algorithm: each batch waits for the children of the last one.
        reflection_timeout (`float`, *optional*, defaults to `1800`):
            Seconds that the reference LLM may take for one batch, all its stages together. What is not there by then
            counts as a failed call: the batch has no child, which is logged, and training goes on. A model's own
            timeouts end a call earlier; this is for models that have none.
        prompt_place (`str`, *optional*, defaults to `"system"`):
            Where the prompt stands: `system` message or in front of the `user` message (the paper's maths template).
        islands (`int`, *optional*, defaults to `1`):
            Separate populations with migration (not in the paper).
        migrate_every (`int`, *optional*, defaults to `10`):
            Turns of every island between migrations.

    Raises:
        `ValueError`: If a value is out of range, or M·N does not divide the generation batch; says what would work.
    """

    mode: str = field(default="joint", metadata={"help": "joint, rl, evolution or reflection."})
    prompts_per_step: int = field(default=3, metadata={"help": "M: system prompts per batch."})
    baseline: str = field(default="normal", metadata={"help": "normal (eq 1-2) or marginalize."})
    window: int = field(default=10, metadata={"help": "K: the latest so many prompts are drawn."})
    selection: str = field(default="top_plus_random", metadata={"help": "How prompts are drawn."})
    exploration: float = field(default=2.0, metadata={"help": "Lambda of eq 3."})
    delta_sigma: float = field(default=1.0, metadata={"help": "Uncertainty added for a child."})
    tie_tolerance: float = field(default=0.01, metadata={"help": "Mean rewards this close are a tie."})
    p_crossover: float = field(default=0.2, metadata={"help": "Probability of a crossover after a batch."})
    max_ops: int = field(default=2, metadata={"help": "K_ops: edits per problem."})
    reflect_on: str = field(default="mixed", metadata={"help": "mixed (the paper) or imperfect."})
    editor: str = field(default="reference", metadata={"help": "Who reflects: reference, or current (the policy)."})
    evolution_lag: int = field(default=1, metadata={"help": "Batches that a child joins later; 0: exact algorithm."})
    reflection_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that the reference LLM may take for one batch."}
    )
    prompt_place: str = field(default="system", metadata={"help": "system or user."})
    islands: int = field(default=1, metadata={"help": "Separate populations with migration."})
    migrate_every: int = field(default=10, metadata={"help": "Turns of every island between migrations."})

    learning_rate: float = field(default=4e-5, metadata={"help": "Appendix A, with LoRA of rank 32."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Appendix A."})
    num_generations: int = field(default=5, metadata={"help": "N: rollouts per problem and prompt."})
    beta: float = field(default=0.0, metadata={"help": "No KL term with LoRA."})
    scale_rewards: str = field(default="none", metadata={"help": "eq 1-2 do not divide by a deviation."})
    # The sum over a rollout's tokens, as Algorithm 1's log-likelihood, up to the constant factor of its length limit.
    loss_type: str = field(default="dr_grpo", metadata={"help": "Sum over tokens, divided by a constant."})
    per_device_train_batch_size: int = field(default=15, metadata={"help": "One problem: M·N rollouts."})
    gradient_accumulation_steps: int = field(default=10, metadata={"help": "b = 10 problems a batch."})

    def __post_init__(self):
        _one_of("mode", self.mode, _MODES)
        _one_of("baseline", self.baseline, ("normal", "marginalize"))
        _one_of("editor", self.editor, ("reference", "current"))
        _one_of("prompt_place", self.prompt_place, ("system", "user"))
        if not 0 <= self.p_crossover <= 1:
            raise ValueError(f"p_crossover is a probability between 0 and 1, got {self.p_crossover}")
        if self.prompts_per_step < 1 or self.evolution_lag < 0:
            raise ValueError(
                f"prompts_per_step must be at least 1 and evolution_lag at least 0, got {self.prompts_per_step} and "
                f"{self.evolution_lag}"
            )
        if not self.reflection_timeout > 0:
            raise ValueError(f"reflection_timeout must be above 0 seconds, got {self.reflection_timeout}")
        self.reflection()  # raises for a wrong reflect_on
        super().__post_init__()
        self._check_batch()

    @property
    def evolves(self) -> bool:
        """Whether prompts have children."""
        return self.mode != "rl"

    @property
    def trains_weights(self) -> bool:
        return self.mode in ("joint", "rl")

    def reflection(self) -> Reflection:
        """The settings of the operators."""
        return Reflection(reflect_on=self.reflect_on, max_ops=self.max_ops)  # type: ignore[arg-type]

    def _check_batch(self) -> None:
        group = self.prompts_per_step * self.num_generations
        if self.generation_batch_size % group:
            below = self.generation_batch_size // group * group
            near = " or ".join(str(size) for size in (below, below + group) if size)
            raise ValueError(
                f"each problem takes prompts_per_step x num_generations = {self.prompts_per_step} x "
                f"{self.num_generations} = {group} rollouts, which does not divide the generation batch of "
                f"{self.generation_batch_size}: make that {near} (per_device_train_batch_size x processes x "
                "steps_per_generation)"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
