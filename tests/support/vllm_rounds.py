"""An environment in which any text of a random policy continues for some rounds, and a trainer
whose weights change.

For vllm_runs.py and test_vllm_weights.py.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from agentic_prompting import MultiTurnGRPOTrainer
from agentic_prompting.rollout import Observation, TagGrammar
from agentic_prompting.rollout.grammar import Turn
from support.training import arguments


@dataclass(frozen=True)
class Asks(TagGrammar):
    """A grammar in which every turn is a request, so that a random model's episodes continue."""

    def parse(self, text):
        return Turn(text, "act", True, request=text)


class Rounds:
    """An environment with the row's number of replies, of uneven length."""

    grammar = Asks()

    async def step(self, rollout):
        if len(rollout.turns) >= rollout.row["rounds"]:
            return None
        return Observation(text="Nairobi " * (1 + rollout.seed % 3))


def by_sum(rollout):
    return float(sum(rollout.ids) % 7)


def trainer_of_rounds(policy, folder, environment=None, reward=by_sum, peft_config=None, **changes):
    """The rows of one process have 1 round, those of the other 3, and prompts of other lengths."""
    prompts = [[{"role": "user", "content": "Kenya " * (1 + 3 * i)}] for i in range(8)]
    rows = [
        {"prompt": prompt, "rounds": 1 + 2 * (i % 2), "question": "Kenya"}
        for i, prompt in enumerate(prompts)
    ]
    settings = {
        "num_generations": 4,
        "max_steps": 3,
        "max_turn_tokens": 6,
        "shuffle_dataset": False,
        "use_vllm": True,
        "max_completion_length": 80,
        "learning_rate": 1e-2,
        "vllm_mode": "server",
    }
    return MultiTurnGRPOTrainer(
        model=str(policy),
        environment=environment or Rounds(),
        reward_funcs=reward
        and (lambda rollout, **kwargs: [reward(episode) for episode in rollout]),
        args=arguments(Path(folder), **{**settings, **changes}),
        train_dataset=Dataset.from_list(rows),
        peft_config=peft_config,
    )
