"""A graph of LangGraph: a node that asks the model, a node that runs its tools.

Run where the package is.
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

CURRENCIES = {"Kenya": "shilling", "Peru": "sol"}


def currency_of(country: str) -> str:
    """Look up the currency of a country."""
    return f"{country} uses the {CURRENCIES[country]}."


model = ChatOpenAI(model="agent").bind_tools([currency_of])


def ask(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([currency_of]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")

messages = [SystemMessage("You know about money. Answer in one word."), HumanMessage(sys.argv[1])]
print(graph.compile().invoke({"messages": messages})["messages"][-1].text)
