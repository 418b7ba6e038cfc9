"""An agent of PydanticAI. Run where the package is."""

import sys

from pydantic_ai import Agent

CURRENCIES = {"Kenya": "shilling", "Peru": "sol"}
agent = Agent("openai-chat:agent", system_prompt="You know about money. Answer in one word.")


@agent.tool_plain
def currency_of(country: str) -> str:
    """Look up the currency of a country."""
    return f"{country} uses the {CURRENCIES[country]}."


print(agent.run_sync(sys.argv[1]).output)
