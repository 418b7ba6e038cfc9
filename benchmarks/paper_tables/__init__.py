"""The papers' tables from configurations that name systems, tasks and models; or all of them in the
sandbox.

The package's `evaluation/` asks and measures; here the names become objects.
"""

from .config import SystemConfig, TableConfig, load_config
from .run import TableRun, run_table

__all__ = ["SystemConfig", "TableConfig", "TableRun", "load_config", "run_table"]
