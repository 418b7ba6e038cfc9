"""The environments that come with the package. See [`Environment`].

A large LLM (Prompt-R1), search with several retrievers (E-SPL), and a pool of workers that the
agent leads.
"""

from ..rollout import as_environment
from .llm import CUT_MARK, LLMEnvironment
from .retrievers import (
    BM25Retriever,
    ChromaRetriever,
    Document,
    HTTPRetriever,
    Retriever,
)
from .search import SearchEnvironment, SearchGrammar, read_call, render_documents
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
