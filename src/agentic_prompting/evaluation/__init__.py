"""Measuring: metrics, systems to compare, the harness that asks them, and an interval at every number.

[`load_metric`] (metrics as `evaluate.Metric`) is in `metric.py`, which imports `evaluate`; the optimisers are in
`optimise/`.
"""

from .answers import Answer, FunctionSystem, System, as_system, read_answer
from .harness import Evaluation, EvaluationStopped, EvaluationTask, evaluate_agent, load_evaluation_task
from .intervals import Estimate, bootstrap_interval, wilson_interval
from .meter import CallCount, MeteredChat
from .paired import PairedDifference, mcnemar, paired_difference
from .runs import Comparison, compare_runs, compare_systems, load_run, save_run
from .scores import METRICS, find_metrics
from .scoring import Result, format_scores, score_records
from .similarity import load_encoder, semantic_similarity
from .systems import AgentSystem, PromptedSystem, ProRefineSystem, SelfReflection
from .tables import differences_table, results_table, to_csv, to_json, to_latex, to_markdown, write_tables

__all__ = [
    "METRICS",
    "AgentSystem",
    "Answer",
    "CallCount",
    "Comparison",
    "Estimate",
    "Evaluation",
    "EvaluationStopped",
    "EvaluationTask",
    "FunctionSystem",
    "MeteredChat",
    "PairedDifference",
    "ProRefineSystem",
    "PromptedSystem",
    "Result",
    "SelfReflection",
    "System",
    "as_system",
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
    "read_answer",
    "results_table",
    "save_run",
    "score_records",
    "semantic_similarity",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "wilson_interval",
    "write_tables",
]
