"""Retrievers: functions that find documents for queries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class Document:
    """A document that a retriever found.

    Args:
        text (`str`): The text that the agent reads.
        id (`str`, *optional*, defaults to `""`): Its id in the collection.
        score (`float`, *optional*): The retriever's own score; higher is better.
    """

    text: str
    id: str = ""
    score: float | None = None


class Retriever(Protocol):
    """Finds documents. Returns up to `k` of them for each query, best first; raises on failure."""

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]: ...


class BM25Retriever:
    """BM25 over documents in memory, with the package `bm25s`.

    Args:
        documents (`Sequence[str]` or `Sequence[Document]`): The collection, at least one.
        stopwords (`str`, *optional*, defaults to `"en"`): As for `bm25s`; `""` keeps all words.

    Raises:
        `ImportError`: `agentic-prompting[search]` is not installed.
        `ValueError`: The collection is empty.
    """

    def __init__(self, documents: Sequence[str | Document], stopwords: str = "en"):
        # If JAX is installed, bm25s uses it at its import already, and JAX by default takes three
        # quarters of a GPU's memory at its first use, which the model then lacks.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        try:
            import bm25s
        except ImportError as error:
            raise ImportError(
                "BM25Retriever needs bm25s: pip install 'agentic-prompting[search]'"
            ) from error
        if not documents:
            raise ValueError("BM25Retriever needs at least one document")
        # The id of a plain text is its position.
        self.documents: list[Document] = []
        for number, document in enumerate(documents):
            if not isinstance(document, Document):
                document = Document(document, id=str(number))
            self.documents.append(document)
        self._tokenize = lambda texts: bm25s.tokenize(
            texts, stopwords=stopwords, show_progress=False
        )
        # Index the collection once.
        self._index = bm25s.BM25()
        tokens = self._tokenize([document.text for document in self.documents])
        self._index.index(tokens, show_progress=False)

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        # Tokenise the queries like the collection.
        tokens = self._tokenize(list(queries))
        # bm25s cannot return more documents than there are.
        k = min(k, len(self.documents))
        numbers, scores = self._index.retrieve(
            tokens, k=k, show_progress=False, backend_selection="numpy"
        )
        results = []
        for query_numbers, query_scores in zip(numbers, scores, strict=True):
            # A score of zero means no word in common: no hit.
            hits = [
                replace(self.documents[number], score=float(score))
                for number, score in zip(query_numbers, query_scores, strict=True)
                if score > 0
            ]
            results.append(hits)
        return results


class HTTPRetriever:
    """A retrieval server with Search-R1's protocol.

    `POST url {"queries": [...], "topk": k, "return_scores": true}` returns
    `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one inner list per query.

    Args:
        url (`str`): For example `http://localhost:8000/retrieve`.
        timeout (`float`, *optional*, defaults to `30`): The limit of each attempt in seconds.
        max_retries (`int`, *optional*, defaults to `3`): Further attempts after a failed connection
            or a 5xx.

    Raises:
        `ImportError`: `agentic-prompting[search]` is not installed.
    """

    def __init__(self, url: str, timeout: float = 30, max_retries: int = 3):
        try:
            import requests
            from urllib3.util import Retry
        except ImportError as error:
            raise ImportError(
                "HTTPRetriever needs requests: pip install 'agentic-prompting[search]'"
            ) from error
        self.url = url
        self.timeout = timeout
        # Searches can be repeated, so failed ones are.
        retry = Retry(
            max_retries,
            backoff_factor=0.5,
            status_forcelist=(500, 502, 503, 504),
            allowed_methods={"POST"},
            # A server may ask for an hour, for which each search would sleep.
            respect_retry_after_header=False,
        )
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=64, max_retries=retry)
        self._session = requests.Session()
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        body: Any = {"queries": list(queries), "topk": k, "return_scores": True}
        response = self._session.post(self.url, json=body, timeout=self.timeout)
        response.raise_for_status()
        result = response.json()["result"]
        # Lists that do not belong to the queries would mislead the agent.
        if len(result) != len(queries):
            raise ValueError(f"{self.url} answered {len(result)} lists for {len(queries)} queries")
        return [[_read_hit(hit) for hit in hits] for hits in result]


def _read_hit(hit: Mapping[str, Any]) -> Document:
    # Servers that do not return scores return the documents themselves.
    document = hit.get("document", hit)
    score = hit.get("score") if "document" in hit else None
    return Document(document["contents"], id=str(document.get("id", "")), score=score)


class ChromaRetriever:
    """A Chroma collection that embeds queries itself.

    Args:
        collection (`chromadb.Collection`): A collection with an embedding function, for example
            `chromadb.HttpClient(...).get_collection("wiki")`, or any object with the same `query`.
    """

    def __init__(self, collection: Any):
        self.collection = collection

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        result = self.collection.query(query_texts=list(queries), n_results=k)
        distances = result.get("distances")
        # Each query has a list of documents.
        results = []
        for position, texts in enumerate(result["documents"]):
            documents = []
            for number, text in enumerate(texts):
                # Chroma may return no distances. A smaller distance is a better score.
                distance = distances[position][number] if distances else None
                document = Document(
                    text,
                    id=result["ids"][position][number],
                    score=None if distance is None else -float(distance),
                )
                documents.append(document)
            results.append(documents)
        return results
