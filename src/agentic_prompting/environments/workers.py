"""The environment of a conductor: an agent that leads several workers and hands replies on by
reference.

A turn makes one or several calls, each to a worker by its name. Replies are numbered through the
episode in the order of the calls. Every `#n` in a request refers to reply n: its whole text is
handed to the worker, so that the agent does not have to type it again. The calls of a turn run
concurrently; a call that refers to an earlier one of its turn waits for it. References point
backwards, so no plan can have a cycle.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..llm import Budget, Reply
from ..rollout import (
    RESET_SEED,
    AskGrammar,
    CallGrammar,
    Environment,
    FunctionCall,
    Observation,
    Rollout,
    TagGrammar,
    rollout_seed,
)
from .llm import CUT_MARK
from .shared_replies import SharedReplies
from .worker import SendOnce, WorkerReply, as_worker

_REFERENCE = re.compile(r"(?<![\w#&])#(\d{1,3})\b")
_UNAVAILABLE = "unavailable"
_MAX_REQUEST_CHARS = 2**20  # characters of a request with the replies that it hands on

WORKERS_TEMPLATE = """\
You answer a question together with the workers above. Each has its own strengths. A worker sees the request that you \
send to it and nothing else.

Write exactly one of these two things each time it is your turn.
To ask: <{think}>a short thought</{think}> and then one or several <{act} to="NAME">a request</{act}>
To finish: <{think}>why you are done</{think}> and then <{answer}>the answer, as short as it can be</{answer}>

Replies come in <{observation}>...</{observation}>, numbered #1, #2, ... A number in a request, such as #1, hands that \
whole reply to the worker: do not copy it. <{answer}>#3</{answer}> makes the whole third reply your answer.

Question: {question}"""

TOOL_TEMPLATE = """\
You answer a question together with the workers above. Each has its own strengths. A worker sees the request that you \
send to it and nothing else. Ask by calling the tool `ask`, once or several times in a turn.

Replies are numbered #1, #2, ... A number in a request, such as #1, hands that whole reply to the worker: do not copy \
it. Finish with the answer, as short as it can be; the answer #3 means the whole third reply.

Question: {question}"""

ASK_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Sends a request to a worker.",
        "parameters": {
            "type": "object",
            "properties": {
                "worker": {"type": "string", "description": "The name of the worker."},
                "request": {
                    "type": "string",
                    "description": "The request. #1 in it hands on the whole first reply.",
                },
            },
            "required": ["worker", "request"],
        },
    },
}


class Workers(Environment):
    """A pool of workers with different strengths, which the agent leads.

    Args:
        pool (`Mapping[str, Worker]`): The workers by name; a model alone is a [`Worker`] without
            description.
        sizes (`Sequence[int]`, *optional*): How many workers an episode has; drawn from the list
            for each group. All of them by default. The column `pool` of a row, a list of names,
            decides its members instead.
        names (`Sequence[str]`, *optional*): Anonymous names, drawn for each group, so that the
            agent reads descriptions instead of learning names. By default the names of `pool`.
        unavailable (`str`, *optional*, defaults to `"failed"`): `failed`: a call that fails ends
            its rollout, which gets no reward. `visible`: the agent reads "unavailable" and may go
            on. A spent budget and a rejected key end the rollout in any case.
        max_calls (`int`, *optional*, defaults to `4`): Calls in one turn. Further ones are reported
            to the agent.
        max_reply_chars (`int`, *optional*, defaults to `2048`): The agent reads the first
            characters of a longer reply, with a mark at the end. A reference hands on all of it.
        share_replies (`bool`, *optional*, defaults to `False`): Whether identical requests to a
            worker in one training step are sent, and paid for, once. For chat models at temperature
            0.
        grammar ([`CallGrammar`], *optional*): Defaults to [`AskGrammar`]. With
            `interop.ToolGrammar()` the agent makes native calls of one tool, `ask(worker,
            request)`.

    Raises:
        `ValueError`: If the pool is empty, anonymous workers lack a description, there are fewer
            names than workers, or another option has a wrong value.

    Example:

    ```python
    pool = {
        "coder": Worker(OpenAIChat("qwen-coder"), "writes and repairs Python", usd=0.002),
        "reader": Worker(OpenAIChat("qwen-14b"), "reads texts and knows facts", usd=0.004),
        "counter": Worker(lambda text: str(len(text.split())), "counts words", takes="text"),
    }
    environment = Workers(pool, names=["A", "B", "C", "D"])
    ```
    """

    repeatable_reset = True

    def __init__(
        self,
        pool: Mapping[str, Any],
        sizes: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        unavailable: Literal["failed", "visible"] = "failed",
        max_calls: int = 4,
        max_reply_chars: int = 2048,
        share_replies: bool = False,
        grammar: CallGrammar | None = None,
    ):
        self.pool = {name: as_worker(worker) for name, worker in pool.items()}
        self.sizes = tuple(sizes) if sizes is not None else (len(self.pool),)
        self.names = None if names is None else tuple(dict.fromkeys(names))
        self.unavailable = unavailable
        self.max_calls = max_calls
        self.max_reply_chars = max_reply_chars
        self.share_replies = share_replies
        self._check_options()

        self.grammar: CallGrammar = grammar if grammar is not None else AskGrammar()  # type: ignore[assignment]
        self._tools: list[Mapping[str, Any]] = []
        self.prompt_template = WORKERS_TEMPLATE
        # Without tags the agent makes native calls of one tool.
        if not isinstance(self.grammar, TagGrammar):
            self._tools = [ASK_TOOL]
            self.prompt_template = TOOL_TEMPLATE
            self.chat_template_kwargs = {"tools": [dict(ASK_TOOL)]}
        self._shared = SharedReplies()

    def _check_options(self) -> None:
        if not self.pool:
            raise ValueError("Workers needs at least one worker")
        if not self.sizes or not all(1 <= size <= len(self.pool) for size in self.sizes):
            raise ValueError(f"sizes must be between 1 and {len(self.pool)}, got {self.sizes}")
        if self.unavailable not in ("failed", "visible"):
            raise ValueError(f"unavailable must be failed or visible, got {self.unavailable!r}")
        if self.max_calls < 1 or self.max_reply_chars <= len(CUT_MARK):
            raise ValueError(
                f"max_calls must be at least 1 and max_reply_chars more than {len(CUT_MARK)}, "
                f"got {self.max_calls} and {self.max_reply_chars}"
            )
        # A name stands in the attribute of a tag, and must not look like a reference.
        for name in (*self.pool, *(self.names or ())):
            if not re.fullmatch(r"[^\s<>\"'#](?:[^\n<>\"'#]*[^\s<>\"'#])?", name):
                raise ValueError(
                    f"a worker's name cannot be {name!r}: no quotes, <, >, # or breaks"
                )
        if self.names is not None:
            if len(self.names) < max(self.sizes):
                raise ValueError(f"{max(self.sizes)} workers need as many names, got {self.names}")
            # The agent knows an anonymous worker by its description only.
            undescribed = [name for name, worker in self.pool.items() if not worker.description]
            if undescribed:
                raise ValueError(f"anonymous workers need a description: {', '.join(undescribed)}")

    # --- the pool of an episode -------------------------------------------------------------------

    def draw_members(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The members of an episode: for each name that the agent reads, the name in the pool.

        Drawn from the row's `reset_seed`, so that the rollouts of a group have the same members:
        GRPO compares them.
        """
        generator = random.Random(rollout_seed("workers", row.get(RESET_SEED) or 0))
        # Take the members that the row names, or draw some. Their order is random.
        members = row.get("pool")
        if members is None:
            members = generator.sample(sorted(self.pool), generator.choice(self.sizes))
        else:
            members = list(members)
            generator.shuffle(members)
        unknown = [member for member in members if member not in self.pool]
        if unknown or not members:
            raise ValueError(f"a row's pool is {members}; the workers are {', '.join(self.pool)}")
        # Without anonymous names the agent reads those of the pool.
        if self.names is None:
            return {member: member for member in members}
        shown_names = generator.sample(self.names, len(members))
        return dict(zip(shown_names, members, strict=True))

    def describe(self, members_by_shown_name: Mapping[str, str], row: Mapping[str, Any]) -> str:
        """The text in front of the question: the workers with their descriptions, and the row's
        budget.
        """
        lines = ["Workers:"]
        for shown_name, member in members_by_shown_name.items():
            description = self.pool[member].description
            lines.append(f"{shown_name}: {description}" if description else shown_name)
        # A budget is a text, or a number of US dollars; an empty cell among numbers is read as NaN.
        budget = row.get("budget")
        is_empty_cell = isinstance(budget, float) and math.isnan(budget)
        if budget is not None and not is_empty_cell:
            stated = budget if isinstance(budget, str) else f"at most ${budget:g}"
            lines.append(f"Budget: {stated}")
        return "\n".join(lines)

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """Draw the episode's workers and describe them in front of the last message of the prompt."""
        members_by_shown_name = self.draw_members(row)
        description = self.describe(members_by_shown_name, row)
        # A prompt is a text or a list of messages.
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = f"{description}\n\n{prompt}"
        else:
            *earlier, last = prompt
            prompt = [*earlier, {**last, "content": f"{description}\n\n{last['content']}"}]
        return {**row, "workers": members_by_shown_name, "prompt": prompt}

    # --- a turn -----------------------------------------------------------------------------------

    def list_asked(self, rollout: Rollout) -> list[str]:
        """The workers that the last turn asks, by their names in the pool, in order."""
        members_by_shown_name: Mapping[str, str] = rollout.row["workers"]
        calls = self.grammar.read_calls(rollout.turns[-1].text, self._tools)[: self.max_calls]
        shown_names = [str(call.arguments.get("worker", "")).strip() for call in calls]
        return [
            members_by_shown_name[shown_name]
            for shown_name in shown_names
            if shown_name in members_by_shown_name
        ]

    async def step(self, rollout: Rollout) -> Observation:
        """Make the calls of the last turn."""
        started = time.perf_counter()
        calls = self.grammar.read_calls(rollout.turns[-1].text, self._tools)
        # Every worker of the episode is counted, so that means over rollouts include those that
        # were not called.
        for member in rollout.row["workers"].values():
            rollout.counts.setdefault(f"workers/{member}", 0.0)
            rollout.counts.setdefault(f"workers_usd/{member}", 0.0)
        earlier_texts = rollout.quotable_texts
        tasks: dict[int, asyncio.Task[WorkerReply]] = {}

        async def find_reply(number: int) -> WorkerReply:
            # The reply of a call of this turn, or of an earlier turn.
            if number in tasks:
                return await tasks[number]
            return WorkerReply(quotable_text=earlier_texts[number - 1])

        # Start all calls. References point backwards, so the calls that a call waits for have
        # started.
        for number, call in enumerate(calls, start=len(earlier_texts) + 1):
            is_excess = len(tasks) >= self.max_calls
            answer_call = self._answer_call(call, number, is_excess, find_reply, rollout)
            tasks[number] = asyncio.ensure_future(answer_call)
        replies = await asyncio.gather(*tasks.values())

        # A failed call ends the rollout if the error is fatal, or the option `unavailable` says so.
        errors = [reply.error for reply in replies if reply.error is not None]
        failures = [error for error in errors if error.fatal or self.unavailable == "failed"]
        shown_replies = [
            f"#{number} : {indent(self._shorten(reply.text))}"
            for number, reply in zip(tasks, replies, strict=True)
        ]
        return Observation(
            self.grammar.join_responses(shown_replies),
            error=failures[0] if failures else None,
            replies=tuple(call for reply in replies for call in reply.replies),
            seconds=time.perf_counter() - started,
            quotable_texts=tuple(reply.quotable_text for reply in replies),
        )

    async def _answer_call(
        self,
        call: FunctionCall,
        number: int,
        is_excess: bool,
        find_reply: Callable[[int], Awaitable[WorkerReply]],
        rollout: Rollout,
    ) -> WorkerReply:
        """The reply to call `number` of the episode."""
        # Read the call. The reply to a mistake says what is wrong, and costs nothing.
        members_by_shown_name: Mapping[str, str] = rollout.row["workers"]
        if is_excess:
            return WorkerReply(f"only {self.max_calls} calls in one turn")
        if call.problem or call.name != "ask":
            return WorkerReply(f"a call must be ask(worker, request) {call.problem}".strip())
        shown_name = str(call.arguments.get("worker", "")).strip()
        request = str(call.arguments.get("request", "")).strip()
        if shown_name not in members_by_shown_name:
            shown_names = " ".join(members_by_shown_name)
            return WorkerReply(f"there is no worker {shown_name[:40]} , only {shown_names}")
        if not request:
            return WorkerReply("the request is empty")

        # Without the replies that the request refers to, the call is not made.
        try:
            references = await _resolve_references(request, number, find_reply)
        except _Unresolved as unresolved:
            return unresolved.reply

        member = members_by_shown_name[shown_name]
        worker = self.pool[member]
        text = _build_request(request, references, worker.substitutes_references)
        if text is None:
            return WorkerReply(
                f"the request has more than {_MAX_REQUEST_CHARS} characters with the replies in it"
            )

        # Send the request.
        rollout.counts[f"workers/{member}"] += 1
        reply = await worker.answer(
            text,
            # A worker has no history: without the number, two equal calls would be one recorded
            # sample.
            seed=rollout_seed(rollout.seed, number),
            rollout=rollout,
            session=f"{rollout.seed}.{member}",
            send_once=self._make_sender(member, rollout.batch),
        )
        # The worth of the replies, whether or not this call paid for them.
        usd = sum(call.worth.cost_usd for call in reply.replies)
        rollout.counts[f"workers_usd/{member}"] += usd
        return reply if reply.error is None else replace(reply, text=_UNAVAILABLE)

    def _make_sender(self, member: str, batch: str) -> SendOnce | None:
        """A sender that shares the replies to identical requests to a worker in a batch; `None` if
        none are shared.
        """
        if not self.share_replies or not batch:
            return None
        repeat = rollout_seed(batch, member)

        def send_once(text: str, send: Callable[[int], Awaitable[Reply]]) -> Awaitable[Reply]:
            return self._shared.ask(batch, (member, text), lambda: send(repeat))

        return send_once

    def _shorten(self, text: str) -> str:
        # The mark tells the agent that the reply goes on.
        if len(text) <= self.max_reply_chars:
            return text
        return text[: self.max_reply_chars - len(CUT_MARK)] + CUT_MARK

    # --- a run ------------------------------------------------------------------------------------

    @property
    def chat_models(self) -> dict[str, Any]:
        """The workers that are chat models, by name: `headroom(rows, pool=environment.chat_models)`
        measures each alone and the choice of an oracle.
        """
        return {name: worker.model for name, worker in self.pool.items() if worker.is_chat}

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "pool": {name: worker.identity for name, worker in self.pool.items()},
            "sizes": list(self.sizes),
            "names": None if self.names is None else list(self.names),
            "unavailable": self.unavailable,
            "max_calls": self.max_calls,
            "max_reply_chars": self.max_reply_chars,
        }

    def check(self) -> None:
        """Check every worker that has a `check`."""
        for worker in self.pool.values():
            check = getattr(worker.model, "check", None)
            if check is not None:
                check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge what each worker spends to `account/name`."""
        for name, worker in self.pool.items():
            worker.charge_to(budget, f"{account}/{name}")

    def close(self) -> None:
        """Close every worker that has a `close`."""
        for worker in self.pool.values():
            close = getattr(worker.model, "close", None)
            if close is not None:
                close()


def costs_by_worker(rollout: Rollout) -> dict[str, dict[str, float]]:
    """`calls` and `cost_usd` of each worker of an episode, by its name in the pool.

    Empty for other episodes.
    """
    costs = {}
    # The counts are named `workers/MEMBER` and `workers_usd/MEMBER`.
    for name, calls in rollout.counts.items():
        prefix, _, member = name.partition("/")
        if prefix == "workers":
            cost_usd = rollout.counts[f"workers_usd/{member}"]
            costs[member] = {"calls": int(calls), "cost_usd": cost_usd}
    return costs


class _Unresolved(Exception):
    """A request refers to a reply that cannot be had.

    `reply` says why, in place of the worker's reply.
    """

    def __init__(self, reply: WorkerReply):
        super().__init__(reply.text)
        self.reply = reply


async def _resolve_references(
    request: str, number: int, find_reply: Callable[[int], Awaitable[WorkerReply]]
) -> dict[int, str]:
    """Wait for the replies that the request of call `number` refers to; return them by their
    numbers.

    Raises:
        `_Unresolved`: One of them failed, or does not exist.
    """
    references: dict[int, str] = {}
    for reference in map(int, _REFERENCE.findall(request)):
        reply = WorkerReply()
        if 0 < reference < number:
            reply = await find_reply(reference)
        if reply.error is not None:
            raise _Unresolved(WorkerReply(_UNAVAILABLE, error=reply.error))
        if not reply.quotable_text:
            raise _Unresolved(WorkerReply(f"there is no reply #{reference}"))
        references[reference] = reply.quotable_text
    return references


def _build_request(
    request: str, references: Mapping[int, str], substitutes_references: bool
) -> str | None:
    """A request with the replies that it refers to, in their places or in front of it; `None` if it
    is too long.
    """
    handed_on = list(references.values())
    if substitutes_references:
        handed_on = [references[int(number)] for number in _REFERENCE.findall(request)]
    # A turn has room for thousands of references, and each reply could hand on the one before.
    if len(request) + sum(map(len, handed_on)) > _MAX_REQUEST_CHARS:
        return None
    if substitutes_references:
        return _REFERENCE.sub(lambda match: references[int(match[1])], request)
    return quote(references, request)


def quote(references: Mapping[int, str], request: str) -> str:
    """A request with the replies that it refers to in front of it.

    Every line of a reply but its first is indented, so that none can pose as another reply or as
    the request.
    """
    if not references:
        return request
    # Number the replies as the agent sees them.
    quoted = [f"#{number} : {indent(text)}" for number, text in references.items()]
    return "\n".join(["Quoted replies:", *quoted, "", "Request:", request])


def indent(text: str) -> str:
    """`text` with every line but the first indented, whatever it breaks lines with."""
    return "\n  ".join(text.splitlines())
