"""The shipped environments: a large LLM (Prompt-R1) and search with its retrievers (E-SPL). See [`Environment`]."""

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
