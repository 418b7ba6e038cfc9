"""The environment of E-SPL's agentic search: the agent writes tool calls and reads documents.

A call is JSON in `<tool_call>` or `<function_call>` tags, with its arguments under `arguments` or
`args`: the released prompts and parsers differ, so all of these are accepted. After an invalid call
the agent reads what to write instead. Documents come from a [`Retriever`].
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..llm import ServerFailed
from ..llm.guard import call_guarded_now, failure_of
from ..rollout import Environment, Observation, Rollout, Turn, load_json, split_turn
from .retrievers import Document, Retriever

_CALL_TAGS = ("tool_call", "function_call")
_TAG = re.compile(r"<(/?)(tool_call|function_call)>")
_ANSWER = re.compile(r"Answer:", re.IGNORECASE)
_EXAMPLE_CALL = '{"name": "search", "arguments": {"query_list": ["first query", "second query"]}}'


@dataclass(frozen=True)
class SearchGrammar:
    """The turns of agentic search: one tool call, or a final text with one line `Answer: ...`.

    A turn with a call is a request; only its first call counts. A turn without one ends the
    episode. It is well formed if `Answer:` occurs exactly once; the rest of that line is the
    answer.
    """

    stops: tuple[str, ...] = ("</tool_call>", "</function_call>")
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        # A call outside of the thoughts makes the turn a request.
        parts = split_turn(text, _CALL_TAGS)
        thought = parts.thought or None
        if parts.calls:
            return Turn(text, "act", True, thought=thought, request=parts.calls[0].body)
        if parts.is_cut or _TAG.search(parts.outside):
            return Turn(text, "malformed", False, thought=thought, problem="unclosed tag")
        # Otherwise it is the answer, if there is exactly one.
        answers = list(_ANSWER.finditer(parts.outside))
        answer = ""
        if len(answers) == 1:
            following_text = parts.outside[answers[0].end() :].strip()
            answer = following_text.partition("\n")[0].strip()
        return Turn(text, "answer", bool(answer), thought=thought, answer=answer)

    def escape(self, text: str) -> str:
        return _TAG.sub(r"[\1\2]", text)


class SearchEnvironment(Environment):
    """Answers the agent's searches with documents.

    Args:
        retriever ([`Retriever`]): Finds the documents. It may block, because it is called in
            threads.
        k (`int`, *optional*, defaults to `3`): Documents per query (5.3 of the released recipe).
        max_searches (`int`, *optional*, defaults to `4`): Calls in an episode; one more ends it.
        max_queries (`int`, *optional*, defaults to `8`): Queries in one call.
        max_chars (`int`, *optional*, defaults to `8192`): Longer results are cut to this length.
        max_concurrency (`int`, *optional*, defaults to `16`): Calls of the retriever at the same
            time.
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
        self.retriever = retriever
        self.k = k
        self.max_searches = max_searches
        self.max_queries = max_queries
        self.max_chars = max_chars
        self._call_slots = threading.BoundedSemaphore(max_concurrency)

    def step(self, rollout: Rollout) -> Observation | None:
        """Search for the queries of the last turn. After `max_searches` searches return `None`."""
        # One search too many ends the episode.
        if len(rollout.observations) >= self.max_searches:
            return None
        # Tell the agent how to write the call, if it cannot be read.
        queries, problem = read_call(rollout.turns[-1].request or "", self.max_queries)
        if problem:
            return Observation(problem)
        # Limit how many searches run at the same time.
        with self._call_slots:
            start = time.perf_counter()
            try:
                results = call_guarded_now(self.retriever, queries, self.k)
                text = render_documents(queries, results)
            except Exception as error:  # a failure of the retriever, not of the agent
                failure = failure_of(
                    lambda message: ServerFailed(message, "search"), "the retriever", error
                )
                return Observation(error=failure, seconds=time.perf_counter() - start)
            return Observation(text[: self.max_chars], seconds=time.perf_counter() - start)


def read_call(body: str, max_queries: int = 8) -> tuple[list[str], str]:
    """Parse the JSON of a tool call.

    Accepts `{"name": "search", "arguments": {"query_list": [...]}}`, `args` for `arguments`, a
    single string for the list, arguments that are JSON text, and the arguments alone.

    Args:
        body (`str`): The text between the tags.
        max_queries (`int`, *optional*, defaults to `8`): The most queries in one call.

    Returns:
        `tuple[list[str], str]`: The queries and an empty text; or no query and a message to the
        agent. Never raises.
    """
    try:
        call = load_json(body)
    except RecursionError:
        return [], _invalid_json("nested too deeply")
    except ValueError as error:
        return [], _invalid_json(str(error).partition(":")[0])
    if not isinstance(call, dict):
        return [], f"Error: the call must be a JSON object like this: {_EXAMPLE_CALL}"
    # The name may be missing, because there is only one tool.
    name = call.get("name", "search")
    if name != "search":
        return [], (
            f"Error: there is no tool {str(name)[:40]!r}; the only tool is search: {_EXAMPLE_CALL}"
        )

    arguments: object = call.get("arguments", call.get("args", call))
    # In OpenAI's format the arguments are JSON text.
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = load_json(arguments)
    # Check the queries.
    queries = arguments.get("query_list") if isinstance(arguments, dict) else None
    # A single query may stand without a list.
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not queries:
        return [], f"Error: query_list is required, a list of queries: {_EXAMPLE_CALL}"
    if not all(isinstance(query, str) and query.strip() for query in queries):
        return [], f"Error: query_list must hold texts that are not empty: {_EXAMPLE_CALL}"
    if len(queries) > max_queries:
        return [], f"Error: at most {max_queries} queries in one call, got {len(queries)}"
    return [query.strip() for query in queries], ""


def _invalid_json(reason: str) -> str:
    return f"Error: the call is not valid JSON ({reason}). Write it like this: {_EXAMPLE_CALL}"


def render_documents(queries: Sequence[str], results: Sequence[Sequence[Document]]) -> str:
    """Return the text that the agent reads: each query with its documents, numbered from 1."""
    blocks = []
    for query, documents in zip(queries, results, strict=True):
        lines = [f"Query: {query}"]
        for number, document in enumerate(documents, start=1):
            lines.append(f"Document {number}:\n{document.text}")
        if not documents:
            lines.append("No document found.")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
