"""System prompts that evolve (E-SPL): prompts and their edits, ratings, selection, mutation, crossover, `evolve`.

No torch, no trl: [`ESPLTrainer`] uses this room beside the weight update, [`evolve`] without one.
"""

from .edits import Draft, Edit, EditReport, apply_edits
from .evidence import Attempt, Evidence, Trial, question_of, truth_of
from .evolve import Evolution, EvolutionStopped, EvolveResult, evolve
from .evolve_config import EvolveConfig, StepLog
from .matrix import common_means, sole_wins
from .member import Member, word_diversity
from .operators import best_trial, breed, crossover, crossover_steps, mutate, mutation_steps
from .parsing import ParsedEdits, parse_edits
from .population import Population
from .ratings import Rating, crossover_rating, mutation_rating, ranks, rate
from .reflection import Answer, Conversation, Outcome, Reflection, drive, run_operators
from .selection import RULES, optimistic_scores, select, selection_rule
from .system_prompt import SystemPrompt

__all__ = [
    "RULES",
    "Answer",
    "Attempt",
    "Conversation",
    "Draft",
    "Edit",
    "EditReport",
    "Evidence",
    "Evolution",
    "EvolutionStopped",
    "EvolveConfig",
    "EvolveResult",
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
    "best_trial",
    "breed",
    "common_means",
    "crossover",
    "crossover_rating",
    "crossover_steps",
    "drive",
    "evolve",
    "mutate",
    "mutation_rating",
    "mutation_steps",
    "optimistic_scores",
    "parse_edits",
    "question_of",
    "ranks",
    "rate",
    "run_operators",
    "select",
    "selection_rule",
    "sole_wins",
    "truth_of",
    "word_diversity",
]
