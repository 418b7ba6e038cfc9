"""Episodes: the grammar, the `Rollout`, the loop that plays them. Tokens and masks are made here and nowhere else."""

from .chat_format import ChatFormat
from .grammar import FreeText, Grammar, TagGrammar, Turn, defuse, parse_turn
from .loop import Limits, rollout_seed, run_rollouts, turn_seed
from .metrics import RolloutFacts, rollout_metrics
from .recording import RolloutLog, read_rollouts, rollout_record
from .spec import SPEC_FILE, AgentSpec
from .templates import PROMPT_R1_TEMPLATE, check_template, fill_template, prompt_r1_template
from .traces import rollout_from_trace
from .types import Environment, Observation, Rollout, Sample, Sampler, SampleRequest

__all__ = [
    "PROMPT_R1_TEMPLATE",
    "SPEC_FILE",
    "AgentSpec",
    "ChatFormat",
    "Environment",
    "FreeText",
    "Grammar",
    "Limits",
    "Observation",
    "Rollout",
    "RolloutFacts",
    "RolloutLog",
    "Sample",
    "SampleRequest",
    "Sampler",
    "TagGrammar",
    "Turn",
    "check_template",
    "defuse",
    "fill_template",
    "parse_turn",
    "prompt_r1_template",
    "read_rollouts",
    "rollout_from_trace",
    "rollout_metrics",
    "rollout_record",
    "rollout_seed",
    "run_rollouts",
    "turn_seed",
]
