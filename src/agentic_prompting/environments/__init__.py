"""The shipped environments: a large LLM (Prompt-R1), search with its retrievers (E-SPL), and a pool of workers that the
agent leads. See [`Environment`]."""

from ..rollout import as_environment
from .llm import CUT_MARK, LLMEnvironment
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
from .worker import Worker
from .workers import Workers

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
    "Worker",
    "Workers",
    "as_environment",
    "read_call",
    "render_documents",
]
