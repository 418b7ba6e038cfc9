"""An agent of the OpenAI Agents SDK, by chat completions, streamed. Run where the package is."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

CURRENCIES = {"Kenya": "shilling", "Peru": "sol"}


@function_tool
def currency_of(country: str) -> str:
    """Look up the currency of a country."""
    return f"{country} uses the {CURRENCIES[country]}."


async def main() -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI, with the rollout's key
    set_default_openai_api("chat_completions")
    agent = Agent(
        name="Teller",
        instructions="You know about money. Answer in one word.",
        model="agent",
        tools=[currency_of],
    )
    run = Runner.run_streamed(agent, sys.argv[1])
    async for _ in run.stream_events():
        pass
    print(run.final_output)


asyncio.run(main())
