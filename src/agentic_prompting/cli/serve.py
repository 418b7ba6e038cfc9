"""`agentic-prompting serve`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .options import LargeLLM, RunOption, Tracing, check_agent, option

try:
    from ..serve import ServeConfig
except ImportError as error:
    raise ValueError(
        f"serving needs more ({error.name}): pip install 'agentic-prompting[serve]'"
    ) from error


def serve(
    llm: LargeLLM,
    config: ServeConfig,
    tracing: Tracing,
    agent: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="The trained agent: what its trainer saved."),
    ] = None,
    run: RunOption = None,
    refine: Annotated[
        bool, option("Serve ProRefine over the large LLM too, as `prorefine`.", "--refine")
    ] = False,
    name: Annotated[str, option("What clients call the agent: agent.")] = "agent",
    prefix_cache_mb: Annotated[
        float | None,
        option(
            "Memory for what was computed of open conversations, in MB; more is faster with many requests at once. By "
            "default a quarter of the memory that is free beside the model."
        ),
    ] = None,
) -> int:
    """Serve a trained agent and its large LLM as one model, for any OpenAI client."""
    if (run is None) == (agent is None):
        raise ValueError("name the trained agent: agentic-prompting serve RUN")
    folder = Path(str(agent or run))
    llm.check()
    if refine and llm.environment is not None:
        raise ValueError(
            "--refine asks a large LLM: name it with --environment-model, without --environment"
        )
    config.find_key()  # a missing key and a taken port are found before the model is loaded, not after
    check_agent(folder)
    config.check_address()
    tracing.start()
    from ..agent import PromptAgent
    from ..refine import ProRefiner, RefinedChat
    from ..serve import agent_service, run_service

    with ExitStack() as stack:
        budget, refined = llm.budget(), None
        environment = llm.opened(stack, budget)
        if refine:
            endpoint = llm.endpoint(stack)
            refined = RefinedChat(
                ProRefiner(*(llm.connect(stack, *endpoint) for _ in range(4)))
            )  # an account for each
        cache_mb = free_for_cache_mb(folder) if prefix_cache_mb is None else prefix_cache_mb
        trained = PromptAgent.from_pretrained(folder, environment, prefix_cache_mb=cache_mb)
        run_service(agent_service(trained, config, name, refined, budget))
    return 0


def free_for_cache_mb(run: Path) -> float:
    """A quarter of the memory, in MB, that is free on the device once the model in `run` is loaded."""
    import psutil
    import torch

    free = (
        torch.cuda.mem_get_info()[0]
        if torch.cuda.is_available()
        else psutil.virtual_memory().available
    )
    weights = sum(path.stat().st_size for path in run.glob("*.safetensors"))
    return max(free - weights, 0) / 4e6
