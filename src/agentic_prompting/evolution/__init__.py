"""System prompts that evolve (E-SPL): edits, ratings, selection, mutation, crossover, `evolve`.

No torch, no trl: [`ESPLTrainer`] uses this package beside the weight update, [`evolve`] without
one.

From a batch to a child prompt: `results.py` has the rewards of a batch, `population_evolution.py`
is Algorithm 1 over the prompts of `population.py` and `selection.py`, `operators.py` (or
`one_call.py`) writes the child with the messages of `templates.py`, the replies are read by
`parsing.py` and applied by `system_prompt.py`, and `journal.py` records the attempt. `evolve.py` is
the loop for a model whose weights are not trained, and `evolve_run.py` its step.
"""

from .evolve import evolve
from .evolve_result import EvolveResult, StepLog
from .evolve_run import EvolutionStopped, EvolveRun
from .journal import EvolutionJournal, attempt_records, journal_beside, read_journal
from .least_budget import LeastBudget, estimate_least_budget
from .lineage import Lineage, lineage_of, plot_lineage, read_lineage
from .marked_answer import MarkedAnswer
from .one_call import revise
from .operators import Outcome, correct, crossover, mutate
from .parsing import parse_edits
from .population import (
    Member,
    Population,
    Rating,
    crossover_rating,
    load_state,
    mutation_rating,
    ranks,
    rate,
)
from .population_evolution import PopulationEvolution, ReflectionTask, propose_children
from .results import (
    Attempt,
    AttemptText,
    ProblemResult,
    PromptResult,
    best_result,
    collect_matches,
    common_means,
    question_of,
    scores_of,
    sole_wins,
    truth_of,
)
from .selection import SELECTION_RULES as RULES, optimistic_scores, select, selection_rule
from .settings import ESPLSettings, EvolveConfig
from .system_prompt import Draft, Edit, SystemPrompt

__all__ = [
    "RULES",
    "Attempt",
    "AttemptText",
    "Draft",
    "ESPLSettings",
    "Edit",
    "EvolutionJournal",
    "EvolutionStopped",
    "EvolveConfig",
    "EvolveResult",
    "EvolveRun",
    "LeastBudget",
    "Lineage",
    "MarkedAnswer",
    "Member",
    "Outcome",
    "Population",
    "PopulationEvolution",
    "ProblemResult",
    "PromptResult",
    "Rating",
    "ReflectionTask",
    "StepLog",
    "SystemPrompt",
    "attempt_records",
    "best_result",
    "collect_matches",
    "common_means",
    "correct",
    "crossover",
    "crossover_rating",
    "estimate_least_budget",
    "evolve",
    "journal_beside",
    "lineage_of",
    "load_state",
    "mutate",
    "mutation_rating",
    "optimistic_scores",
    "parse_edits",
    "plot_lineage",
    "propose_children",
    "question_of",
    "ranks",
    "rate",
    "read_journal",
    "read_lineage",
    "revise",
    "scores_of",
    "select",
    "selection_rule",
    "sole_wins",
    "truth_of",
]
