"""Arguments of [`ESPLTrainer`]."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..evolution import ESPLSettings
from ..evolution.population import one_of
from .config import MultiTurnGRPOConfig

_MODES = ("joint", "rl", "evolution", "reflection")


@dataclass
class ESPLConfig(ESPLSettings, MultiTurnGRPOConfig):
    """Arguments of [`ESPLTrainer`]: the settings of [`ESPLSettings`], those of [`MultiTurnGRPOConfig`] with the paper's
    values (Appendix A) as defaults, and these.

    Args:
        mode (`str`, *optional*, defaults to `"joint"`):
            `joint`: prompts evolve and weights learn. `rl`: weights only, under the initial prompt. `evolution`:
            prompts only. `reflection`: prompts only, a population of one, no crossover.
        baseline (`str`, *optional*, defaults to `"normal"`):
            What is subtracted from a rollout's reward: `normal`, the mean over the N rollouts of the same problem
            under the same prompt (eq 1-2); `marginalize`, the mean over all M·N rollouts of the problem.
        reflector (`str`, *optional*, defaults to `"reference"`):
            Who reflects: `reference`, the fixed LLM passed to the trainer (better, by Figure 15); or `policy`, the
            model being trained, in turns of `max_turn_tokens`, when its children are due: nothing overlaps then.
        evolution_lag (`int`, *optional*, defaults to `1`):
            A child joins so many batches later than in Algorithm 1, so that the reference LLM works while the weights
            are updated. 0 is the exact algorithm: each batch waits for the children of the last one.
        reflection_timeout (`float`, *optional*, defaults to `1800`):
            Seconds that the reference LLM may take for one batch, all its stages together. What is not there by then
            counts as a failed call: the batch has no child, which is logged, and training goes on. A model's own
            timeouts end a call earlier; this is for models that have none.

    Raises:
        `ValueError`: If a value is out of range, or M·N does not divide the generation batch; says what would work.
    """

    mode: str = field(default="joint", metadata={"help": "joint, rl, evolution or reflection."})
    baseline: str = field(default="normal", metadata={"help": "normal (eq 1-2) or marginalize."})
    reflector: str = field(default="reference", metadata={"help": "Who reflects: reference, or policy."})
    evolution_lag: int = field(default=1, metadata={"help": "Batches that a child joins later; 0: exact algorithm."})
    reflection_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that the reference LLM may take for one batch."}
    )

    learning_rate: float = field(default=4e-5, metadata={"help": "Appendix A, with LoRA of rank 32."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Appendix A."})
    beta: float = field(default=0.0, metadata={"help": "No KL term with LoRA."})
    scale_rewards: str = field(default="none", metadata={"help": "eq 1-2 do not divide by a deviation."})
    # The sum over a rollout's tokens, as Algorithm 1's log-likelihood, up to the constant factor of its length limit.
    loss_type: str = field(default="dr_grpo", metadata={"help": "Sum over tokens, divided by a constant."})
    per_device_train_batch_size: int = field(default=15, metadata={"help": "One problem: M·N rollouts."})
    gradient_accumulation_steps: int = field(default=10, metadata={"help": "b = 10 problems a batch."})

    def __post_init__(self):
        one_of("mode", self.mode, _MODES)
        one_of("baseline", self.baseline, ("normal", "marginalize"))
        one_of("reflector", self.reflector, ("reference", "policy"))
        if self.evolution_lag < 0:
            raise ValueError(f"evolution_lag must be at least 0, got {self.evolution_lag}")
        if not self.reflection_timeout > 0:
            raise ValueError(f"reflection_timeout must be above 0 seconds, got {self.reflection_timeout}")
        ESPLSettings.__post_init__(self)
        MultiTurnGRPOConfig.__post_init__(self)
        self._check_batch()

    @property
    def evolves(self) -> bool:
        """Whether prompts have children."""
        return self.mode != "rl"

    @property
    def trains_weights(self) -> bool:
        return self.mode in ("joint", "rl")

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
