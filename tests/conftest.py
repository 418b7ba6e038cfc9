"""Fixtures of all tests: a tiny saved policy, sandbox questions, the command.

Other shared code is in `support/`.
"""

import os
import signal
import sys
from pathlib import Path

# One thread per process: several processes of these tests run at once on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The papers' released files are not ours to distribute. They are in the folder of this variable, or
# beside the checkout; otherwise the tests on them are skipped.
if (
    released := next(Path(__file__).resolve().parents[2].glob("*/data/prompt_r1"), None)
) is not None:
    os.environ.setdefault("AGENTIC_PROMPTING_DATA", str(released.parent))

# A shell that runs the tests in the background makes them, and all processes that they start,
# ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from support.policies import make_asking_policy, make_tiny_policy

SLOW_FOLDERS = ("whole", "trainers")


def pytest_collection_modifyitems(items):
    """Begin with the folders of the longest files: last, they would leave the other workers without
    work.
    """

    def place(item):
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return SLOW_FOLDERS.index(folder) if folder in SLOW_FOLDERS else len(SLOW_FOLDERS)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def forget_written_modules(tmp_path_factory):
    """Forgets the modules that a test wrote and imported: another test may write one of the same
    name.
    """
    loaded_before = set(sys.modules)
    yield
    temporary = tmp_path_factory.getbasetemp()
    for name in set(sys.modules) - loaded_before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(temporary):
            del sys.modules[name]
    # The command makes the current folder importable.
    sys.path[:] = [folder for folder in sys.path if not Path(folder).is_relative_to(temporary)]


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """Folder of a randomly initialised sandbox policy with its tokenizer and spec."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def rows():
    """Eight sandbox questions as a dataset."""
    from datasets import Dataset

    from agentic_prompting.sandbox import as_rows, make_split

    return Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))


@pytest.fixture(scope="session")
def asking_policy(tiny_policy, tmp_path_factory):
    """A policy that usually asks once and answers with the reply."""
    return make_asking_policy(tiny_policy, tmp_path_factory.mktemp("asking"))


@pytest.fixture
def run(capsys):
    """Runs `agentic-prompting` in this process; returns its exit status and what it printed."""

    from agentic_prompting.cli import main

    def command(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return command
