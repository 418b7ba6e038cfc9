"""`agentic-prompting serve`: a trained agent, and ProRefine, behind OpenAI's chat completions."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import another, large_llm, option


def serve(
    run: Annotated[Path, typer.Argument(help="The trained agent: what its trainer saved.")],
    environment_model: Annotated[str | None, option("The large LLM, by its name at its endpoint.")] = None,
    environment_base_url: Annotated[str | None, option("Its OpenAI-compatible endpoint.")] = None,
    environment_max_tokens: Annotated[int | None, option("Of each of its replies.")] = None,
    sandbox: Annotated[bool, option("The sandbox's oracle is the large LLM: no key.", None, "--sandbox")] = False,
    refine: Annotated[
        bool, option("Serve ProRefine over the large LLM too, as `prorefine`.", None, "--refine")
    ] = False,
    replay_cache: Annotated[Path | None, option("SQLite file: replies in it are not paid twice.")] = None,
    budget_usd: Annotated[float | None, option("Stop asking when so much is spent in all: 503 from then on.")] = None,
    name: Annotated[str, option("What clients call the agent: agent.")] = "agent",
    host: Annotated[str, option("Address to listen on: 127.0.0.1. Others need a key.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on: 8080.")] = 8080,
    key_variable: Annotated[
        str, option("Environment variable with the key that clients send: AGENTIC_PROMPTING_API_KEY.")
    ] = "AGENTIC_PROMPTING_API_KEY",
    max_concurrency: Annotated[int, option("Requests answered at once: 256.")] = 256,
    max_body_bytes: Annotated[int, option("Of a request: 1048576.")] = 2**20,
    timeout: Annotated[float, option("Seconds for a request: 120.")] = 120.0,
    max_cost_usd: Annotated[float | None, option("Dollars that one request may cost.")] = None,
    greedy: Annotated[
        bool, option("Take the likeliest token each time, not only where temperature=0 is asked for.", None, "--greedy")
    ] = False,
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
    from ..llm import Budget, charge
    from ..refine import ProRefiner, RefinedChat

    config = ServeConfig(host, port, key_variable, max_concurrency, max_body_bytes, timeout, max_cost_usd, greedy)
    config.find_key()  # a missing key is found before the model is loaded, not after
    with ExitStack() as stack:
        chat = large_llm(environment_model, environment_base_url, sandbox, replay_cache, None, stack)
        budget = Budget(usd=budget_usd)
        sampling: dict[str, Any] = {} if environment_max_tokens is None else {"max_tokens": environment_max_tokens}
        environment = LLMEnvironment(chat, **sampling)
        charge(budget, environment=environment)  # a budget that cannot be kept is found before anything is spent
        environment.check()
        task, feedback, optimizer, verifier = (another(chat, stack) for _ in range(4))  # an account for each
        refined = RefinedChat(ProRefiner(task, feedback, optimizer, verifier)) if refine else None
        service = agent_service(PromptAgent.from_pretrained(run, environment), config, name, refined, budget)
        print(f"http://{host}:{port}/v1  models: {', '.join(service.models)}  (Ctrl-C stops)", flush=True)
        run_service(service)
    return 0
