"""The trainers. The only folder that imports trl."""

from .checkpointing.interrupts import TrainingInterrupted, checkpoint_on_interrupt
from .checkpointing.stop_training import TrainingStopped
from .config import ESPLConfig, MultiTurnGRPOConfig, PromptR1Config
from .espl import ESPLTrainer
from .grpo import MultiTurnGRPOTrainer
from .prompt_r1 import PromptR1Trainer
from .warm_start import warm_start

__all__ = [
    "ESPLConfig",
    "ESPLTrainer",
    "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer",
    "PromptR1Config",
    "PromptR1Trainer",
    "TrainingInterrupted",
    "TrainingStopped",
    "checkpoint_on_interrupt",
    "warm_start",
]
