"""The environment of E-SPL's agentic search: the agent writes tool calls and reads documents.

A call is JSON in `<tool_call>` or `<function_call>` tags, with its arguments under `arguments` or `args`: the released
prompts and parsers differ, so all of these are accepted. If a call is invalid, the agent gets an observation that says
what to write instead. Documents come from a retriever: any function `(queries, k) -> documents per query`. It may
block, because [`SearchEnvironment`] calls it in threads.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..llm import ServerFailed
from ..llm.guard import call_guarded_now, failure_of
from ..rollout import Environment, Observation, Rollout, Turn, load_json, split_turn

_CALL_TAGS = ("tool_call", "function_call")
_TAG = re.compile(r"<(/?)(tool_call|function_call)>")
_ANSWER = re.compile(r"Answer:", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """One hit.

    Args:
        text (`str`): What the agent reads.
        id (`str`, *optional*, defaults to `""`): Its name in the collection.
        score (`float`, *optional*): The back end's own score; higher is better.
    """

    text: str
    id: str = ""
    score: float | None = None


class Retriever(Protocol):
    """Finds documents. Returns, for each query in order, up to `k` of them, best first. Raises if it cannot."""

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]: ...


@dataclass(frozen=True)
class SearchGrammar:
    """Turns of agentic search: one tool call, or a final text with one line `Answer: ...`.

    A turn with a call is a request (only its first call counts). A turn without one ends the episode. It is well formed
    if `Answer:` occurs exactly once; the rest of that line is the answer.
    """

    stops: tuple[str, ...] = ("</tool_call>", "</function_call>")
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        parts = split_turn(text, _CALL_TAGS)
        thought = parts.thought or None
        if parts.calls:
            return Turn(text, "act", True, thought=thought, request=parts.calls[0].body)
        if parts.is_cut or _TAG.search(parts.outside):
            return Turn(text, "malformed", False, thought=thought, problem="unclosed tag")
        answers = list(_ANSWER.finditer(parts.outside))
        answer = ""
        if len(answers) == 1:
            answer = parts.outside[answers[0].end() :].strip().partition("\n")[0].strip()
        return Turn(text, "answer", bool(answer), thought=thought, answer=answer)

    def escape(self, text: str) -> str:
        return _TAG.sub(r"[\1\2]", text)


class SearchEnvironment(Environment):
    """Answers the agent's searches with documents.

    Args:
        retriever ([`Retriever`]): Finds the documents.
        k (`int`, *optional*, defaults to `3`): Documents per query (5.3 of the released recipe).
        max_searches (`int`, *optional*, defaults to `4`): Calls in an episode; one more ends it.
        max_queries (`int`, *optional*, defaults to `8`): Queries in one call.
        max_chars (`int`, *optional*, defaults to `8192`): A longer result is cut.
        max_concurrency (`int`, *optional*, defaults to `16`): Calls of the retriever at once.
    """

    grammar = SearchGrammar()

    def __init__(
        self,
        retriever: Retriever,
        k: int = 3,
        max_searches: int = 4,
        max_queries: int = 8,
        max_chars: int = 8192,
        max_concurrency: int = 16,
    ):
        if min(k, max_searches, max_queries, max_chars, max_concurrency) < 1:
            raise ValueError(
                "k, max_searches, max_queries, max_chars and max_concurrency must be at least 1"
            )
        self.retriever, self.k = retriever, k
        self.max_searches, self.max_queries, self.max_chars = max_searches, max_queries, max_chars
        self._places = threading.BoundedSemaphore(max_concurrency)

    def step(self, rollout: Rollout) -> Observation | None:
        """Search for the last turn's queries; `None` when there were `max_searches` already."""
        if len(rollout.observations) >= self.max_searches:
            return None
        queries, problem = read_call(rollout.turns[-1].request or "", self.max_queries)
        if problem:
            return Observation(problem)
        with self._places:
            started = time.perf_counter()
            try:
                text = render_documents(queries, call_guarded_now(self.retriever, queries, self.k))
            except Exception as error:  # the retriever's failure, not the agent's
                failed = failure_of(
                    lambda text: ServerFailed(text, "search"), "the retriever", error
                )
                return Observation(error=failed, seconds=time.perf_counter() - started)
            return Observation(text[: self.max_chars], seconds=time.perf_counter() - started)


def read_call(body: str, max_queries: int = 8) -> tuple[list[str], str]:
    """The queries of a tool call's JSON, and a message to the agent if the call is invalid. Never raises.

    Accepts `{"name": "search", "arguments": {"query_list": [...]}}`, `args` for `arguments`, a single string for the
    list, arguments that are a JSON text, and the arguments alone.
    """
    example = '{"name": "search", "arguments": {"query_list": ["first query", "second query"]}}'
    try:
        call = load_json(body)
    except (ValueError, RecursionError) as error:
        reason = (
            str(error).partition(":")[0] if isinstance(error, ValueError) else "nested too deeply"
        )
        return [], f"Error: the call is not valid JSON ({reason}). Write it like this: {example}"
    if not isinstance(call, dict):
        return [], f"Error: the call must be a JSON object like this: {example}"
    name = call.get("name", "search")
    if name != "search":
        return [], f"Error: there is no tool {str(name)[:40]!r}; the only tool is search: {example}"
    arguments: Any = call.get("arguments", call.get("args", call))
    if isinstance(arguments, str):  # a JSON text, as OpenAI's format has it
        with suppress(ValueError, RecursionError):
            arguments = load_json(arguments)
    queries = arguments.get("query_list") if isinstance(arguments, dict) else None
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not queries:
        return [], f"Error: query_list is required, a list of queries: {example}"
    if not all(isinstance(query, str) and query.strip() for query in queries):
        return [], f"Error: query_list must hold texts that are not empty: {example}"
    if len(queries) > max_queries:
        return [], f"Error: at most {max_queries} queries in one call, got {len(queries)}"
    return [query.strip() for query in queries], ""


def render_documents(queries: Sequence[str], found: Sequence[Sequence[Document]]) -> str:
    """The text that the agent reads: each query with its documents, numbered from 1."""
    blocks = []
    for query, documents in zip(queries, found, strict=True):
        lines = [f"Query: {query}"]
        lines += [
            f"Document {number}:\n{document.text}"
            for number, document in enumerate(documents, start=1)
        ]
        blocks.append("\n".join(lines if documents else [*lines, "No document found."]))
    return "\n\n".join(blocks)


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
            raise ImportError(
                "BM25Retriever needs bm25s: pip install 'agentic-prompting[search]'"
            ) from error
        if not documents:
            raise ValueError("BM25Retriever needs at least one document")
        self.documents = [
            document if isinstance(document, Document) else Document(document, str(number))
            for number, document in enumerate(documents)
        ]
        self._tokenize = lambda texts: bm25s.tokenize(
            texts, stopwords=stopwords, show_progress=False
        )
        self._index = bm25s.BM25()
        self._index.index(
            self._tokenize([document.text for document in self.documents]), show_progress=False
        )

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        k = min(k, len(self.documents))
        places, scores = self._index.retrieve(
            self._tokenize(list(queries)), k=k, show_progress=False
        )
        found = (zip(*row, strict=True) for row in zip(places, scores, strict=True))
        # A score of zero means no word in common: not a hit.
        return [
            [replace(self.documents[i], score=float(score)) for i, score in row if score > 0]
            for row in found
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
            raise ImportError(
                "HTTPRetriever needs requests: pip install 'agentic-prompting[search]'"
            ) from error
        self.url, self.timeout = url, timeout
        retry = Retry(
            max_retries, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504), allowed_methods={"POST"},
            respect_retry_after_header=False,  # it may be an hour, for which each search would sleep
        )  # fmt: skip
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(
                scheme, requests.adapters.HTTPAdapter(pool_maxsize=64, max_retries=retry)
            )

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        body: Any = {"queries": list(queries), "topk": k, "return_scores": True}
        response = self._session.post(self.url, json=body, timeout=self.timeout)
        response.raise_for_status()
        result = response.json()["result"]
        if len(result) != len(queries):
            raise ValueError(f"{self.url} answered {len(result)} lists for {len(queries)} queries")
        return [[_document(hit) for hit in hits] for hits in result]


def _document(hit: dict[str, Any]) -> Document:
    """With scores a hit is `{"document": ..., "score": ...}`, without it is the document itself."""
    document, score = (hit["document"], hit.get("score")) if "document" in hit else (hit, None)
    return Document(document["contents"], str(document.get("id", "")), score)


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
        hits = (zip(*row, strict=True) for row in zip(texts, ids, distances, strict=True))
        return [
            [Document(text, id, None if far is None else -float(far)) for text, id, far in row]
            for row in hits
        ]
