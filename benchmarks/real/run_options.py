"""The options that the runs of real models share, and where their records go."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab import RECORDS, Records


def protocol_parser(
    description: str | None,
    folder: str,
    records: str,
    tuning: str = "the seed that is not reported",
) -> argparse.ArgumentParser:
    """A parser with the options of a run by a protocol.

    Args:
        description (`str`): The script's docstring, printed by `--help` as it is.
        folder (`str`): Default of `--folder`, which gets models and replies.
        records (`str`): Name of the file of records.
        tuning (`str`, *optional*): What `--tuning` runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="run what has no record")
    parser.add_argument("--tuning", action="store_true", help=tuning)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--records", type=Path, help=f"default: records/{records}")
    parser.set_defaults(records_name=records)
    return parser


def open_records(options: argparse.Namespace) -> Records:
    """The file of records that the options of [`protocol_parser`] name.

    Those of tuning stay in the run's folder.
    """
    folder = options.folder if options.tuning else RECORDS
    return Records(options.records or folder / options.records_name)
