"""What is checked of [`ESPLTrainer`]'s own arguments before anything is loaded."""

from __future__ import annotations

from ..evolution import Population, SystemPrompt
from ..llm import ChatModel
from .config import check_config
from .espl_config import ESPLConfig


def check_reflector(reference: ChatModel | None, args: ESPLConfig) -> None:
    """Raises `TypeError` for arguments of another kind, `ValueError` unless there is exactly one that reflects, for a
    mode that needs it."""
    check_config(args, ESPLConfig)
    if not args.evolves:
        return
    if reference is None and args.reflector == "reference":
        raise ValueError(
            f"mode={args.mode!r} needs a reference LLM to reflect: pass reference=, or use mode='rl', or "
            "reflector='policy' to let the policy do it"
        )
    if reference is not None and args.reflector == "policy":
        raise ValueError("with reflector='policy' the reference LLM would never be asked: pass reference=None")


def population_of(population: Population | None, initial_prompt: SystemPrompt | str, args: ESPLConfig) -> Population:
    """The population to train with: a given one, or a new one from the root that `initial_prompt` is: a text with lines
    `[G0]. ...` as principles, any other as a preamble to add them to.

    Raises:
        `ValueError`: An argument would be ignored beside a population of one's own, or that does not fit the mode.
    """
    if population is not None:
        if initial_prompt:
            raise ValueError("initial_prompt would be ignored: population= brings its own prompts")
        if args.mode == "reflection" and population.window != 1:
            raise ValueError("mode='reflection' needs a Population with window=1")
        args.check_own_population()
        return population
    root = initial_prompt
    if not isinstance(root, SystemPrompt):
        root = SystemPrompt.parse(root) if "[G0]" in root else SystemPrompt(root, ())
    return args.population(root, args.seed, window=1 if args.mode == "reflection" else None)
