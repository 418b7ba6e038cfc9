"""`agentic-prompting serve`: a trained agent, and ProRefine, behind OpenAI's chat completions."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from .models import large_llm


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def serve(
    run: Annotated[Path, typer.Argument(help="The trained agent: what its trainer saved.")],
    environment_model: Annotated[str | None, _option("The large LLM, by its name at its endpoint.")] = None,
    environment_base_url: Annotated[str | None, _option("Its OpenAI-compatible endpoint.")] = None,
    environment_max_tokens: Annotated[int | None, _option("Of each of its replies.")] = None,
    sandbox: Annotated[bool, _option("The sandbox's oracle is the large LLM: no key.", "--sandbox")] = False,
    refine: Annotated[bool, _option("Serve ProRefine over the large LLM too, as `prorefine`.", "--refine")] = False,
    replay_cache: Annotated[Path | None, _option("SQLite file: replies in it are not paid twice.")] = None,
    budget_usd: Annotated[float | None, _option("Stop asking when so much is spent in all: 503 from then on.")] = None,
    name: Annotated[str, _option("What clients call the agent: agent.")] = "agent",
    host: Annotated[str, _option("Address to listen on: 127.0.0.1. Others need a key.")] = "127.0.0.1",
    port: Annotated[int, _option("Port to listen on: 8080.")] = 8080,
    key_variable: Annotated[
        str, _option("Environment variable with the key that clients send: AGENTIC_PROMPTING_API_KEY.")
    ] = "AGENTIC_PROMPTING_API_KEY",
    max_concurrency: Annotated[int, _option("Requests answered at once: 256.")] = 256,
    max_body_bytes: Annotated[int, _option("Of a request: 1048576.")] = 2**20,
    timeout: Annotated[float, _option("Seconds for a request: 120.")] = 120.0,
    max_cost_usd: Annotated[float | None, _option("Dollars that one request to the agent may cost.")] = None,
) -> int:
    """Serve a trained agent and its large LLM as one model, for any OpenAI client."""
    if sandbox == (environment_model is not None):
        raise ValueError("name the large LLM with --environment-model NAME, or say --sandbox")
    try:
        from ..serve import ServeConfig, agent_service, run_service
    except ImportError as error:
        raise ValueError(f"serving needs more ({error.name}): pip install 'agentic-prompting[serve]'") from error
    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..refine import ProRefiner, RefinedChat

    config = ServeConfig(host, port, key_variable, max_concurrency, max_body_bytes, timeout, max_cost_usd)
    config.find_key()  # a missing key is found before the model is loaded, not after
    with ExitStack() as stack:
        chat = large_llm(environment_model, environment_base_url, sandbox, replay_cache, budget_usd, stack)
        sampling: dict[str, Any] = {} if environment_max_tokens is None else {"max_tokens": environment_max_tokens}
        environment = LLMEnvironment(chat, **sampling)
        environment.check()
        refined = RefinedChat(ProRefiner(chat, chat, chat, chat)) if refine else None
        service = agent_service(PromptAgent.from_pretrained(run, environment), config, name, refined)
        print(f"http://{host}:{port}/v1  models: {', '.join(service.models)}  (Ctrl-C stops)", flush=True)
        run_service(service)
    return 0
