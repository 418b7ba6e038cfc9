"""Write the JSON schemas of the YAML files in `examples/configs`, which editors and a test check
the files with.

    python docs/tools/config_schemas.py            # into examples/configs, and those of the package
    python docs/tools/config_schemas.py FOLDER

They are made from the dataclasses of the programs and of the tables: run it after an option has
changed.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import trl

from agentic_prompting.cli.train_program import METHODS

ROOT = Path(__file__).parents[2]


SIMPLE_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    NoneType: "null",
}


def schema_of(settings: Sequence[type], title: str) -> dict[str, Any]:
    """The JSON schema of a YAML file.

    Args:
        settings (`Sequence[type]`): The dataclasses whose fields are its keys.
        title (`str`): The schema's.
    """
    environment = {"type": "object", "description": "Environment variables to set."}
    properties: dict[str, Any] = {"env": environment}
    for dataclass in settings:
        hints = get_type_hints(dataclass)
        descriptions = describe_arguments(dataclass)
        for field in fields(dataclass):
            description = str(field.metadata.get("help") or descriptions.get(field.name, ""))
            properties[field.name] = {
                **json_type(hints[field.name]),
                "description": description.split(". ")[0].strip()[:200],
            }
            if isinstance(field.default, str | int | float | bool):
                properties[field.name]["default"] = field.default
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def json_type(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint; empty if anything may be given."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint in SIMPLE_TYPES:
        return {"type": SIMPLE_TYPES[hint]}
    if origin in (Union, UnionType):
        parts = [json_type(argument) for argument in arguments]
        if all(part.keys() == {"type"} for part in parts):
            return {"type": [part["type"] for part in parts]}
        return {"anyOf": parts} if all(parts) else {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    container = origin or hint
    if isinstance(container, type) and issubclass(container, Sequence):
        # A single value stands for a list of one.
        item = json_type(arguments[0]) if arguments else {}
        return {"anyOf": [{"type": "array", "items": item}, item]} if item else {"type": "array"}
    if isinstance(container, type) and issubclass(container, Mapping):
        return {"type": "object"}
    return {}


def describe_arguments(dataclass: type) -> dict[str, str]:
    """The first sentence on each argument in the docstrings of a class and of its bases."""
    descriptions: dict[str, str] = {}
    for base in dataclass.__mro__:
        arguments = re.findall(
            r"^    (\w+) \(.*?\):\s+(.+?)(?=^    \w|^\w|\Z)",
            inspect.getdoc(base) or "",
            re.MULTILINE | re.DOTALL,
        )
        for name, text in arguments:
            sentence = re.split(r"(?<=\.)\s", " ".join(text.split()).replace("`", ""))[0]
            descriptions.setdefault(name, sentence)
    return descriptions


def table_schema() -> dict[str, Any]:
    """The schema of a table's file: its settings are open where the loader alone knows them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from paper_tables.config import _MODEL_SETTINGS, KINDS, TableConfig

    schema = schema_of([TableConfig], "agentic-prompting evaluate --config")
    properties = schema["properties"]
    del properties["env"]
    model = {
        "type": "object",
        "properties": {name: {} for name in sorted(_MODEL_SETTINGS)},
        "additionalProperties": False,
    }
    settings = sorted({name for of in KINDS.values() for name in of})
    system = {
        "type": ["object", "null"],
        "properties": {"kind": {"enum": sorted(KINDS)}, **{name: {} for name in settings}},
        "additionalProperties": False,
    }
    properties["models"] = {"type": "object", "additionalProperties": model}
    properties["systems"] = {"type": "object", "additionalProperties": system}
    properties["sandbox"] = {
        "type": "object",
        "propertyNames": {"enum": [one.name for one in fields(TableConfig)]},
    }
    return {**schema, "required": ["title", "systems", "tasks"]}


def main(folder: Path) -> None:
    made = {
        method.replace("-", "_"): schema_of(kinds, f"train {method}")
        for method, kinds in METHODS.items()
    }
    made = {name: {**schema, "$comment": f"TRL {trl.__version__}"} for name, schema in made.items()}
    for name, schema in {**made, "table": table_schema()}.items():
        (folder / f"{name}.schema.json").write_text(_text(schema), encoding="utf-8")


def _text(schema: dict[str, Any]) -> str:
    """As JSON, a line for each option."""
    options = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in schema["properties"].items()
    )
    rest = [
        f" {json.dumps(name)}: {json.dumps(one)}"
        for name, one in schema.items()
        if name != "properties"
    ]
    return "{\n" + ",\n".join([*rest, f' "properties": {{\n{options}\n }}']) + "\n}\n"


if __name__ == "__main__":
    packaged = ROOT / "src" / "agentic_prompting" / "cli" / "examples" / "configs"
    for folder in sys.argv[1:] or (ROOT / "examples" / "configs", packaged):
        main(Path(folder))
