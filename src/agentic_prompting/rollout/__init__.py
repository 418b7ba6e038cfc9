"""Episodes: the grammar, the `Rollout`, the loop that plays them. Tokens and masks are made here and nowhere else."""

from .chat_format import ChatFormat
from .engine import BatchEngine, Engine, Job, gather, play_all, run_with_engine
from .grammar import FreeText, Grammar, TagGrammar, Turn, escape, parse_turn
from .play import (
    Environment,
    Limits,
    Observation,
    Policy,
    Rollout,
    Sample,
    Sampler,
    SampleRequest,
    observe,
    play,
    rollout_seed,
    turn_seed,
)
from .recording import STATUSES, RolloutFacts, RolloutLog, read_rollouts, rollout_metrics, rollout_record
from .spec import (
    PROMPT_R1_TEMPLATE,
    SPEC_FILE,
    AgentSpec,
    check_template,
    fill,
    fill_template,
    prompt_r1_template,
    rollout_from_trace,
    template_for,
)
from .text_format import TextFormat

# fmt: off
__all__ = [
    "PROMPT_R1_TEMPLATE",
    "SPEC_FILE",
    "STATUSES",
    "AgentSpec",
    "BatchEngine",
    "ChatFormat",
    "Engine",
    "Environment",
    "FreeText",
    "Grammar",
    "Job",
    "Limits",
    "Observation",
    "Policy",
    "Rollout",
    "RolloutFacts",
    "RolloutLog",
    "Sample",
    "SampleRequest",
    "Sampler",
    "TagGrammar",
    "TextFormat",
    "Turn",
    "check_template",
    "escape",
    "fill",
    "fill_template",
    "gather",
    "observe",
    "parse_turn",
    "play",
    "play_all",
    "prompt_r1_template",
    "read_rollouts",
    "rollout_from_trace",
    "rollout_metrics",
    "rollout_record",
    "rollout_seed",
    "run_with_engine",
    "template_for",
    "turn_seed",
]
