"""How options of the command are declared, and the models that they name.

An option that a program, a check or several commands have is a field of a dataclass and declared there alone: TRL's
parser reads it for the programs of `scripts/`, [`command`] for Typer. Heavy imports are in the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import Field, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..scripts.running import EnvironmentModel, setting

if TYPE_CHECKING:
    from ..llm import ChatModel, OpenAIChat


def option(help: str, panel: str | None = None, *names: str) -> Any:
    """An option.

    Args:
        help (`str`): Its help, the default included.
        panel (`str`, *optional*): Under which heading `--help` shows it.
        *names (`str`): Instead of the parameter's own name.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


AsJson = Annotated[bool, option("Print one JSON object instead of text.", None, "--json")]
OutputDir = Annotated[
    Path | None, option("Folder to write to, instead of the default.", None, "--output-dir", "--output")
]


@dataclass
class LargeLLM(EnvironmentModel):
    """The large LLM that a trained agent asks."""

    environment_max_tokens: int | None = setting("Of each of its replies.")
    sandbox: bool = setting("The sandbox's oracle is the large LLM: no key, no network.", False)
    budget_usd: float | None = setting("Stop asking when so much is spent.")


def show_help(context: typer.Context) -> None:
    """What a command that only has sub-commands does alone."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def command(function: Callable[..., int]) -> Callable[..., int]:
    """A function as Typer takes it: where a parameter is a dataclass there is an option for each of its fields."""
    hints = get_type_hints(function, include_extras=True)
    settings = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])]
        parameters += _options_of(settings[name]) if name in settings else own

    def called(**given: Any) -> int:
        for name, kind in settings.items():
            given[name] = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
        return function(**given)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def _options_of(settings: type) -> list[Parameter]:
    hints = get_type_hints(settings)

    def parameter(one: Field[Any]) -> Parameter:
        # A switch has no --no-...: what it is without is the default.
        names = [f"--{one.name.replace('_', '-')}"] if hints[one.name] is bool else []
        default = f" Default: {one.default}." if one.default or (one.default == 0 and not names) else ""
        kind: Any = Annotated  # of a type that is known only now
        declared = kind[hints[one.name], option(one.metadata["help"] + default, None, *names)]
        return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=declared)

    return [parameter(one) for one in fields(settings)]


def connect_roles(
    named: Mapping[str, tuple[str | None, str | None]],
    local_model: Path | None,
    replay_cache: Path | None,
    stack: ExitStack,
) -> dict[str, ChatModel]:
    """A client for each role, so that each has its own bill; they share the recording.

    Args:
        named (`Mapping`): Model name and base URL by role. `optimizer` and `verifier` may be missing: then they are the
            feedback model.
        local_model (`Path`, *optional*): Folder of a transformers model for the role `task`.
        replay_cache (`Path`, *optional*): See [`OpenAIChat`].
        stack (`ExitStack`): Closes the clients.

    Raises:
        `ValueError`: If a model is missing or given twice.
    """
    from ..llm import OpenAIChat, ReplayCache

    if (named["task"][0] is None) == (local_model is None):
        raise ValueError("name the task model with either --task-model NAME or --local-model FOLDER (or try --sandbox)")
    if named["feedback"][0] is None:
        raise ValueError("name the feedback model with --feedback-model NAME (or try --sandbox)")
    cache = ReplayCache(replay_cache) if replay_cache else None
    roles: dict[str, ChatModel] = {}
    for role, (name, url) in named.items():
        if role == "task" and local_model is not None:
            roles[role] = stack.enter_context(local_chat(local_model))
            continue
        model, address = name or named["feedback"][0] or "", url if name else url or named["feedback"][1]
        roles[role] = stack.enter_context(OpenAIChat(model, base_url=address, cache=cache))
    return roles


def large_llm(
    model: str | None,
    base_url: str | None,
    sandbox: bool,
    replay_cache: Path | None,
    budget_usd: float | None,
    stack: ExitStack,
) -> OpenAIChat:
    """The large LLM behind an agent: the one that is named, or the sandbox's oracle at an address of its own.

    Args:
        model (`str`, *optional*), base_url (`str`, *optional*), replay_cache (`Path`, *optional*),
            budget_usd (`float`, *optional*): See [`OpenAIChat`].
        sandbox (`bool`): Start the oracle and take that.
        stack (`ExitStack`): Closes client and oracle.
    """
    from ..llm import OpenAIChat, ReplayCache

    if sandbox:
        from ..sandbox import Oracle
        from ..sandbox.server import MODEL, OracleServer

        model, base_url = MODEL, stack.enter_context(OracleServer(Oracle())).base_url
    cache = ReplayCache(replay_cache) if replay_cache else None
    return stack.enter_context(OpenAIChat(model or "", base_url=base_url, cache=cache, budget_usd=budget_usd))


def another(chat: OpenAIChat, stack: ExitStack) -> OpenAIChat:
    """A client of the same model at the same address, whose spending is booked by itself."""
    from ..llm import OpenAIChat

    return stack.enter_context(OpenAIChat(chat.model, base_url=chat.base_url, cache=chat.cache))


def local_chat(folder: Path):
    """A local model in float32, on the GPU where there is one, with lossless drafting.

    Raises:
        `ValueError`: If there is no model in the folder, or its tokenizer has no chat template.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no transformers model (no config.json); give the folder of a downloaded one")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..local import TransformersChat

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return TransformersChat(model, AutoTokenizer.from_pretrained(folder))
