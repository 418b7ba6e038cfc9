"""vLLM as the policy, with one request per turn: to servers, or to the engine in this process.

TRL's own paths gather all prompts of a batch, and return when the longest one is done. TRL or
`weight_sync.py` pushes the weights. With a seed per request, a sample depends on context and seed
alone, as far as the engine's arithmetic does not depend on which requests share a batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from ...llm.loop import background_loop, run
from ...local import Sampling
from ...rollout import Engine, PendingRequest, Sample, SampleRequest
from .vllm_client import PolicyUnreachable, VLLMRequestRejected, VLLMServer, VLLMUnavailable
from .weight_sync import AdapterVersions

if TYPE_CHECKING:  # an optional package
    from vllm import LLM, CompletionOutput

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 21  # of a request that the server aborts, or whose adapter it does not know
FIRST_PAUSE = 0.5  # seconds before a request is sent again
MAX_PAUSE = 8.0


class VLLMServerPolicy:
    """A [`Policy`] over vLLM servers: one request per turn, the server does the batching.

    All turns of a conversation go to one server, which keeps what it computed for them, unless that
    one is down. A request that is dropped (the server restarts or pauses) is sent again: its seed
    gives the same turn.

    Args:
        servers (`list[VLLMServer]`): All with the same weights.
        args (`GRPOConfig`): `generation_kwargs` are passed on as they are; `vllm_server_timeout` is
            how many seconds a turn waits for servers that do not answer.
        sampling ([`Sampling`]): Temperature and the like.
        adapters ([`AdapterVersions`], *optional*): The adapters to sample from instead of the
            servers' own model.
        before_request (`Callable`, *optional*): Called with a server before each request, because
            one that has restarted has other weights.

    Raises:
        [`PolicyUnreachable`]: From a call, when no server has answered within that time.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        args: GRPOConfig,
        sampling: Sampling,
        adapters: AdapterVersions | None = None,
        before_request: Callable[[VLLMServer], Awaitable[None]] | None = None,
    ):
        self.servers = servers
        self.timeout = args.vllm_server_timeout
        self.adapters = adapters
        self.before_request = before_request
        self.options = {
            **_sampling_options(args, sampling),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        self.updates = 0  # of the weights that the servers have
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._requests: set[asyncio.Task[dict[str, Any]]] = set()  # in flight

    @property
    def max_context(self) -> int | None:
        """Tokens that every server can read."""
        limits = [server.max_context for server in self.servers if server.max_context]
        return min(limits, default=None)

    @contextmanager
    def around_push(self, updates: int, wait_for_everyone: Callable[[], None]) -> Iterator[None]:
        """The context around a push of weights while turns are in flight.

        These turns end first, and others begin after the push: each turn is sampled by the weights
        that it names. With adapters a turn ends under its own version, so nothing waits.

        Args:
            updates (`int`): The number of updates that have led to these weights; see [`Sample`].
            wait_for_everyone (`Callable`): Waits for the other processes.
        """
        if self.adapters is not None:
            self.adapters.updates[self.adapters.version + 1] = updates
            yield
            return
        # All processes must have ended their turns before the first one pushes, and none may begin
        # others before that is done.
        run(self._end_turns())
        try:
            wait_for_everyone()
            yield
            wait_for_everyone()
            self.updates = updates
        finally:
            background_loop().call_soon_threadsafe(self._may_begin.set)

    async def _end_turns(self) -> None:
        # Turns that have not begun wait until the push is over.
        self._may_begin.clear()
        if self._requests:
            await asyncio.wait(self._requests)

    async def __call__(self, request: SampleRequest) -> Sample:
        if self.adapters is None:
            return await self._sample(request)
        with self.adapters.turn() as (version, updates):
            return await self._sample(request, version, updates)

    async def _sample(
        self, request: SampleRequest, version: str | None = None, updates: int | None = None
    ) -> Sample:
        """Return the sample of a request, under a version of the adapter or the servers' model."""
        down_since: float | None = None
        pause = FIRST_PAUSE
        needs_adapter = False
        attempts = 0
        while attempts < MAX_ATTEMPTS:
            server = self._choose_server(request)
            try:
                if needs_adapter and self.adapters and version:
                    # The server has restarted, and has no adapters.
                    await self.adapters.load(server, version)
                await self._may_begin.wait()
                sampled_updates = self.updates if updates is None else updates
                choice = await self._complete(server, version or server.model, request)
                needs_adapter = False
            except VLLMUnavailable as error:
                # Wait for this server, or another one, up to the timeout.
                now = time.monotonic()
                down_since = down_since or now
                if now + pause - down_since > self.timeout:
                    raise PolicyUnreachable(
                        f"the policy's vLLM server at {server.address} has not answered for "
                        f"{self.timeout:g} s: {error}"
                    ) from None
                server.down_until = now + pause
                if self._choose_server(request).down_until > now:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE)
                continue
            except VLLMRequestRejected as error:
                # A server that has restarted does not know the adapter: load it, then send the
                # request again.
                needs_adapter = error.status == 404 and version is not None
                if not needs_adapter:
                    raise
            else:
                if choice["finish_reason"] != "abort":
                    return self._read_choice(server, choice, sampled_updates)
                # The server has dropped the request, whose seed will give the same turn.
                await asyncio.sleep(pause)
            attempts += 1
            down_since = None
        raise PolicyUnreachable(f"the vLLM server at {server.address} aborts every request")

    def _choose_server(self, request: SampleRequest) -> VLLMServer:
        """Return the conversation's own server, else the next one that is not down.

        If all are down it is the one to be tried first.
        """
        now = time.monotonic()
        # The number of a conversation chooses its server; the others follow in turn.
        first = (request.conversation or 0) % len(self.servers)
        in_turn = [*self.servers[first:], *self.servers[:first]]
        return min(in_turn, key=lambda server: max(server.down_until, now))

    async def _complete(
        self, server: VLLMServer, model: str, request: SampleRequest
    ) -> dict[str, Any]:
        """Send a request, in a task for which a push of weights can wait."""
        task = asyncio.create_task(self._send(server, model, request))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return await task

    async def _send(self, server: VLLMServer, model: str, request: SampleRequest) -> dict[str, Any]:
        if self.before_request is not None:
            await self.before_request(server)
        options = {
            "prompt": request.context,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            **self.options,
        }
        return await server.complete(model, **options)

    def _read_choice(self, server: VLLMServer, choice: Mapping[str, Any], updates: int) -> Sample:
        ids = choice.get("token_ids")
        if not ids or not choice["logprobs"]:
            raise RuntimeError(
                f"the server at {server.address} returned no token ids or log-probabilities: use "
                "vLLM 0.22 or later"
            )
        # NaN is TRL's mark for a token that the server could not score, which the correction leaves
        # out.
        logprobs = []
        for logprob in choice["logprobs"]["token_logprobs"]:
            logprobs.append(math.nan if logprob is None else logprob)
        is_finished = choice["finish_reason"] != "length"
        return Sample(ids, logprobs, is_finished, updates=[updates] * len(ids))


class VLLMEnginePolicy(Engine[SampleRequest, Sample]):
    """A [`Policy`] over the vLLM engine in this process.

    Turns are added to it while it runs, and it is stepped.

    Args:
        llm (`vllm.LLM`): TRL's, which pushes the weights into it.
        args (`GRPOConfig`): As in [`VLLMServerPolicy`].
        sampling ([`Sampling`]): As in [`VLLMServerPolicy`].
    """

    def __init__(self, llm: LLM, args: GRPOConfig, sampling: Sampling):
        super().__init__(on_callers_thread=True)
        self.engine: Any = llm.llm_engine
        self.options = _sampling_options(args, sampling)
        self.jobs: dict[str, PendingRequest[SampleRequest, Sample]] = {}
        self._request_numbers = itertools.count()

    @property
    def active_count(self) -> int:
        return len(self.jobs)

    def drop(self) -> list[PendingRequest[SampleRequest, Sample]]:
        dropped = self.jobs
        self.jobs = {}
        if dropped:
            self.engine.abort_request(list(dropped))
        return list(dropped.values())

    def step(self, arrived: list[PendingRequest[SampleRequest, Sample]]) -> None:
        from vllm import SamplingParams

        # Add the turns that have arrived.
        for job in arrived:
            request = job.request
            request_id = str(next(self._request_numbers))
            parameters = SamplingParams(
                max_tokens=request.max_new_tokens, seed=request.seed, n=1, **self.options
            )
            prompt = {"prompt_token_ids": request.context}
            self.engine.add_request(request_id, prompt, parameters)
            self.jobs[request_id] = job

        # Remove those that are no longer wanted.
        cancelled = [request_id for request_id, job in self.jobs.items() if job.cancelled]
        if cancelled:
            self.engine.abort_request(cancelled)
            for request_id in cancelled:
                del self.jobs[request_id]

        # Let the engine compute a token of each turn, and finish the turns that are complete.
        finished = []
        for output in self.engine.step():
            if output.finished:
                job = self.jobs.pop(output.request_id)
                finished.append((job, self._read_output(output.outputs[0])))
        self.finish(finished)

    def _read_output(self, output: CompletionOutput) -> Sample:
        ids = list(output.token_ids)
        logprobs = []
        for token, candidates in zip(ids, output.logprobs, strict=True):
            logprobs.append(candidates[token].logprob)
        return Sample(ids, logprobs, finished=output.finish_reason != "length")


def warn_of_shaped_logprobs(sampling: Sampling, logprobs_mode: str) -> None:
    """Warn if vLLM's log-probabilities differ from the trainer's under equal weights.

    vLLM reports them either before all processing, or after temperature, penalties and truncation.
    The trainer's are after temperature alone. So with truncation or a penalty the two agree only at
    temperature 1 without processing.

    Args:
        sampling ([`Sampling`]): The settings of the requests.
        logprobs_mode (`str`): vLLM's option of this name.
    """
    is_raw = logprobs_mode == "raw_logprobs" and sampling.temperature == 1
    if not sampling.shaping or is_raw:
        return
    logger.warning(
        "with top_p, top_k, min_p or repetition_penalty, vLLM's log-probabilities are not those "
        "that the trainer computes: the importance ratio of a token is too small by the share of "
        "the probability that was cut off. Unset them; or use temperature=1 and start the server "
        "with --logprobs-mode raw_logprobs"
    )


def _sampling_options(args: GRPOConfig, sampling: Sampling) -> dict[str, Any]:
    """Return the sampling options of every request to vLLM."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": 0,  # of the sampled token only
        **(args.generation_kwargs or {}),
    }
