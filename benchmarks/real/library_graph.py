"""An agent written with LangGraph and langchain-openai alone: it may ask an expert once before it
answers.
"""

from collections.abc import Callable

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


def build_graph(model: ChatOpenAI, ask: Callable[[str], str], introduction: str, ending: str):
    """The graph.

    Args:
        model (`ChatOpenAI`): Writes the replies of the node `agent`.
        ask (`Callable[[str], str]`): The expert, who is given a question.
        introduction (`str`): The text before the expert's reply, in the message that the model
            reads.
        ending (`str`): The text after it.
    """

    def agent(state: MessagesState) -> dict:
        return {"messages": [model.invoke(state["messages"])]}

    def expert(state: MessagesState) -> dict:
        # What follows the question is not read.
        question, mark, _ = state["messages"][-1].text.partition("?")
        return {"messages": [HumanMessage(introduction + ask(question + mark) + ending)]}

    def next_node(state: MessagesState) -> str:
        asks = "?" in state["messages"][-1].text
        is_first_reply = len(state["messages"]) == 2
        return "expert" if asks and is_first_reply else END

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("expert", expert)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", next_node)
    graph.add_edge("expert", "agent")
    return graph.compile()
