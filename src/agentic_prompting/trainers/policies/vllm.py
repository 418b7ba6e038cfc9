"""vLLM as the policy, with a request per turn: to servers, or to the engine in this process.

TRL's own paths gather all prompts of a batch, and return when the longest one is done. TRL or `weight_sync.py` pushes
the weights. With a seed per request, a sample depends on context and seed alone, as far as the engine's arithmetic does
not depend on which requests share a batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trl import GRPOConfig

from ...llm.loop import background_loop, run
from ...local import Sampling
from ...rollout import Engine, Job, Sample, SampleRequest
from .vllm_client import NoAnswer, PolicyUnreachable, Refused, Server
from .weight_sync import Adapters

logger = logging.getLogger(__name__)

_MAX_REFUSED = 20  # times that a server aborts a request or does not know its adapter


class VLLMServerPolicy:
    """A [`Policy`] over vLLM servers: one request per turn, the server does the batching.

    All turns of a conversation go to one server, which keeps what it computed for them, unless that one is down. A
    request that is dropped (the server restarts or pauses) is sent again: its seed gives the same turn.

    Args:
        servers (`list[Server]`): All with the same weights.
        args (`GRPOConfig`): `generation_kwargs` are passed on as they are; `vllm_server_timeout` is how many seconds a
            turn waits for servers that do not answer.
        sampling ([`Sampling`]): Temperature and the like.
        adapters ([`Adapters`], *optional*): The adapters to sample from instead of the servers' own model.
        tell (`Callable`, *optional*): Called with a server before each request, because one that has restarted has
            other weights.

    Raises:
        [`PolicyUnreachable`]: From a call, when no server has answered within that time.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        args: GRPOConfig,
        sampling: Sampling,
        adapters: Adapters | None = None,
        tell: Callable[[Server], Awaitable[None]] | None = None,
    ):
        self.servers, self.patience, self.adapters, self.tell = (
            servers,
            args.vllm_server_timeout,
            adapters,
            tell,
        )
        self.options = {
            **_options(args, sampling),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        self.updates = 0  # of the weights that the servers have
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._under_way: set[asyncio.Task] = set()  # requests

    @property
    def max_context(self) -> int | None:
        """Tokens that every server can read."""
        return min(
            (server.max_context for server in self.servers if server.max_context), default=None
        )

    @contextmanager
    def changing(self, updates: int, everyone: Callable[[], None]) -> Iterator[None]:
        """The context around a push of weights while turns are in flight. Those end first, and others begin afterwards:
        each is sampled by the weights it names. With adapters a turn ends under its own version, and there is no wait.

        Args:
            updates (`int`): The number of updates that have made these weights; see [`Sample`].
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

    async def _sampled(
        self, request: SampleRequest, version: str | None = None, updates: int | None = None
    ) -> Sample:
        refused, down_since, pause, unknown = 0, None, 0.5, False
        while refused <= _MAX_REFUSED:
            server = self._server_for(request)
            try:
                if unknown and self.adapters and version:
                    await self.adapters.load(
                        server, version
                    )  # it has restarted and has no adapters
                await self._may_begin.wait()
                made = self.updates if updates is None else updates
                asked = asyncio.create_task(
                    self._complete(server, version or server.model, request)
                )
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
        """The conversation's own server; if that is down, the next one that is not, or the one to be tried first."""
        first, now = request.conversation or 0, time.monotonic()
        in_turn = [self.servers[(first + i) % len(self.servers)] for i in range(len(self.servers))]
        return min(in_turn, key=lambda server: max(server.down_until, now))

    async def _complete(self, server: Server, model: str, request: SampleRequest) -> dict[str, Any]:
        if self.tell is not None:
            await self.tell(server)
        asked = {
            "prompt": request.context,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
        }
        return await server.complete(model, **{**asked, **self.options})

    def _sample(self, server: Server, choice: Mapping[str, Any], updates: int) -> Sample:
        ids = choice.get("token_ids")
        if not ids or not choice["logprobs"]:
            raise RuntimeError(
                f"the server at {server.address} gave no token ids or log-probabilities: is it vLLM 0.22 or later?"
            )
        # NaN is TRL's mark for a token that the server could not score: it is left out of the correction.
        logprobs = [
            float("nan") if value is None else value
            for value in choice["logprobs"]["token_logprobs"]
        ]
        return Sample(
            ids, logprobs, choice["finish_reason"] != "length", updates=[updates] * len(ids)
        )


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
            options = SamplingParams(
                max_tokens=request.max_new_tokens, seed=request.seed, n=1, **self.options
            )
            self.engine.add_request(number, {"prompt_token_ids": request.context}, options)
            self.jobs[number] = job
        unwanted = [number for number, job in self.jobs.items() if job.cancelled]
        if unwanted:
            self.engine.abort_request(unwanted)
            for number in unwanted:
                del self.jobs[number]
        done = [output for output in self.engine.step() if output.finished]
        self.finish(
            (self.jobs.pop(output.request_id), self._sample(output.outputs[0])) for output in done
        )

    def _sample(self, output: Any) -> Sample:
        ids = list(output.token_ids)
        logprobs = [
            scored[token].logprob for token, scored in zip(ids, output.logprobs, strict=True)
        ]
        return Sample(ids, logprobs, finished=output.finish_reason != "length")


def warn_of_shaped_logprobs(sampling: Sampling, logprobs_mode: str) -> None:
    """Warn if vLLM's log-probabilities will not be those that the trainer computes under equal weights.

    vLLM reports them either before all processing, or after temperature, penalties and truncation. The trainer's are
    after temperature alone. So with truncation or a penalty the two agree at temperature 1 without processing only.

    Args:
        sampling ([`Sampling`]): The settings of the requests.
        logprobs_mode (`str`): vLLM's option of this name.
    """
    if not sampling.shaping or (logprobs_mode == "raw_logprobs" and sampling.temperature == 1):
        return
    logger.warning(
        "with top_p, top_k, min_p or repetition_penalty, vLLM's log-probabilities are not those that the trainer "
        "computes: the importance ratio of a token is too small by the share of the probability that was cut off. "
        "Unset them; or use temperature=1 and start the server with --logprobs-mode raw_logprobs"
    )


def _options(args: GRPOConfig, sampling: Sampling) -> dict[str, Any]:
    """The sampling options of every request to vLLM."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": 0,  # of the sampled token only
        **(args.generation_kwargs or {}),
    }
