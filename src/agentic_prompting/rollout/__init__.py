"""Episodes: the grammar, the `Rollout`, the loop that plays them. Tokens and masks are made here and nowhere else."""

from .chat_format import ChatFormat, TextFormat
from .engine import BatchEngine, Engine, Job, play_all, run_with_engine
from .environment import RESET_ERROR, Environment, Environments, as_environment, reset_rows
from .grammar import FreeText, Grammar, TagGrammar, Turn, escape, parse_turn
from .plain_text import PlainText
from .play import observe, play, sample_turn
from .recording import (
    STATUSES,
    RolloutFacts,
    RolloutLog,
    metrics_by_environment,
    read_rollouts,
    rollout_metrics,
    rollout_record,
)
from .spec import (
    PROMPT_R1_TEMPLATE,
    SPEC_FILE,
    AgentSpec,
    check_template,
    fill_template,
    prompt_r1_template,
    rollout_from_trace,
    template_for,
)
from .tool_templates import find_tool_problem
from .turn_reader import CallText, FunctionCall, TurnText, load_json, read_call, remove_closed_thoughts, split_turn
from .types import (
    Limits,
    Observation,
    Policy,
    Rollout,
    Sample,
    Sampler,
    SampleRequest,
    Status,
    TokenSequence,
    rollout_seed,
    transcript,
    turn_seed,
)

# fmt: off
__all__ = [
    "PROMPT_R1_TEMPLATE",
    "RESET_ERROR",
    "SPEC_FILE",
    "STATUSES",
    "AgentSpec",
    "BatchEngine",
    "CallText",
    "ChatFormat",
    "Engine",
    "Environment",
    "Environments",
    "FreeText",
    "FunctionCall",
    "Grammar",
    "Job",
    "Limits",
    "Observation",
    "PlainText",
    "Policy",
    "Rollout",
    "RolloutFacts",
    "RolloutLog",
    "Sample",
    "SampleRequest",
    "Sampler",
    "Status",
    "TagGrammar",
    "TextFormat",
    "TokenSequence",
    "Turn",
    "TurnText",
    "as_environment",
    "check_template",
    "escape",
    "fill_template",
    "find_tool_problem",
    "load_json",
    "metrics_by_environment",
    "observe",
    "parse_turn",
    "play",
    "play_all",
    "prompt_r1_template",
    "read_call",
    "read_rollouts",
    "remove_closed_thoughts",
    "reset_rows",
    "rollout_from_trace",
    "rollout_metrics",
    "rollout_record",
    "rollout_seed",
    "run_with_engine",
    "sample_turn",
    "split_turn",
    "template_for",
    "transcript",
    "turn_seed",
]
