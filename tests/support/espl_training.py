"""Small E-SPL trainings on a tiny model, for tests: settings, a trainer, a reference LLM, samplers
of one word.
"""

from agentic_prompting import ESPLConfig, ESPLTrainer
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import BatchEngine, FreeText, Sample
from support.training import vars_for

EDIT = '```json\n[{"op": "add", "text": "Principle number %d."}]\n```'


def arguments(folder, **changes):
    return ESPLConfig(
        **{
            **vars_for(folder),
            "prompts_per_step": 2,
            "num_generations": 2,
            "per_device_train_batch_size": 8,  # two problems
            "gradient_accumulation_steps": 1,
            "max_steps": 4,
            "max_turn_tokens": 12,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "p_crossover": 0.0,
            **changes,
        }
    )


class Reference(ScriptedChat):
    """A reference LLM that adds a principle with a new number at every reflection."""

    def __init__(self, **options):
        self.children = 0
        super().__init__(self._say, **options)

    def _say(self, messages):
        request = messages[-1]["content"]
        if "JSON" not in request:
            return "It went wrong at the second step."
        self.children += 1
        return EDIT % self.children


class Writes:
    """A sampler that writes one of five words in turn, so that a reward can tell the rollouts
    apart.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.written = 0

    def __call__(self, requests):
        samples = []
        for _ in requests:
            self.written += 1
            word = ("Kenya", "Nairobi", "shilling", "Africa", "euro")[self.written % 5]
            samples.append(Sample(self.trainer.chat_format.turn_ids(word)))
        return samples


class WritesBySeed(Writes):
    """A sampler whose word depends on the request's seed alone."""

    def __call__(self, requests):
        words = ("Kenya", "Nairobi", "shilling", "Africa", "euro")
        return [
            Sample(self.trainer.chat_format.turn_ids(words[request.seed % 5]))
            for request in requests
        ]


def reward_by_word(rollout, **kwargs):
    worth = {"Kenya": 1.0, "Nairobi": 0.0, "shilling": 0.5, "Africa": 0.25, "euro": 0.75}
    return [worth.get(episode.answer, 0.0) for episode in rollout]


NOBODY = object()  # instead of a reference LLM


def trainer_for(
    policy, folder, rows, reference=None, prompt="Answer .\n[G0]. Ask first .", **changes
):
    trainer = ESPLTrainer(
        model=str(policy),
        reward_funcs=reward_by_word,
        reference=None
        if reference is NOBODY
        else reference
        if reference is not None
        else Reference(),
        args=arguments(folder, **changes),
        train_dataset=rows,
        initial_prompt=prompt,
        grammar=FreeText(),  # the tiny policy was saved with tags, for an environment
    )
    trainer.policy = BatchEngine(Writes(trainer), on_callers_thread=True)
    return trainer
