"""Where documents come from: one protocol, three backends.

A retriever is any function `(queries, k) -> documents per query`. It may block; [`SearchEnvironment`] calls it on
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Document:
    """One hit.

    Args:
        text (`str`): What the agent reads.
        id (`str`, *optional*, defaults to `""`): Its name in the collection.
        score (`float`, *optional*): By the backend's own measure; higher is better.
    """

    text: str
    id: str = ""
    score: float | None = None


class Retriever(Protocol):
    """Finds documents. Returns, for each query in order, up to `k` of them, best first. Raises if it cannot."""

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]: ...


class BM25Retriever:
    """BM25 over documents in memory, by the package `bm25s`.

    Args:
        documents (`Sequence[str]` or `Sequence[Document]`): The collection, at least one.
        stopwords (`str`, *optional*, defaults to `"en"`): As `bm25s` takes it; `""` keeps all words.

    Raises:
        `ImportError`: Without `agentic-prompting[search]`.
        `ValueError`: For an empty collection.
    """

    def __init__(self, documents: Sequence[str | Document], stopwords: str = "en"):
        try:
            import bm25s
        except ImportError as error:
            raise ImportError("BM25Retriever needs bm25s: pip install 'agentic-prompting[search]'") from error
        if not documents:
            raise ValueError("BM25Retriever needs at least one document")
        self.documents = [
            document if isinstance(document, Document) else Document(document, str(number))
            for number, document in enumerate(documents)
        ]
        self._tokenize = lambda texts: bm25s.tokenize(texts, stopwords=stopwords, show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(self._tokenize([document.text for document in self.documents]), show_progress=False)

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        k = min(k, len(self.documents))
        places, scores = self._index.retrieve(self._tokenize(list(queries)), k=k, show_progress=False)
        return [
            # A score of zero: no word in common, nothing found.
            [
                Document(self.documents[place].text, self.documents[place].id, float(score))
                for place, score in zip(row, row_scores, strict=True)
                if score > 0
            ]
            for row, row_scores in zip(places, scores, strict=True)
        ]


class HTTPRetriever:
    """A retrieval server that speaks Search-R1's contract.

    `POST url {"queries": [...], "topk": k, "return_scores": true}` gives
    `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one inner list per query.

    Args:
        url (`str`): For example `http://localhost:8000/retrieve`.
        timeout (`float`, *optional*, defaults to `30`): Seconds for each attempt.
        max_retries (`int`, *optional*, defaults to `3`): Further attempts after a failed connection or a 5xx.

    Raises:
        `ImportError`: Without `agentic-prompting[search]`.
    """

    def __init__(self, url: str, timeout: float = 30, max_retries: int = 3):
        try:
            import requests
            from urllib3.util import Retry
        except ImportError as error:
            raise ImportError("HTTPRetriever needs requests: pip install 'agentic-prompting[search]'") from error
        self.url, self.timeout = url, timeout
        retry = Retry(max_retries, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504), allowed_methods={"POST"})
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=64, max_retries=retry))

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        body: Any = {"queries": list(queries), "topk": k, "return_scores": True}
        response = self._session.post(self.url, json=body, timeout=self.timeout)
        response.raise_for_status()
        result = response.json()["result"]
        if len(result) != len(queries):
            raise ValueError(f"{self.url} answered {len(result)} lists for {len(queries)} queries")
        return [[_document(hit) for hit in hits] for hits in result]


class ChromaRetriever:
    """A Chroma collection that embeds queries itself.

    Args:
        collection (`chromadb.Collection`): With an embedding function, for example
            `chromadb.HttpClient(...).get_collection("wiki")`. Any object with Chroma's `query` will do.
    """

    def __init__(self, collection: Any):
        self.collection = collection

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        found = self.collection.query(query_texts=list(queries), n_results=k)
        ids, texts = found["ids"], found["documents"]
        distances = found.get("distances") or [[None] * len(row) for row in ids]
        return [
            [
                Document(text, name, None if distance is None else -float(distance))
                for name, text, distance in zip(*row, strict=True)
            ]
            for row in zip(ids, texts, distances, strict=True)
        ]


def _document(hit: dict[str, Any]) -> Document:
    """With scores a hit is `{"document": ..., "score": ...}`, without it is the document itself."""
    document, score = (hit["document"], hit.get("score")) if "document" in hit else (hit, None)
    return Document(document["contents"], str(document.get("id", "")), score)
