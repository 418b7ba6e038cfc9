"""Small Prompt-R1 trainings on a tiny model, for tests and benchmarks: settings, a trainer, a
sampler that acts.
"""

from itertools import groupby
from pathlib import Path

from agentic_prompting import (
    LLMEnvironment,
    PromptR1Config,
    PromptR1Trainer,
)
from agentic_prompting.rollout import BatchEngine, Sample
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE

ASK = (
    "<think> first find the country </think> <interaction_prompt> which country ? "
    "</interaction_prompt>"
)
END = "<think> done </think> <answer> {} </answer>"
# Settings of a training that plays a step ahead.
LEAD = {
    "async_lead": 1,
    "max_staleness": 2,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_turn_tokens": 24,
}


def arguments(folder, **changes):
    return PromptR1Config(
        **{
            "output_dir": str(folder),
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "max_turns": 3,
            "max_turn_tokens": 24,
            "max_completion_length": 160,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "lr_scheduler_type": "constant",
            **changes,
        }
    )


def trainer_for(
    policy, folder, rows, chat=None, kind=PromptR1Trainer, environment=None, options=None, **changes
):
    return kind(
        model=str(policy) if isinstance(policy, str | Path) else policy,
        environment=environment or LLMEnvironment(chat if chat is not None else Oracle()),
        args=arguments(folder, **changes),
        train_dataset=rows,
        **{"prompt_template": SANDBOX_TEMPLATE, **(options or {})},
    )


class Acts:
    """A sampler that asks once and then answers: right for every other rollout, so that there is an
    advantage.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.asked = 0
        self.answered = 0

    def __call__(self, requests):
        return [self._turn(request) for request in requests]

    def _turn(self, request):
        chat_format = self.trainer.chat_format
        tag = chat_format.tokenizer.convert_tokens_to_ids("<interaction_response>")
        if tag not in request.context:
            self.asked += 1
            return Sample(chat_format.turn_ids(ASK))
        self.answered += 1
        question = chat_format.tokenizer.decode(request.context)
        row = next(row for row in self.trainer.train_dataset if row["question"] in question)
        return Sample(
            chat_format.turn_ids(END.format(row["answers"][0] if self.answered % 2 else "yen"))
        )


def one_batch(trainer, sampler=Acts):
    """The inputs of one training step, from real rollouts of a sampler that acts."""
    trainer.policy = BatchEngine(sampler(trainer), on_callers_thread=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by `train` at its start
    rows = [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    return trainer._generate_and_score_completions(rows)


def vars_for(folder):
    return {
        "output_dir": str(folder),
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "max_turns": 2,
        "max_turn_tokens": 8,
        "max_completion_length": 40,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def rows_of(inputs):
    """The rows of a batch of TRL's loss: ids of the prompt, ids of the completion, which of those
    are in the loss.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    for prompt, is_prompt, ids, is_own, counts in zip(
        *(inputs[name] for name in names), strict=True
    ):
        own = is_own.bool()
        yield prompt[is_prompt.bool()].tolist(), ids[own].tolist(), (counts[own] > 0).tolist()


def rows_learned(trainer):
    """Train, and return the rows of the loss, as [`rows_of`] has them; the weights have moved."""
    weight = trainer.model.lm_head.weight
    rows = []
    loss_of = trainer._compute_loss
    before = weight.clone()

    def watched_loss(model, inputs):
        rows.extend(rows_of(inputs))
        return loss_of(model, inputs)

    trainer._compute_loss = watched_loss
    trainer.train()
    assert (weight != before).any() and weight.isfinite().all()
    return rows


def samples_in(rows):
    """The samples that the loss has, each as the ids before it and its own."""
    for prompt, ids, in_loss in rows:
        at = 0
        for is_own, run in groupby(in_loss):
            end = at + len(list(run))
            if is_own:
                yield (*prompt, *ids[:at]), tuple(ids[at:end])
            at = end
