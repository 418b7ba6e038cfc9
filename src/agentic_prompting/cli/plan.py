"""`agentic-prompting plan`: memory, largest batch, calls, dollars and hours of a run before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .findings import read_yaml
from .options import AsJson, busy, hub_answers, option, setting
from .setup import Setup, parsed

if TYPE_CHECKING:
    from ..planning import CostEstimate, Plan


@dataclass
class PlanSetup(Setup):
    """The run to plan: options of the command line, then those of the configuration."""

    gpus: int | None = setting("GPUs that train: accelerate's num_processes.")
    gpu_memory: float = setting("GiB of one GPU.", 80.0)
    model_name: str | None = setting("Instead of the configuration's model_name_or_path.")
    rows: int | None = setting("Rows of the dataset, where the configuration has no max_steps.")
    seconds: float = setting("When to stop looking for what fits better.", 40.0)

    @property
    def processes(self) -> int:
        """As given; else accelerate's, one without a file: GPUs of this machine are not looked at."""
        if self.gpus is not None:
            return max(1, self.gpus)
        return super().processes if self.accelerate_config is not None else 1


Pilot = Annotated[
    Path | None, option("A run whose records take the place of assumptions.", "--from")
]


def plan(setup: PlanSetup, pilot: Pilot = None, as_json: AsJson = False) -> int:
    """Say what a training run needs, before anything is loaded: memory by part and its peak, the largest batch and
    context that fit, calls, tokens, dollars and hours.

    Reads the model's config.json alone and runs the trainer's step on fake tensors; a GPU is not touched. Exit status 1
    if the run does not fit.
    """
    from .train import example

    if setup.gpus is not None and setup.gpus < 1:
        raise ValueError(
            f"gpus={setup.gpus}: training needs at least 1 GPU; a CPU is planned as one GPU"
        )
    if setup.config is None:
        raise ValueError(
            "say which run to plan: --config FILE, such as examples/configs/qwen3_4b.yaml"
        )
    setup.config, setup.accelerate_config = example(setup.config), example(setup.accelerate_config)
    for file in filter(None, (setup.config, setup.accelerate_config)):
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file")
        if not isinstance(read_yaml(file), dict):
            raise ValueError(f"{file} holds no options by name")
    with busy("measuring a step on fake tensors"):
        made, costs = planned(setup, pilot)
    if as_json:
        spent = costs.to_json() if not isinstance(costs, str) else {"error": costs}
        print(json.dumps({"memory": made.to_json(), "cost": spent}))
    else:
        print(f"{made}\n\n{costs}")
    return int(not made.fits)


def planned(
    setup: PlanSetup, pilot: Path | None = None, wait: float = 600.0
) -> tuple[Plan, CostEstimate | str]:
    """The plan of a configuration, and what it costs or why that is not known; `wait` as in [`plan`]."""
    from trl import get_peft_config

    from ..llm.budget import find_price
    from ..planning import estimate_cost, plan

    _script, args, model = parsed(setup, check=False)
    name = setup.model_name or model.model_name_or_path
    if not name:
        raise ValueError(
            "say which model: model_name_or_path in the configuration, or --model-name NAME"
        )
    if not Path(name).exists():
        hub_answers()
    accelerate = read_yaml(setup.accelerate_config) if setup.accelerate_config else {}
    values: dict[str, Any] = {
        **vars(args),
        "bf16": setup.values.get("bf16", not setup.values.get("fp16", False)),
    }
    loading: dict[str, Any] = {"dtype": model.dtype} if model.dtype else {}
    if model.load_in_4bit or model.load_in_8bit:
        loading["quantization_config"] = "asked for"
    values["model_init_kwargs"] = {**loading, **(args.model_init_kwargs or {})}
    made = plan(
        values, name, gpus=setup.gpus, gpu_memory=setup.gpu_memory, accelerate=accelerate,
        peft_config=get_peft_config(model), seconds=setup.seconds, max_wait=wait,
    )  # fmt: skip
    asked = setup.value("environment_model")
    price = find_price(asked) if asked else None
    try:
        costs: CostEstimate | str = estimate_cost(
            values, made.parameters, gpus=made.layout.gpus, rows=setup.rows or setup.values.get("task_rows"),
            price=price, pilot=pilot, trained=made.trained, kv_bytes=made.kv_bytes,
        )  # fmt: skip
    except ValueError as error:
        costs = f"calls, dollars and hours: {error}"
    return made, costs
