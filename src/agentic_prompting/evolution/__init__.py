"""System prompts that evolve (E-SPL): prompts and their edits, ratings, selection, mutation, crossover, `evolve`.

No torch, no trl: [`ESPLTrainer`] uses this room beside the weight update, [`evolve`] without one.
"""

from .account import Account
from .edits import Draft, Edit, EditReport, apply_edits
from .evidence import Attempt, Evidence, Trial, question_of, truth_of
from .evolve import Evolution, EvolutionStopped, EvolveResult, evolve
from .evolve_config import EvolveConfig, StepLog
from .journal import EvolutionJournal, attempt_records, journal_beside, read_journal, scores_of
from .lineage import Lineage, lineage_of, read_lineage
from .matrix import common_means, sole_wins
from .member import Member, word_diversity
from .operators import best_trial, breed, crossover, crossover_steps, mutate, mutation_steps
from .parsing import ParsedEdits, parse_edits
from .population import Population, load_state
from .ratings import Rating, crossover_rating, mutation_rating, ranks, rate
from .reflection import Answer, Conversation, Outcome, Reflection, drive, run_operators
from .selection import RULES, optimistic_scores, select, selection_rule
from .system_prompt import SystemPrompt
from .tree_picture import plot_lineage

__all__ = [
    "RULES",
    "Account",
    "Answer",
    "Attempt",
    "Conversation",
    "Draft",
    "Edit",
    "EditReport",
    "Evidence",
    "Evolution",
    "EvolutionJournal",
    "EvolutionStopped",
    "EvolveConfig",
    "EvolveResult",
    "Lineage",
    "Member",
    "Outcome",
    "ParsedEdits",
    "Population",
    "Rating",
    "Reflection",
    "StepLog",
    "SystemPrompt",
    "Trial",
    "apply_edits",
    "attempt_records",
    "best_trial",
    "breed",
    "common_means",
    "crossover",
    "crossover_rating",
    "crossover_steps",
    "drive",
    "evolve",
    "journal_beside",
    "lineage_of",
    "load_state",
    "mutate",
    "mutation_rating",
    "mutation_steps",
    "optimistic_scores",
    "parse_edits",
    "plot_lineage",
    "question_of",
    "ranks",
    "rate",
    "read_journal",
    "read_lineage",
    "run_operators",
    "scores_of",
    "select",
    "selection_rule",
    "sole_wins",
    "truth_of",
    "word_diversity",
]
