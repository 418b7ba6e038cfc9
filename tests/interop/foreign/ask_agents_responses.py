"""An agent of the OpenAI Agents SDK, by Responses, which it speaks by default.

Run where the package is.
"""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

CURRENCIES = {"Kenya": "shilling", "Peru": "sol"}


@function_tool
def currency_of(country: str) -> str:
    """Look up the currency of a country."""
    return f"{country} uses the {CURRENCIES[country]}."


set_tracing_disabled(True)  # traces would go to OpenAI, with the rollout's key
agent = Agent(
    name="Teller",
    instructions="You know about money. Answer in one word.",
    model="agent",
    tools=[currency_of],
)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
