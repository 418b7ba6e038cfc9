"""The checks of `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import configuration, endpoint, installation, machine, model
from .finding import Finding, Setup

CHECKS: dict[str, Callable[[Setup], Iterable[Finding]]] = {
    "python": installation.python_version,
    "versions": installation.versions,
    "extras": installation.extras,
    "devices": machine.devices,
    "bf16": machine.bf16,
    "output folder": machine.output_folder,
    "replay cache": machine.replay_cache,
    "config": configuration.readable,
    "options": configuration.spelling,
    "batch": configuration.batch,
    "values": configuration.values,
    "key": endpoint.keys,
    "endpoint": endpoint.answers,
    "price": endpoint.prices,
    "run": model.folder,
    "chat template": model.chat_template,
}
"""By name, in the order of the findings. A check finds nothing where it has nothing to look at."""
