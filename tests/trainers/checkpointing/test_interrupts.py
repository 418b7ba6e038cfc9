"""The first Ctrl-C ends training after its step, the second at once."""

import signal
import threading
import time

import pytest
from transformers import TrainerControl, TrainerState

from agentic_prompting.trainers.checkpointing import interrupts


class FakeTrainer:
    """As much of a trainer as the handling of signals needs."""

    def __init__(self, folder):
        self.args = type(
            "Args", (), {"process_index": 0, "world_size": 1, "output_dir": str(folder)}
        )()
        self.state = TrainerState(global_step=4)
        self.control = TrainerControl()
        self.callbacks = []
        self.add_callback = self.callbacks.append
        self.remove_callback = self.callbacks.remove

    def step(self):
        self.state.global_step += 1
        for callback in self.callbacks:
            callback.on_step_end(self.args, self.state, self.control)


def test_signals_while_training(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(interrupts, "SAME_SIGNAL_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGINT)
    trainer = FakeTrainer(tmp_path)
    with interrupts.checkpoint_on_interrupt(trainer):
        trainer.step()
    assert not trainer.control.should_save
    assert signal.getsignal(signal.SIGINT) is before
    assert not trainer.callbacks

    with (
        pytest.raises(
            interrupts.TrainingInterrupted,
            match=r'after step 6, .*train\(resume_from_checkpoint=".*checkpoint-6"\)$',
        ),
        interrupts.checkpoint_on_interrupt(trainer),
    ):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # passed on by the launcher: the same one
        trainer.step()
        assert trainer.control.should_save and trainer.control.should_training_stop
    assert capfd.readouterr().err.count("finishing this step") == 1

    with pytest.raises(KeyboardInterrupt) as second, interrupts.checkpoint_on_interrupt(trainer):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.25)
        signal.raise_signal(signal.SIGINT)
    assert second.type is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is before

    def elsewhere():
        with interrupts.checkpoint_on_interrupt(trainer):
            assert not trainer.callbacks and signal.getsignal(signal.SIGINT) is before

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
