"""The command line and the YAML file of a training program, read from its dataclasses: one-line errors, a help that
shows our options first, and the JSON schema of the file, which editors use."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from trl import GRPOConfig, ModelConfig, TrlParser

from .findings import Finding, misspelt, problem, read_yaml
from .options import documented

Kinds = Sequence[type]
"""The dataclasses that a program's options are the fields of."""

# The options of TRL and transformers that most runs set; `--help` shows them beside ours.
COMMON = """model_name_or_path output_dir resume_from_checkpoint max_steps num_train_epochs learning_rate
per_device_train_batch_size gradient_accumulation_steps num_generations max_completion_length temperature beta seed
use_peft lora_r use_vllm vllm_mode bf16 use_cpu logging_steps save_steps eval_strategy eval_steps report_to
push_to_hub""".split()  # noqa: SIM905


class OneLineParser(TrlParser):
    """TRL's parser. Its errors are a `ValueError` of one line, and options have no abbreviations."""

    def __init__(self, kinds: Kinds):
        super().__init__(kinds, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_program(kinds: Kinds, words: Sequence[str]) -> tuple[Any, ...]:
    """One object of each kind, from a command line and the file of its `--config`. Names are checked before values.

    Raises:
        `ValueError`: In one line: a name is no option, with the nearest one; or a value is of the wrong kind.
    """
    known = options_of(kinds)
    switches = {name for name, one in known.items() if one.default is True}
    given = [
        word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")
    ]
    for name in given:
        if name not in {*known, "config", *(f"no_{switch}" for switch in switches)}:
            near = get_close_matches(name, known, n=1)
            raise ValueError(
                f"--{name} is no option of this program{f'; did you mean --{near[0]}?' if near else ''}"
            )
    for file in [after for word, after in pairwise(words) if word == "--config"]:
        values = read_yaml(Path(file))
        for wrong in wrong_in_file(
            values if isinstance(values, dict) else {}, kinds, f"{file}: ", "this program"
        ):
            raise ValueError(f"{wrong.says}: {wrong.fix}")
    *parsed, rest = OneLineParser(kinds).parse_args_and_config(words, return_remaining_strings=True)
    if rest:
        raise ValueError(
            f"{rest[0]!r} belongs to no option; each option is written as --name value"
        )
    return tuple(parsed)


def options_of(kinds: Kinds) -> dict[str, Any]:
    """The fields of the dataclasses by name."""
    return {one.name: one for kind in kinds for one in fields(kind) if one.init}


# --- the file --------------------------------------------------------------------------------------------------------


def schema_of(kinds: Kinds, title: str) -> dict[str, Any]:
    """The JSON schema of a program's YAML file.

    Args:
        kinds (`Sequence[type]`): The program's dataclasses.
        title (`str`): The schema's.
    """
    environment = {"type": "object", "description": "Environment variables to set."}
    properties: dict[str, Any] = {"env": environment}
    for kind in kinds:
        hints, said = get_type_hints(kind), documented(kind)
        for one in fields(kind):
            text = str(one.metadata.get("help") or said.get(one.name, ""))
            properties[one.name] = {
                **_json_type(hints[one.name]),
                "description": text.split(". ")[0].strip()[:200],
            }
            if one.default is not MISSING and isinstance(one.default, str | int | float | bool):
                properties[one.name]["default"] = one.default
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, "type": "object"}
    return {**head, "properties": properties, "additionalProperties": False}


def wrong_in_file(
    values: Mapping[str, Any], kinds: Kinds, where: str, program: str
) -> Iterator[Finding]:
    """The names in a file that are no options, then the values that are of the wrong kind."""
    properties = schema_of(kinds, "")["properties"]
    yield from misspelt(values, properties, where, program)
    for name, value in values.items():
        if name in properties and not _fits(value, properties[name]):
            wanted = _words(properties[name])
            yield problem(
                f"{where}{name}: {str(value)[:60]!r} is no {wanted}",
                f"give {name} a value of that kind",
            )


_SIMPLE = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    NoneType: "null",
}
_PYTHON: dict[str, Any] = {"null": NoneType, "array": list, "object": dict}


def _json_type(kind: Any) -> dict[str, Any]:
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if origin in (Union, UnionType):
        parts = [_json_type(one) for one in inside]
        if all(part.keys() == {"type"} for part in parts):
            return {"type": [part["type"] for part in parts]}
        return {"anyOf": parts} if all(parts) else {}
    if origin is Literal:
        return {"enum": list(inside)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [one.value for one in kind]}
    kind = origin or kind
    if isinstance(kind, type) and issubclass(kind, Sequence):
        item = _json_type(inside[0]) if inside else {}
        return {"anyOf": [{"type": "array", "items": item}, item]} if item else {"type": "array"}
    return {"type": "object"} if isinstance(kind, type) and issubclass(kind, Mapping) else {}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether TRL's parser takes a YAML value for an option of this schema."""
    if "anyOf" in schema:
        return any(_fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema.get("type", ())
    return not kinds or any(
        _is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        try:  # YAML 1.1 reads 1e-6 as a text
            return (
                not isinstance(value, bool)
                and (int if kind == "integer" else float)(str(value)) is not None
            )
        except ValueError:
            return False
    if kind == "boolean":
        return isinstance(value, bool) or str(value).lower() in (
            "true",
            "false",
            "yes",
            "no",
            "1",
            "0",
        )
    if kind == "string":
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, _PYTHON[kind])


def _words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_words, schema["anyOf"])))
    kinds = schema["type"]
    return " or ".join(
        [kinds] if isinstance(kinds, str) else [one for one in kinds if one != "null"]
    )


# --- the help --------------------------------------------------------------------------------------------------------


def help_of(kinds: Kinds, program: str, everything: bool = False) -> str:
    """The options of a program: ours, then the usual ones of TRL, or all.

    Args:
        kinds (`Sequence[type]`): The program's dataclasses: its own, the trainer's arguments, the model's.
        program (`str`): Its name.
        everything (`bool`, *optional*, defaults to `False`): Show TRL's and transformers' as well.
    """
    trl = options_of([GRPOConfig, ModelConfig])
    ours = [name for name in options_of(kinds[:-1]) if name not in trl]
    parser = argparse.ArgumentParser(prog=program, usage=argparse.SUPPRESS, add_help=False)
    _add(
        parser.add_argument_group("Options of this program, also in the file of --config"),
        kinds,
        ours,
    )
    _add(parser.add_argument_group("Usual options of TRL and transformers"), kinds, COMMON)
    if everything:
        rest = [name for name in options_of(kinds) if name not in {*ours, *COMMON}]
        _add(parser.add_argument_group("All other options of TRL and transformers"), kinds, rest)
    more = (
        ""
        if everything
        else f"\n`{program} --help-all` shows all options of TRL and transformers.\n"
    )
    return parser.format_help() + more


def _add(group: Any, kinds: Kinds, names: Collection[str]) -> None:
    said = {name: text for kind in reversed(kinds) for name, text in documented(kind).items()}
    known = options_of(kinds)
    for name in names:
        one = known[name]
        text = str(one.metadata.get("help") or said.get(name, "")).replace("%", "%%")
        default = "" if one.default in (None, MISSING, "") else f" Default: {one.default}."
        group.add_argument(f"--{name}", metavar="", help=f"{text}{default}")
