"""What the agent talks to. An environment is any object with `step(rollout) -> Observation | None`."""

from .llm import CUT_MARK, LLMEnvironment, as_environment
from .search import (
    BM25Retriever,
    ChromaRetriever,
    Document,
    HTTPRetriever,
    Retriever,
    SearchEnvironment,
    SearchGrammar,
    read_call,
    render_documents,
)

__all__ = [
    "CUT_MARK",
    "BM25Retriever",
    "ChromaRetriever",
    "Document",
    "HTTPRetriever",
    "LLMEnvironment",
    "Retriever",
    "SearchEnvironment",
    "SearchGrammar",
    "as_environment",
    "read_call",
    "render_documents",
]
