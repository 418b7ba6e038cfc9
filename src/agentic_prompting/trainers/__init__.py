"""The trainers. The only room that imports trl."""

from .config import MultiTurnGRPOConfig, PromptR1Config
from .espl import ESPLTrainer
from .espl_config import ESPLConfig
from .multi_turn_grpo import MultiTurnGRPOTrainer
from .prompt_r1 import PromptR1Trainer
from .stopping import TrainingInterrupted, TrainingStopped, checkpoint_on_interrupt
from .supervised import warm_start

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
