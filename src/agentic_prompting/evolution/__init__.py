"""System prompts that evolve (E-SPL): prompts and their edits, ratings, selection, mutation, crossover, `evolve`.

No torch, no trl: [`ESPLTrainer`] uses this room beside the weight update, [`evolve`] without one.
"""

from .edits import Draft, Edit, EditReport, apply_edits
from .evolve import Evolution, EvolutionStopped, EvolveResult, StepLog, evolve
from .lineage import (
    EvolutionJournal,
    Lineage,
    attempt_records,
    journal_beside,
    lineage_of,
    read_journal,
    read_lineage,
)
from .operators import OperatorTrace, Outcome, breed, crossover, mutate
from .parsing import ParsedEdits, ProposedEdits, parse_edits
from .plotting import plot_lineage
from .population import Member, Population, load_state, word_diversity
from .ratings import Rating, crossover_rating, mutation_rating, ranks, rate
from .results import (
    Attempt,
    ProblemResult,
    PromptResult,
    best_result,
    common_means,
    question_of,
    scores_of,
    sole_wins,
    truth_of,
)
from .selection import RULES, optimistic_scores, select, selection_rule
from .settings import ESPLSettings, EvolveConfig
from .system_prompt import SystemPrompt

__all__ = [
    "RULES", "Attempt", "Draft", "ESPLSettings", "Edit", "EditReport", "Evolution", "EvolutionJournal",
    "EvolutionStopped", "EvolveConfig", "EvolveResult", "Lineage", "Member", "OperatorTrace", "Outcome",
    "ParsedEdits", "Population", "ProblemResult", "PromptResult", "ProposedEdits", "Rating", "StepLog",
    "SystemPrompt", "apply_edits", "attempt_records", "best_result", "breed", "common_means", "crossover",
    "crossover_rating", "evolve", "journal_beside", "lineage_of", "load_state", "mutate", "mutation_rating",
    "optimistic_scores", "parse_edits", "plot_lineage", "question_of", "ranks", "rate", "read_journal",
    "read_lineage", "scores_of", "select", "selection_rule", "sole_wins", "truth_of", "word_diversity",
]  # fmt: skip
