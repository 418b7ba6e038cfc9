"""`agentic-prompting serve`: a trained agent and its large LLM as one model, for any OpenAI client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

try:
    from ..serve import ServeConfig
except ImportError as error:
    raise ValueError(
        f"serving needs more ({error.name}): pip install 'agentic-prompting[serve]'"
    ) from error

from .hub import check_trained_agent
from .option_parser import OptionParser
from .options import AskedAgent, option


@dataclass
class ServeOptions(AskedAgent):
    """The options of `serve` beside those of [`ServeConfig`]."""

    refine: bool = option("Serve ProRefine over the large LLM too, as `prorefine`.", False)
    name: str = option("What clients call the agent.", "agent")
    prefix_cache_mb: float | None = option(
        "Memory for what was computed of open conversations, in MB; more is faster with many "
        "requests at once. By default a quarter of the memory that is free beside the model."
    )


SETTINGS = (ServeOptions, ServeConfig)  # the parser returns an object of each


def serve(arguments: Sequence[str]) -> int:
    """Serve a trained agent and its large LLM as one model, for any OpenAI client."""
    parser = OptionParser("serve", SETTINGS, serve.__doc__, words="RUN")
    options, config, words = parser.parse_with_words(arguments)
    # RUN may also be given as an option.
    if options.run is not None:
        words.insert(0, str(options.run))
    if len(words) != 1:
        raise ValueError("name the trained agent: agentic-prompting serve RUN")
    folder = Path(words[0])
    options.check_environment()
    if options.refine and options.environment is not None:
        raise ValueError(
            "--refine asks a large LLM: name it with --environment-model, without --environment"
        )

    # A missing key and a port that is taken are found before the model is loaded.
    config.find_key()
    check_trained_agent(folder)
    config.check_address()
    options.start_tracing()
    from ..agent import PromptAgent
    from ..refine import ProRefiner, RefinedChat
    from ..serve import agent_service, run_service

    with ExitStack() as stack:
        budget = options.budget()
        environment = options.open_environment(stack, budget)
        refined = None
        if options.refine:
            # One client for each of ProRefine's four roles, so that each has its own bill.
            model, base_url = options.start_endpoint(stack)
            roles = [options.connect(stack, model, base_url, "environment") for _ in range(4)]
            refined = RefinedChat(ProRefiner(*roles))
        # Load the agent, and serve it until it is stopped.
        cache_mb = options.prefix_cache_mb
        if cache_mb is None:
            cache_mb = free_for_cache_mb(folder)
        agent = PromptAgent.from_pretrained(folder, environment, prefix_cache_mb=cache_mb)
        options.name_columns(agent)
        run_service(agent_service(agent, config, options.name, refined, budget))
    return 0


def free_for_cache_mb(run: Path) -> float:
    """A quarter of the memory, in MB, that is free on the device once the model in `run` is loaded."""
    import psutil
    import torch

    # Free bytes on the device that the model will be on.
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
    else:
        free = psutil.virtual_memory().available
    weights = sum(path.stat().st_size for path in run.glob("*.safetensors"))
    # A quarter of them, in units of a million bytes.
    return max(free - weights, 0) / 4e6
