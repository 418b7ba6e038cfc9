"""Evaluation: metrics, systems to compare, `evaluate_agent`, which asks them, and intervals for all
numbers.

The papers' tables, and the optimisers that they compare with, are reproduced with it in
`benchmarks/paper_tables/`.
"""

from ..rewards import read_answer
from .comparisons import Comparison, compare_runs, compare_systems
from .evaluate import Evaluation, EvaluationStopped, evaluate_agent
from .evaluation_tasks import EvaluationTask, load_evaluation_task
from .intervals import (
    Estimate,
    PairedDifference,
    bootstrap_interval,
    mcnemar,
    paired_difference,
    wilson_interval,
)
from .metrics import METRIC_PATH, METRICS, find_metrics, load_encoder, semantic_similarity
from .pool_systems import (
    BestOfSystem,
    OracleRouterSystem,
    RandomPlanSystem,
    RouterSystem,
    WorkerSystem,
    baselines_at_cost,
    baselines_of_pool,
)
from .repeats import pass_at_k
from .saved_runs import load_run, save_run
from .scoring import Result, format_scores, score_records
from .systems import (
    AgentSystem,
    Answer,
    FunctionSystem,
    PromptedSystem,
    ProRefineSystem,
    System,
)
from .tables import (
    differences_table,
    repeats_table,
    results_table,
    to_json,
    to_markdown,
    write_tables,
)

__all__ = [
    "METRICS",
    "METRIC_PATH",
    "AgentSystem",
    "Answer",
    "BestOfSystem",
    "Comparison",
    "Estimate",
    "Evaluation",
    "EvaluationStopped",
    "EvaluationTask",
    "FunctionSystem",
    "OracleRouterSystem",
    "PairedDifference",
    "ProRefineSystem",
    "PromptedSystem",
    "RandomPlanSystem",
    "Result",
    "RouterSystem",
    "System",
    "WorkerSystem",
    "baselines_at_cost",
    "baselines_of_pool",
    "bootstrap_interval",
    "compare_runs",
    "compare_systems",
    "differences_table",
    "evaluate_agent",
    "find_metrics",
    "format_scores",
    "load_encoder",
    "load_evaluation_task",
    "load_run",
    "mcnemar",
    "paired_difference",
    "pass_at_k",
    "read_answer",
    "repeats_table",
    "results_table",
    "save_run",
    "score_records",
    "semantic_similarity",
    "to_json",
    "to_markdown",
    "wilson_interval",
    "write_tables",
]
