"""Write the JSON schemas of the YAML files in `examples/configs`, which editors and a test check the files with.

    python docs/tools/config_schemas.py            # into examples/configs, and those of the package
    python docs/tools/config_schemas.py FOLDER

They are made from the dataclasses of the programs and of the tables: run it after an option has changed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import trl

from agentic_prompting.cli.parser import schema_of
from agentic_prompting.cli.programs import PROGRAMS

ROOT = Path(__file__).parents[2]


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
        for method, kinds in PROGRAMS.items()
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
