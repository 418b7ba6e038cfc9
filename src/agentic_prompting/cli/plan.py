"""`agentic-prompting plan`: memory, largest batch, calls, dollars and hours of a run before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.headroom_figures import HEADROOM_FILE, HeadroomFigures
from .client_settings import ClientSettings
from .hub import find_model, probe_hub
from .loader import load_environment
from .option_parser import OptionParser
from .options import JSON_HELP, option, refuse_options
from .run_configuration import RunConfiguration
from .terminal import print_json, show_progress
from .yaml_file import check_options_file, read_options

if TYPE_CHECKING:
    from ..environments import Worker
    from ..planning import CostEstimate, Plan
    from ..planning.planned_run import PlannedRun


@dataclass
class PlanOptions(RunConfiguration):
    """The run to plan: options of the command line, then those of the configuration."""

    gpus: int | None = option("Number of GPUs that train: accelerate's num_processes.")
    gpu_memory: float = option("Memory of one GPU, in GiB.", 80.0)
    model_name: str | None = option("The model, instead of the configuration's model_name_or_path.")
    rows: int | None = option(
        "Number of rows of the dataset, if the configuration has no max_steps."
    )
    seconds: float = option("Seconds after which to stop looking for what fits better.", 40.0)
    pilot: Path | None = option(
        "A run whose records replace assumptions; without --config, its settings replace the file.",
        None,
        "--from",
    )
    headroom: Path | None = option(
        "The result of `headroom`: a file, or its folder. Default: the configuration's output_dir."
    )
    max_steps: int | None = option("Steps of the run, instead of the configuration's.")
    json: bool = option(JSON_HELP, False)

    @property
    def processes(self) -> int:
        """`--gpus`, else the number in accelerate's file, else 1.

        The GPUs of this machine are not counted.
        """
        if self.gpus is not None:
            return max(1, self.gpus)
        return super().processes if self.accelerate_config is not None else 1


SETTINGS = (PlanOptions,)  # the parser returns an object of each


def plan(arguments: Sequence[str]) -> int:
    """Say what a training run needs, before anything is loaded: memory by part and its peak, the
    largest batch and context that fit, calls, tokens, dollars and hours. The run is that of
    --config, or one like that of --from.

    Reads the model's config.json alone and runs the trainer's step on fake tensors; a GPU is not
    touched. An environment of your own is loaded for the prices of its workers, and asked nothing.
    Exit status 1 if the run does not fit.
    """
    (options,) = OptionParser("plan", SETTINGS, plan.__doc__).parse(arguments)
    # Options and files are checked before the model is looked at.
    if options.gpus is not None and options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: training needs at least 1 GPU")
    if options.config is None and options.pilot is None:
        raise ValueError(
            "name the run to plan: --config FILE, such as examples/configs/qwen3_4b.yaml, or "
            "--from RUN"
        )
    refuse_options(options, ("run",), "a run to plan like is named with --from RUN")
    refuse_options(
        options,
        (
            "environment_base_url",
            "environment_max_tokens",
            "reference_base_url",
            "reference_client",
            "replay_cache",
        ),
        "a plan asks no model, and takes the price from --environment-model or "
        "--environment-client",
    )
    if options.max_steps is not None and options.max_steps < 1:
        raise ValueError(f"--max-steps {options.max_steps}: a run has at least 1 step")
    for file in filter(None, (options.config, options.accelerate_config)):
        check_options_file(file)
    if options.uses_cpu and options.gpus is None and options.accelerate_config is None:
        raise ValueError(
            f"{options.config} has `use_cpu: true`, and a plan is for GPUs: its memory and hours "
            f"would not be those of this run. For a CPU, `{options.command} --config "
            f"{options.config} --max_steps 2` shows the seconds of a step; for the same run on "
            "GPUs, say how many: --gpus 1"
        )
    # Measure, then print memory and costs.
    with show_progress("measuring a step on fake tensors"):
        memory, costs = plan_run(options)
    # The possible gain, if it was measured, is shown beside the costs.
    headroom_source = options.headroom or options.value("output_dir")
    headroom = HeadroomFigures.read(headroom_source) if headroom_source else None
    if options.headroom is not None and headroom is None:
        raise ValueError(f"--headroom {options.headroom} holds no {HEADROOM_FILE} that can be read")
    if options.json:
        # Where costs are not known there is the reason.
        costs_record = {"error": costs} if isinstance(costs, str) else costs.to_json()
        headroom_record = None if headroom is None else asdict(headroom)
        print_json({"memory": memory.to_json(), "cost": costs_record, "headroom": headroom_record})
    else:
        print(f"{memory}\n\n{costs}")
        if headroom is not None:
            print("\n".join(["", f"headroom, from {headroom_source}:", *headroom.lines()]))
    return 0 if memory.fits else 1


def plan_run(options: PlanOptions, max_wait: float = 600.0) -> tuple[Plan, CostEstimate | str]:
    """The memory of a run, and its costs or why they are not known.

    Args:
        options (`PlanOptions`): The run.
        max_wait (`float`, *optional*, defaults to `600.0`): Seconds after which measuring a step is
            given up.
    """
    from ..llm.budget import find_price
    from ..planning import estimate_cost, plan as plan_memory

    run = _read_pilot(options) if options.config is None else _read_configuration(options)
    run = replace(run, model=find_model(run.model))
    # If the hub is out of reach, its libraries turn to their caches at once.
    if not Path(run.model).exists():
        probe_hub()
    # How the run is launched, if a file says so.
    accelerate: Mapping[str, Any] = {}
    if options.accelerate_config is not None:
        accelerate = read_options(options.accelerate_config)

    # Memory comes first, because costs depend on the layout and the parameters.
    memory = plan_memory(
        run.values,
        run.model,
        gpus=run.gpus,
        gpu_memory=options.gpu_memory,
        accelerate=accelerate,
        peft_config=run.peft_config,
        seconds=options.seconds,
        max_wait=max_wait,
    )

    if options.uses_cpu:
        memory.notes.append(
            f"{options.config} has use_cpu: true; this is the same run on GPUs, in bf16 if the "
            "file says nothing else"
        )

    # Costs need the prices of the large LLM or of the workers, and say what is missing otherwise.
    environment_model = options.value("environment_model")
    price = None
    if environment_model:
        # A price of the user's own comes first, as in training. Nothing is asked here.
        client_text = options.value("environment_client")
        settings = ClientSettings.read(client_text, "environment-client")
        price = settings.price or find_price(environment_model)
    pool = None
    pool_problem = ""
    try:
        pool = load_pool(options.value("environment"))
    except ValueError as error:
        pool_problem = f"warning: the environment's workers are not included: {error}"
    try:
        costs = estimate_cost(
            run.values,
            memory.parameters,
            gpus=memory.layout.gpus,
            rows=options.rows or run.rows,
            price=price,
            pool=pool,
            pilot=options.pilot,
            trained=memory.trained,
            kv_bytes=memory.kv_bytes,
        )
    except ValueError as error:
        return memory, f"calls, dollars and hours: {error}"
    if pool_problem:
        costs = replace(costs, notes=[*costs.notes, pool_problem])
    return memory, costs


def _read_configuration(options: PlanOptions) -> PlannedRun:
    """The run of the configuration."""
    from trl import get_peft_config

    from ..planning.planned_run import PlannedRun

    # The model may be a local folder or on the hub.
    _, args, model = options.parse()
    name = options.model_name or model.model_name_or_path
    if not name:
        raise ValueError(
            "name the model: model_name_or_path in the configuration, or --model-name NAME"
        )

    # The run was parsed as if on a CPU, with bf16 off: it is planned with what the file says.
    is_fp16 = options.values.get("fp16", False)
    values: dict[str, Any] = {**vars(args), "bf16": options.values.get("bf16", not is_fp16)}
    # Type and quantization of the weights, as the run would load them.
    loading: dict[str, Any] = {"dtype": model.dtype} if model.dtype else {}
    if model.load_in_4bit or model.load_in_8bit:
        loading["quantization_config"] = "quantized"
    values["model_init_kwargs"] = {**loading, **(args.model_init_kwargs or {})}
    return PlannedRun(
        values=values,
        model=name,
        peft_config=get_peft_config(model),
        rows=options.values.get("task_rows"),
        gpus=options.gpus,
    )


def _read_pilot(options: PlanOptions) -> PlannedRun:
    """A run like the pilot, with the options of the command line."""
    from ..planning.planned_run import PlannedRun

    assert options.pilot is not None
    changes = {}
    for name in ("max_steps", "budget_usd", "budget_tokens"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    # Processes: as an option or the launch says, else those of the pilot.
    is_launch_known = options.gpus is not None or options.accelerate_config is not None
    run = PlannedRun.like_pilot(
        options.pilot, changes, options.rows, options.processes if is_launch_known else None
    )
    return replace(run, model=options.model_name or run.model)


def load_pool(environment_name: str | None) -> Mapping[str, Worker] | None:
    """The workers of a configuration's environment, by name; `None` if it is not a pool."""
    from ..environments import Workers

    # Names of shipped environments, such as `llm`, have no file or module.
    if environment_name is None or ":" not in environment_name:
        return None
    environment = load_environment(environment_name)
    if not isinstance(environment, Workers):
        return None
    return environment.pool
