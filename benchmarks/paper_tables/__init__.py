"""The papers' tables from configurations: which systems, on which tasks, with which models; or all in the sandbox.

Everything that is asked and measured is in `evaluation/`; here names become objects.
"""

from .config import SystemConfig, TableConfig, load_config
from .run import TableRun, run_table

__all__ = ["SystemConfig", "TableConfig", "TableRun", "load_config", "run_table"]
