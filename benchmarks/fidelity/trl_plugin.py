"""A pytest plugin: TRL's tests with another trainer class in `GRPOTrainer`'s place, and their
outcomes as JSON.

`trl_suite.py` starts pytest with it. `TRL_SUITE` says how, as JSON: `trainer` (`trl` or `ours`),
`bf16` (whether arguments that say nothing of it train under bfloat16 autocast, as TRL's do),
`outcomes` (the file to write).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import trl
from trl.trainer.base_config import _BaseConfig

from agentic_prompting import MultiTurnGRPOTrainer
from agentic_prompting.trainers import MultiTurnGRPOConfig

_SETTINGS = json.loads(os.environ["TRL_SUITE"])
_OUTCOMES: dict[str, list[str]] = {}  # by test: how it ended, and the error's last line


class MovedOver(MultiTurnGRPOTrainer):
    """Our trainer as the page "I have a TRL script" says: the class is another one, and
    `environment=None` is added where there are no tools.
    """

    def __init__(self, *positional: Any, **named: Any):
        if not named.get("tools") and not named.get("environment_factory"):
            named["environment"] = None
        super().__init__(*positional, **named)


def _is_available(name: str) -> Callable[[], bool]:
    """`is_X_available` for an X that only the checkout's version of TRL knows to ask for: whether
    it can be imported. A checkout need not be of the installed version.
    """
    match = re.fullmatch(r"is_(\w+)_available", name)
    if match is None:
        raise AttributeError(name)
    return lambda: importlib.util.find_spec(match[1]) is not None


importlib.import_module("trl.import_utils").__getattr__ = _is_available  # type: ignore[method-assign]
if _SETTINGS["trainer"] == "ours":
    trl.GRPOTrainer = MovedOver
    trl.GRPOConfig = MultiTurnGRPOConfig

if not _SETTINGS["bf16"]:
    _trl_post_init = _BaseConfig.__post_init__

    def _post_init_without_bf16(self: _BaseConfig) -> None:
        self.bf16 = bool(self.bf16)  # options that are not set are None
        _trl_post_init(self)

    _BaseConfig.__post_init__ = _post_init_without_bf16


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("::")[2]
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longrepr
        _OUTCOMES[name] = ["failed", _one_line(str(message))]
    elif report.skipped:
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[-1]
        else:
            reason = getattr(report, "wasxfail", "")
        _OUTCOMES.setdefault(name, ["skipped", _one_line(str(reason))])
    elif report.when == "call":
        _OUTCOMES.setdefault(name, ["passed", ""])
    elif report.when == "teardown":  # after each test: a run that is stopped keeps what it has
        _write()


def _write() -> None:
    with open(_SETTINGS["outcomes"], "w", encoding="utf-8") as file:
        json.dump(_OUTCOMES, file)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()[:300]
