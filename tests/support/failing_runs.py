"""Training runs whose environment fails at chosen batches, and callbacks to compare them."""

import pickle

import torch
from transformers import TrainerCallback

from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import BatchEngine
from support.training import Acts, trainer_for


class Watch(TrainerCallback):
    """Keeps the weights and optimizer state after every step, and the next step's learning rate."""

    def __init__(self):
        self.weights = []
        self.optimizer = []
        self.rates = []

    def on_step_end(
        self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs
    ):
        self.weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        self.optimizer.append(pickle.dumps(optimizer.state_dict().get("state")))
        self.rates.append(lr_scheduler.get_last_lr()[0])


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Flaky(ScriptedChat):
    """A large LLM that fails while `down`."""

    def __init__(self):
        super().__init__(lambda messages: "the answer is Kenya .", fail_on=lambda number: self.down)
        self.down = False


def watched_run(policy, folder, rows, failing_batches, chat=None, scaled=False, **changes):
    """A run whose environment fails in the given batches, and what [`Watch`] kept of it.

    With `scaled` it has a gradient scaler, as in fp16; accelerate creates one on a GPU only.
    """
    chat = chat or Flaky()
    trainer = trainer_for(policy, folder, rows, chat, **{"max_failed_share": 1.0, **changes})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    play = trainer.player.play
    batches = iter(range(100))

    def play_while_down(rollouts, what):
        chat.down = next(batches) in failing_batches
        return play(rollouts, what)

    trainer.player.play = play_while_down
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    return trainer, watch
