"""The environment of E-SPL's agentic search: the agent writes tool calls, documents come back.

A call is JSON in `<tool_call>` or `<function_call>` tags, its arguments under `arguments` or `args`: the released
prompts and parsers differ, so all are read. What is wrong with a call is told to the agent, in an observation that says
what to write instead.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import ServerFailed
from ..rollout import Observation, Rollout, Turn
from .retrievers import Document, Retriever

_CALL = re.compile(r"<(tool_call|function_call)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"<(/?)(tool_call|function_call)>")
_ANSWER = re.compile(r"Answer:", re.IGNORECASE)


@dataclass(frozen=True)
class SearchGrammar:
    """Turns of agentic search: one tool call, or the last words with one line `Answer: ...`.

    A turn with a call asks (only its first call counts). A turn without one ends the episode; it is well formed if
    `Answer:` occurs exactly once, and what follows it on that line is the answer.
    """

    stops: tuple[str, ...] = ("</tool_call>", "</function_call>")
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        call = _CALL.search(text)
        if call is not None:
            return Turn(text, "act", True, request=call[2].strip())
        if _TAG.search(text):
            return Turn(text, "malformed", False, problem="unclosed tag")
        answers = list(_ANSWER.finditer(text))
        answer = text[answers[0].end() :].strip().partition("\n")[0].strip() if len(answers) == 1 else ""
        return Turn(text, "answer", bool(answer), answer=answer)

    def escape(self, text: str) -> str:
        return _TAG.sub(r"[\1\2]", text)


class SearchEnvironment:
    """Answers the agent's searches with documents.

    Args:
        retriever ([`Retriever`]):
            Where documents come from.
        k (`int`, *optional*, defaults to `3`):
            Documents per query (5.3 of the released recipe).
        max_searches (`int`, *optional*, defaults to `4`):
            One call more ends the episode.
        max_queries (`int`, *optional*, defaults to `8`):
            Queries in one call.
        max_chars (`int`, *optional*, defaults to `8192`):
            A longer result is cut.
        max_concurrency (`int`, *optional*, defaults to `16`):
            Calls of the retriever at once.
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
            raise ValueError("k, max_searches, max_queries, max_chars and max_concurrency must be at least 1")
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
            return self._search(queries)

    def _search(self, queries: list[str]) -> Observation:
        started = time.perf_counter()
        try:
            text = render_documents(queries, self.retriever(queries, self.k))
        except Exception as error:  # the retriever's failure, not the agent's
            failed = ServerFailed(f"the retriever raised {type(error).__name__}: {str(error)[:200]}", "search")
            return Observation(error=failed, seconds=time.perf_counter() - started)
        return Observation(text[: self.max_chars], seconds=time.perf_counter() - started)


def read_call(body: str, max_queries: int = 8) -> tuple[list[str], str]:
    """The queries of a tool call's JSON, or what is wrong with it. Never raises.

    Accepts `{"name": "search", "arguments": {"query_list": [...]}}`, `args` for `arguments`, a single string for the
    list, and the arguments alone.
    """
    example = '{"name": "search", "arguments": {"query_list": ["first query", "second query"]}}'
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(":")[0] if isinstance(error, ValueError) else "nested too deeply"
        return [], f"Error: the call is not valid JSON ({reason}). Write it like this: {example}"
    if not isinstance(call, dict):
        return [], f"Error: the call must be a JSON object like this: {example}"
    name = call.get("name", "search")
    if name != "search":
        return [], f"Error: there is no tool {str(name)[:40]!r}; the only tool is search: {example}"
    arguments: Any = call.get("arguments", call.get("args", call))
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
    """What the agent reads: each query with its documents, numbered from 1."""
    blocks = []
    for query, documents in zip(queries, found, strict=True):
        lines = [f"Query: {query}"]
        lines += [f"Document {number}:\n{document.text}" for number, document in enumerate(documents, start=1)]
        blocks.append("\n".join(lines if documents else [*lines, "No document found."]))
    return "\n\n".join(blocks)
