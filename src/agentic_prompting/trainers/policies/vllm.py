"""vLLM as the policy: on servers, a request per turn; in this process, a request per turn of the running engine.

TRL's own paths gather all prompts of a batch, and give back when the longest is done. How the weights get there is
TRL's affair, or that of `weight_sync.py`. With a seed per request, what is sampled depends on context and seed, as far
as the engine's arithmetic does not depend on which requests share a batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import aiohttp
from trl import GRPOConfig

from ...llm.loop import background_loop, run, start
from ...local import Sampling
from ...rollout import Engine, Job, Sample, SampleRequest, gather

if TYPE_CHECKING:
    from .weight_sync import Adapters

_REQUEST_SECONDS = 1800.0  # so long, because a full server queues requests
_MAX_REFUSED = 20  # aborted, or asked for an adapter that it does not know


class PolicyUnreachable(RuntimeError):
    """A server that samples does not answer, or not with the weights it was given; the message says which, and why."""


class NoAnswer(Exception):
    """Of a server: it is not there, broke off, or failed; asking again may help."""


class Refused(Exception):
    """By a server; asking again would not help. The message is its own.

    Args:
        status (`int`): Of HTTP.
        said (`str`): What came with it.
    """

    def __init__(self, status: int, said: str):
        super().__init__(f"HTTP {status}: {said}")
        self.status = status


@dataclass(eq=False)
class Server:
    """A vLLM server. To be asked on the background loop.

    Args:
        address (`str`): Where, without `/v1`.
        model (`str`): The name of what it serves.
        max_context (`int`, *optional*): Tokens it can read, prompt and response together.
        down_until (`float`): Others are asked until then, by `time.monotonic`.
        answered (`float`): When it last answered; 0.0 when it has just not.
    """

    address: str
    model: str = ""
    max_context: int | None = None
    down_until: float = 0.0
    answered: float = 0.0

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # aiohttp: a turn costs us half a millisecond of processor time, by the client of `openai` four.
        session = aiohttp.ClientSession(
            # Idle connections go before the server closes them (after 5 s), which would look like an outage.
            connector=aiohttp.TCPConnector(limit=1000, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        )
        background_loop(self)  # which closes it at the interpreter's end
        # Left to the garbage collector its sockets would be closed first and taken off the event loop later, under
        # numbers that another connection has by then: that one would wait for ever.
        weakref.finalize(self, _close, session).atexit = False
        return session

    def close(self) -> None:
        _close(self._session)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers, JSON or text; with a body by POST.

        Raises:
            [`NoAnswer`]: There is no answer, or one that says that the server has failed.
            [`Refused`]: Of any other error.
        """
        try:
            async with self._session.request(
                "GET" if body is None else "POST", self.address + path, json=body
            ) as answer:
                said = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.answered = 0.0
            raise NoAnswer(f"{type(error).__name__}: {error}") from None
        if answer.status >= 500:
            raise NoAnswer(f"HTTP {answer.status}: {said}")
        self.answered = time.monotonic()
        if answer.status >= 400:
            raise Refused(answer.status, said)
        return json.loads(said) if answer.content_type == "application/json" else said

    async def complete(self, model: str, **asked: Any) -> dict[str, Any]:
        """Its continuation of a prompt of token ids, as `choices` has it.

        Raises:
            [`PolicyUnreachable`]: Another model has answered. And as `ask`.
        """
        completion = await self.ask("/v1/completions", {**asked, "model": model})
        if completion["model"] != model:
            raise PolicyUnreachable(f"the vLLM server at {self.address} answers as {completion['model']}, not {model}")
        return completion["choices"][0]


@asynccontextmanager
async def paused(server: Server) -> AsyncIterator[None]:
    """A server that has ended the turns under way and begins no others."""
    try:
        await server.ask("/pause?mode=wait", {})
        yield
    finally:
        await server.ask("/resume", {})


def servers_of(args: GRPOConfig) -> list[Server]:
    """The servers that a `GRPOConfig` names, each waited for up to `vllm_server_timeout` seconds.

    Raises:
        [`PolicyUnreachable`]: If one does not answer.
    """
    addresses = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    servers = [Server(address.strip().rstrip("/")) for address in addresses.split(",")]
    run(gather(_found(server, args.vllm_server_timeout) for server in servers))
    return servers


async def _found(server: Server, patience: float) -> None:
    began = time.monotonic()
    while True:
        try:
            (model, *_) = (await server.ask("/v1/models"))["data"]
            server.model, server.max_context = model["id"], model.get("max_model_len")
            return
        except (NoAnswer, Refused) as error:
            waited = time.monotonic() - began
            if isinstance(error, Refused) or waited >= patience:
                raise PolicyUnreachable(
                    f"no vLLM server at {server.address} (vllm_server_base_url) after {waited:.0f} s: {error}"
                ) from None
        await asyncio.sleep(1.0)


class VLLMServerPolicy:
    """A [`Policy`] over vLLM servers: one request per turn, the server does the batching.

    All turns of a conversation go to one server, which keeps what it computed for them, unless that one is down. A
    request that is dropped (the server restarts, or was told to pause) is asked again: its seed gives the same turn.

    Args:
        servers (`list[Server]`): All with the same weights.
        args (`GRPOConfig`): `generation_kwargs` are passed on as they are; `vllm_server_timeout` is how many seconds a
            turn waits for servers that do not answer.
        sampling ([`Sampling`]): Temperature and the like.
        adapters ([`Adapters`], *optional*): What is asked for instead of the servers' own model.
        tell (`Callable`, *optional*): Called with a server before it is asked: one that was started anew has other
            weights.

    Raises:
        [`PolicyUnreachable`]: From a call, when no server has answered for so long.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        args: GRPOConfig,
        sampling: Sampling,
        adapters: Adapters | None = None,
        tell: Callable[[Server], Awaitable[None]] | None = None,
    ):
        self.servers, self.patience, self.adapters, self.tell = servers, args.vllm_server_timeout, adapters, tell
        self.options = {**_options(args, sampling), "return_token_ids": True, "return_tokens_as_token_ids": True}
        self.updates = 0  # of the weights that the servers have
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._under_way: set[asyncio.Task] = set()  # requests

    @property
    def max_context(self) -> int | None:
        """Tokens that every server can read."""
        return min((server.max_context for server in self.servers if server.max_context), default=None)

    @contextmanager
    def changing(self, updates: int, everyone: Callable[[], None]) -> Iterator[None]:
        """Around a push of weights while turns are under way. These end first, and others begin afterwards: each is
        sampled by the weights it names. With adapters a turn ends under its own version, and nobody waits.

        Args:
            updates (`int`): That have made these weights; see [`Sample`].
            everyone (`Callable`): Waits for the other processes.
        """
        if self.adapters is not None:
            self.adapters.updates[self.adapters.version + 1] = updates
            yield
            return
        run(self._end_turns())
        try:
            everyone()
            yield
            everyone()
            self.updates = updates
        finally:
            background_loop().call_soon_threadsafe(self._may_begin.set)

    async def _end_turns(self) -> None:
        self._may_begin.clear()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def __call__(self, request: SampleRequest) -> Sample:
        if self.adapters is None:
            return await self._sampled(request)
        with self.adapters.turn() as (version, updates):
            return await self._sampled(request, version, updates)

    async def _sampled(self, request: SampleRequest, version: str | None = None, updates: int | None = None) -> Sample:
        refused, down_since, pause, unknown = 0, None, 0.5, False
        while refused <= _MAX_REFUSED:
            server = self._server_for(request)
            try:
                if unknown and self.adapters and version:
                    await self.adapters.load(server, version)  # it was started anew, and knows nothing of adapters
                await self._may_begin.wait()
                made = self.updates if updates is None else updates
                asked = asyncio.create_task(self._complete(server, version or server.model, request))
                self._under_way.add(asked)
                asked.add_done_callback(self._under_way.discard)
                choice = await asked
                unknown = False
            except NoAnswer as error:
                now = time.monotonic()
                down_since = down_since or now
                if now + pause - down_since > self.patience:
                    raise PolicyUnreachable(
                        f"the policy's vLLM server at {server.address} has not answered for "
                        f"{self.patience:g} s: {error}"
                    ) from None
                server.down_until = now + pause
                if self._server_for(request).down_until > now:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 8.0)
                continue
            except Refused as error:
                unknown = error.status == 404 and version is not None
                if not unknown:
                    raise
            else:
                if choice["finish_reason"] != "abort":
                    return self._sample(server, choice, made)
                await asyncio.sleep(pause)
            refused, down_since = refused + 1, None
        raise PolicyUnreachable(f"the vLLM server at {server.address} aborts every request")

    def _server_for(self, request: SampleRequest) -> Server:
        """The conversation's own, or the next one that is not known to be down, or the one to be up first."""
        first, now = request.conversation or 0, time.monotonic()
        in_turn = [self.servers[(first + i) % len(self.servers)] for i in range(len(self.servers))]
        return min(in_turn, key=lambda server: max(server.down_until, now))

    async def _complete(self, server: Server, model: str, request: SampleRequest) -> dict[str, Any]:
        if self.tell is not None:
            await self.tell(server)
        asked = {"prompt": request.context, "max_tokens": request.max_new_tokens, "seed": request.seed}
        return await server.complete(model, **{**asked, **self.options})

    def _sample(self, server: Server, choice: Mapping[str, Any], updates: int) -> Sample:
        ids = choice.get("token_ids")
        if not ids or not choice["logprobs"]:
            raise RuntimeError(
                f"the server at {server.address} gave no token ids or log-probabilities: is it vLLM 0.22 or later?"
            )
        # NaN, as TRL marks what the server could not score: such a token is left out of the correction.
        logprobs = [float("nan") if value is None else value for value in choice["logprobs"]["token_logprobs"]]
        return Sample(ids, logprobs, choice["finish_reason"] != "length", updates=[updates] * len(ids))


class VLLMEnginePolicy(Engine[SampleRequest, Sample]):
    """A [`Policy`] over the vLLM engine in this process: turns are added to it while it runs, and it is stepped.

    Args:
        llm (`vllm.LLM`): TRL's, which pushes the weights into it.
        args (`GRPOConfig`), sampling ([`Sampling`]): As in [`VLLMServerPolicy`].
    """

    def __init__(self, llm: Any, args: GRPOConfig, sampling: Sampling):
        super().__init__(on_callers_thread=True)
        self.engine = llm.llm_engine
        self.options = _options(args, sampling)
        self.jobs: dict[str, Job[SampleRequest, Sample]] = {}
        self._numbers = itertools.count()

    @property
    def at_work(self) -> int:
        return len(self.jobs)

    def drop(self) -> list[Job[SampleRequest, Sample]]:
        dropped, self.jobs = self.jobs, {}
        if dropped:
            self.engine.abort_request(list(dropped))
        return list(dropped.values())

    def step(self, arrived: list[Job[SampleRequest, Sample]]) -> None:
        from vllm import SamplingParams

        for job in arrived:
            number, request = str(next(self._numbers)), job.request
            options = SamplingParams(max_tokens=request.max_new_tokens, seed=request.seed, n=1, **self.options)
            self.engine.add_request(number, {"prompt_token_ids": request.context}, options)
            self.jobs[number] = job
        unwanted = [number for number, job in self.jobs.items() if job.cancelled]
        if unwanted:
            self.engine.abort_request(unwanted)
            for number in unwanted:
                del self.jobs[number]
        done = [output for output in self.engine.step() if output.finished]
        self.finish((self.jobs.pop(output.request_id), self._sample(output.outputs[0])) for output in done)

    def _sample(self, output: Any) -> Sample:
        ids = list(output.token_ids)
        logprobs = [scored[token].logprob for token, scored in zip(ids, output.logprobs, strict=True)]
        return Sample(ids, logprobs, finished=output.finish_reason != "length")


def _close(session: aiohttp.ClientSession) -> None:
    start(session.close())


def _options(args: GRPOConfig, sampling: Sampling) -> dict[str, Any]:
    """What vLLM is told besides the request."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": 0,  # of the sampled token only
        **(args.generation_kwargs or {}),
    }
