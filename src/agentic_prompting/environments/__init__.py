"""What the agent talks to. An environment is any object with `step(rollout) -> Future[Observation] | None`."""

from .function import FunctionEnvironment, as_environment
from .llm import CUT_MARK, LLMEnvironment
from .retrievers import BM25Retriever, ChromaRetriever, Document, HTTPRetriever, Retriever
from .search import SearchEnvironment, SearchGrammar, read_call, render_documents

__all__ = [
    "CUT_MARK",
    "BM25Retriever",
    "ChromaRetriever",
    "Document",
    "FunctionEnvironment",
    "HTTPRetriever",
    "LLMEnvironment",
    "Retriever",
    "SearchEnvironment",
    "SearchGrammar",
    "as_environment",
    "read_call",
    "render_documents",
]
