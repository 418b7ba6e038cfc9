"""Will the program take this configuration?"""

from __future__ import annotations

import contextlib
import difflib
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from .finding import Finding, Setup, read_yaml

# Read by TRL's parser itself.
_ALSO = {"env"}


def readable(setup: Setup) -> Iterator[Finding]:
    """Whether the file is there and holds options by name."""
    if setup.config is None:
        return
    try:
        values = read_yaml(setup.config)
    except OSError as error:
        yield Finding(
            "problem", f"{setup.config}: {error.strerror}", "--config FILE, such as examples/configs/sandbox.yaml"
        )
    except ValueError as error:
        yield Finding("problem", str(error), "name: value on each line, and a space after the colon")
    else:
        if not isinstance(values, Mapping):
            says = f"{setup.config} holds no options by name"
            yield Finding("problem", says, "name: value on each line, such as max_steps: 100")


def spelling(setup: Setup) -> Iterator[Finding]:
    """Whether every name is an option of the program."""
    if setup.values and not setup.trains:
        yield _table(setup)
    if not setup.trains:
        return
    program, fields = _program(setup)
    unknown = [name for name in setup.values if name not in fields]
    for name in unknown:
        near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
        fix = f"{near[0]}: {setup.values[name]}" if near else f"delete the line; `{program} --help` shows every option"
        yield Finding("problem", f"{setup.config}: {name!r} is no option of `{program}`", fix)
    if not unknown:
        yield Finding("ok", f"{setup.config}: {len(setup.values)} options, all of them of `{program}`")


def batch(setup: Setup) -> Iterator[Finding]:
    """Whether the rollouts of a problem divide the generation batch."""
    if not setup.trains:
        return
    _, fields = _program(setup)
    numbers = {name: one.default for name, one in fields.items() if one is not None} | dict(setup.values)
    group = int(numbers["num_generations"])
    of = f"num_generations = {group}"
    if "prompts_per_step" in fields:
        group *= int(numbers["prompts_per_step"])
        factors = f"{numbers['prompts_per_step']} x {numbers['num_generations']}"
        of = f"prompts_per_step x num_generations = {factors} = {group}"
    processes = _processes(setup)
    per_device, whole = int(numbers["per_device_train_batch_size"]), numbers["generation_batch_size"]
    repeats = processes * int(numbers["steps_per_generation"] or numbers["gradient_accumulation_steps"])
    size = int(whole) if whole else per_device * repeats
    on = f"{processes} process{'es' if processes > 1 else ''}"
    if size % group == 0:
        yield Finding("ok", f"generation batch of {size} rollouts on {on}: {size // group} problems x {group}")
        return
    if whole:
        unit = math.lcm(group, per_device * processes)
        fix = f"generation_batch_size: {_nearest(size, unit)}"
    else:
        fix = f"per_device_train_batch_size: {_nearest(per_device, group // math.gcd(group, repeats))}"
    says = f"{setup.config}: a problem takes {of} rollouts, which does not divide the generation batch of {size} ({on})"
    yield Finding("problem", says, fix)


def values(setup: Setup) -> Iterator[Finding]:
    """Whether the program's own checks take the values, on a CPU and as if on all processes."""
    if not setup.trains or any(one.level != "ok" for one in [*spelling(setup), *batch(setup)]):
        return  # said already
    program, _ = _program(setup)
    try:
        _parse(setup, program)
    except ValueError as error:
        said = " ".join(str(error).split())
        if said.startswith("say "):  # what is named on the command line, where it can be
            yield Finding("warning", f"{setup.config}: {said}", f"{said.partition(': ')[2]}, there or with `{program}`")
        else:
            yield Finding(
                "problem", f"{setup.config}: {said}", f"correct it there; `{program} --help` shows every option"
            )
    else:
        yield Finding("ok", f"{setup.config}: `{program}` takes its values")


def _table(setup: Setup) -> Finding:
    """A table of `agentic-prompting evaluate` checks itself."""
    from ..evaluate import paper_tables

    assert setup.config is not None
    try:
        tables = paper_tables()
    except FileNotFoundError as error:
        return Finding("warning", f"{setup.config} is no configuration of a training run", str(error))
    try:
        tables.load_config(setup.config)
    except ValueError as error:
        return Finding("problem", str(error), f"correct it in {setup.config}")
    return Finding("ok", f"{setup.config}: a table for `agentic-prompting evaluate`")


def _parse(setup: Setup, program: str) -> None:
    """Make the program's arguments of the file. Raises `ValueError` for what it would refuse."""
    from trl import TrlParser

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    processes = _processes(setup)
    script, config, model = _module(program).ARGUMENTS
    # How many processes there will be is asked of the machine: told here.
    sized = type(config.__name__, (config,), {"world_size": property(lambda self: processes)})
    parser = TrlParser((script, sized, model))
    parser.error = refuse  # type: ignore[method-assign,assignment]
    plain = ["--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--report_to", "none"]
    own = {name: value for name, value in setup.values.items() if name not in ("bf16", "fp16", "use_cpu", "env")}
    parser.set_defaults_with_config(**{**own, **setup.given})
    with contextlib.redirect_stderr(io.StringIO()):
        parsed = parser.parse_args_into_dataclasses(args=plain)
    _module(program).check(*parsed[:2])


def _module(program: str) -> Any:
    from ...scripts import train_espl, train_prompt_r1

    return train_espl if program.endswith("espl") else train_prompt_r1


def _program(setup: Setup) -> tuple[str, dict[str, Any]]:
    """The command whose options these are most likely to be, and its fields by name."""
    found: list[tuple[int, int, str, dict[str, Any]]] = []
    for program in ("agentic-prompting train prompt-r1", "agentic-prompting train espl"):
        fields = {name: one for kind in _module(program).ARGUMENTS for name, one in kind.__dataclass_fields__.items()}
        unknown = [name for name in setup.values if name not in fields and name not in _ALSO]
        found.append((len(unknown), len(found), program, fields | dict.fromkeys(_ALSO)))
    _, _, program, fields = min(found, key=lambda one: one[:2])
    return program, fields


def _processes(setup: Setup) -> int:
    """How many the run will have: what accelerate is told, else one for each GPU."""
    if setup.accelerate_config is not None:
        return int(read_yaml(setup.accelerate_config)["num_processes"])
    import torch

    return max(1, torch.cuda.device_count())


def _nearest(size: int, unit: int) -> int:
    return max(1, round(size / unit)) * unit
