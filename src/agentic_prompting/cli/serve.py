"""`agentic-prompting serve`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .options import LargeLLM, check_agent, option

try:
    from ..serve import ServeConfig
except ImportError as error:
    raise ValueError(f"serving needs more ({error.name}): pip install 'agentic-prompting[serve]'") from error


def serve(
    run: Annotated[Path, typer.Argument(help="The trained agent: what its trainer saved.")],
    llm: LargeLLM,
    config: ServeConfig,
    refine: Annotated[bool, option("Serve ProRefine over the large LLM too, as `prorefine`.", "--refine")] = False,
    name: Annotated[str, option("What clients call the agent: agent.")] = "agent",
) -> int:
    """Serve a trained agent and its large LLM as one model, for any OpenAI client."""
    llm.check()
    if refine and llm.environment is not None:
        raise ValueError("--refine asks a large LLM: name it with --environment-model, without --environment")
    config.find_key()  # a missing key is found before the model is loaded, not after
    check_agent(run)
    from ..agent import PromptAgent
    from ..refine import ProRefiner, RefinedChat
    from ..serve import agent_service, run_service

    with ExitStack() as stack:
        budget, refined = llm.budget(), None
        environment = llm.opened(stack, budget)
        if refine:
            endpoint = llm.endpoint(stack)
            refined = RefinedChat(ProRefiner(*(llm.connect(stack, *endpoint) for _ in range(4))))  # an account for each
        served = agent_service(PromptAgent.from_pretrained(run, environment), config, name, refined, budget)
        print(f"http://{config.host}:{config.port}/v1  models: {', '.join(served.models)}  (Ctrl-C stops)", flush=True)
        run_service(served)
    return 0
