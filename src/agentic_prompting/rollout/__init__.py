"""Episodes: the grammar, the `Rollout`, the loop that plays them. Tokens and masks are made here and nowhere else."""

from .chat_format import ChatFormat
from .engine import BatchEngine, Engine, Job, gather, lend, play_all
from .grammar import FreeText, Grammar, TagGrammar, Turn, escape, parse_turn
from .metrics import RolloutFacts, rollout_metrics
from .play import Limits, observe, play, rollout_seed, turn_seed
from .recording import RolloutLog, read_rollouts, rollout_record
from .spec import SPEC_FILE, AgentSpec
from .templates import PROMPT_R1_TEMPLATE, check_template, fill_template, prompt_r1_template
from .traces import rollout_from_trace
from .types import Environment, Observation, Policy, Rollout, Sample, Sampler, SampleRequest

__all__ = [
    "PROMPT_R1_TEMPLATE",
    "SPEC_FILE",
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
    "Turn",
    "check_template",
    "escape",
    "fill_template",
    "gather",
    "lend",
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
    "turn_seed",
]
