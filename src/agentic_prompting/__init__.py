"""agentic-prompting: language models that learn to prompt other language models well, on top of Hugging Face TRL.

Names are imported when they are first used, so that `import agentic_prompting` is instant and the parts that need no
torch work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. One table, so that nothing is exported twice or forgotten.
_EXPORTS = {
    "llm": (
        "ChatModel FunctionChat LLMError Message OpenAIChat ReplayCache Reply RoutedChat ScriptedChat Usage "
        "start_traces"
    ),
    "rollout": (
        "AgentSpec ChatFormat Environment FreeText Limits Observation Policy QuestionGrammar Rollout TagGrammar "
        "parse_turn play play_all"
    ),
    "environments": "BM25Retriever LLMEnvironment SearchEnvironment Worker Workers",
    "programs": "Program",
    "harnesses": "CommandProgram Harness Workspace get_harness",
    "rewards": (
        "PromptR1Reward PromptR1Score exact_match exact_match_reward math_reward normalize_answer "
        "search_reward token_f1"
    ),
    "evolution": "EvolveConfig Population SystemPrompt evolve",
    "refine": "ProRefiner RefinedChat",
    "data": "load_task",
    "local": "Sampling TransformersChat TransformersEngine",
    "evaluation": "evaluate_agent",
    "evaluation.headroom": "headroom",
    "trainers": (
        "ESPLConfig ESPLTrainer MultiTurnGRPOConfig MultiTurnGRPOTrainer PromptR1Config PromptR1Trainer "
        "TrainingStopped warm_start"
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
        BM25Retriever as BM25Retriever,
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
        Population as Population,
        SystemPrompt as SystemPrompt,
        evolve as evolve,
    )
    from .harnesses import (
        CommandProgram as CommandProgram,
        Harness as Harness,
        Workspace as Workspace,
        get_harness as get_harness,
    )
    from .llm import (
        ChatModel as ChatModel,
        FunctionChat as FunctionChat,
        LLMError as LLMError,
        Message as Message,
        OpenAIChat as OpenAIChat,
        ReplayCache as ReplayCache,
        Reply as Reply,
        RoutedChat as RoutedChat,
        ScriptedChat as ScriptedChat,
        Usage as Usage,
        start_traces as start_traces,
    )
    from .local import (
        Sampling as Sampling,
        TransformersChat as TransformersChat,
        TransformersEngine as TransformersEngine,
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
        PromptR1Score as PromptR1Score,
        exact_match as exact_match,
        exact_match_reward as exact_match_reward,
        math_reward as math_reward,
        normalize_answer as normalize_answer,
        search_reward as search_reward,
        token_f1 as token_f1,
    )
    from .rollout import (
        AgentSpec as AgentSpec,
        ChatFormat as ChatFormat,
        Environment as Environment,
        FreeText as FreeText,
        Limits as Limits,
        Observation as Observation,
        Policy as Policy,
        QuestionGrammar as QuestionGrammar,
        Rollout as Rollout,
        TagGrammar as TagGrammar,
        parse_turn as parse_turn,
        play as play,
        play_all as play_all,
    )
    from .trainers import (
        ESPLConfig as ESPLConfig,
        ESPLTrainer as ESPLTrainer,
        MultiTurnGRPOConfig as MultiTurnGRPOConfig,
        MultiTurnGRPOTrainer as MultiTurnGRPOTrainer,
        PromptR1Config as PromptR1Config,
        PromptR1Trainer as PromptR1Trainer,
        TrainingStopped as TrainingStopped,
        warm_start as warm_start,
    )
