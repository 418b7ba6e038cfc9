"""agentic-prompting: language models that learn to prompt other language models well, on top of
Hugging Face TRL.

Names are imported when they are first used, so `import agentic_prompting` is instant and the
parts that need no torch work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. One table, so that nothing is exported twice or
# forgotten.
_EXPORTS = {
    "llm": "FunctionChat OpenAIChat ReplayCache",
    "rollout": "Environment Limits",
    "environments": "LLMEnvironment SearchEnvironment Worker Workers",
    "programs": "Program",
    "harnesses": "CommandProgram Workspace get_harness",
    "rewards": "PromptR1Reward exact_match_reward math_reward search_reward",
    "evolution": "EvolveConfig evolve",
    "refine": "ProRefiner RefinedChat",
    "data": "load_task",
    "evaluation": "evaluate_agent",
    "evaluation.headroom": "headroom",
    "trainers": (
        "ESPLConfig ESPLTrainer MultiTurnGRPOConfig MultiTurnGRPOTrainer "
        "PromptR1Config PromptR1Trainer warm_start"
    ),
    "agent": "PromptAgent",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:  # for type checkers and editors; a test holds it to the table
    from .agent import (
        PromptAgent as PromptAgent,
    )
    from .data import (
        load_task as load_task,
    )
    from .environments import (
        LLMEnvironment as LLMEnvironment,
        SearchEnvironment as SearchEnvironment,
        Worker as Worker,
        Workers as Workers,
    )
    from .evaluation import (
        evaluate_agent as evaluate_agent,
    )
    from .evaluation.headroom import (
        headroom as headroom,
    )
    from .evolution import (
        EvolveConfig as EvolveConfig,
        evolve as evolve,
    )
    from .harnesses import (
        CommandProgram as CommandProgram,
        Workspace as Workspace,
        get_harness as get_harness,
    )
    from .llm import (
        FunctionChat as FunctionChat,
        OpenAIChat as OpenAIChat,
        ReplayCache as ReplayCache,
    )
    from .programs import (
        Program as Program,
    )
    from .refine import (
        ProRefiner as ProRefiner,
        RefinedChat as RefinedChat,
    )
    from .rewards import (
        PromptR1Reward as PromptR1Reward,
        exact_match_reward as exact_match_reward,
        math_reward as math_reward,
        search_reward as search_reward,
    )
    from .rollout import (
        Environment as Environment,
        Limits as Limits,
    )
    from .trainers import (
        ESPLConfig as ESPLConfig,
        ESPLTrainer as ESPLTrainer,
        MultiTurnGRPOConfig as MultiTurnGRPOConfig,
        MultiTurnGRPOTrainer as MultiTurnGRPOTrainer,
        PromptR1Config as PromptR1Config,
        PromptR1Trainer as PromptR1Trainer,
        warm_start as warm_start,
    )
