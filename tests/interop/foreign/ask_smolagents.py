"""An agent of smolagents that calls tools. Run where the package is."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

CURRENCIES = {"Kenya": "shilling", "Peru": "sol"}


@tool
def currency_of(country: str) -> str:
    """Look up the currency of a country.

    Args:
        country: The name of the country.
    """
    return f"{country} uses the {CURRENCIES[country]}."


agent = ToolCallingAgent(tools=[currency_of], model=OpenAIModel("agent"), max_steps=4)
print(agent.run(sys.argv[1]))
