"""Command-line agents: commands in work folders of their own, isolated with bubblewrap, and the
settings of known ones.
"""

from .command import CommandFailed
from .command_program import SOLUTION_COLUMNS, CommandProgram
from .harness import Harness, NotInstalled
from .known_harnesses import HARNESSES, get_harness
from .workspace import Workspace

__all__ = [
    "HARNESSES",
    "SOLUTION_COLUMNS",
    "CommandFailed",
    "CommandProgram",
    "Harness",
    "NotInstalled",
    "Workspace",
    "get_harness",
]
