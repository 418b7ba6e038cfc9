"""Each process straight to a vLLM server: token ids in, token ids and log-probabilities out.

TRL's own path to the server gathers all prompts on the first process, one call at a time for the whole job. Here every
process asks for its own rollouts when they are ready, over the OpenAI endpoint that the server has anyway; TRL's client
keeps pushing the weights. With a seed per request, what is sampled depends on context and seed, as far as the server's
arithmetic does not depend on who shares a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from ..local import Sampling
from ..rollout import Sample, SampleRequest

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class Server:
    """A vLLM server that is up.

    Args:
        client (`OpenAI`): Connected to it.
        model (`str`): The name of what it serves.
        max_context (`int`, *optional*): Tokens it can read, prompt and response together.
    """

    client: OpenAI
    model: str
    max_context: int | None


def served_by(args: GRPOConfig) -> Server:
    """The server that a `GRPOConfig` names.

    Raises:
        `openai.APIConnectionError`: If there is none after some tries.
    """
    from openai import OpenAI  # 0.7 s

    address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    # A key of the environment is another service's. So long, because a full server queues requests.
    client = OpenAI(base_url=f"{address.rstrip('/')}/v1", api_key="none", max_retries=5, timeout=1800)
    (model, *_) = client.models.list().data
    return Server(client, model.id, (model.model_extra or {}).get("max_model_len"))


class ServerSampler:
    """Samples from a [`Server`], one request per rollout, all at once: the server does the batching.

    Args:
        server ([`Server`]): Where.
        args (`GRPOConfig`): `generation_kwargs` are passed on as they are.
        sampling ([`Sampling`]): Temperature and the like.
        max_connections (`int`, *optional*, defaults to `256`): Requests of this process at a time.
    """

    def __init__(self, server: Server, args: GRPOConfig, sampling: Sampling, max_connections: int = 256):
        self.server, self.max_connections = server, max_connections
        self.options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **(args.generation_kwargs or {}),
        }

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        with ThreadPoolExecutor(min(len(requests), self.max_connections)) as pool:
            return list(pool.map(self._sample, requests))

    def _sample(self, request: SampleRequest) -> Sample:
        completion = self.server.client.completions.create(
            model=self.server.model,
            prompt=request.context,
            max_tokens=request.max_new_tokens,
            seed=request.seed,
            extra_body=self.options,
        )
        (choice,) = completion.choices
        ids = (choice.model_extra or {}).get("token_ids")
        if not ids or choice.logprobs is None:
            raise RuntimeError(
                f"the server at {self.server.client.base_url} gave no token ids or log-probabilities: is it vLLM 0.22 "
                "or later?"
            )
        # NaN, as TRL marks what the server could not score: such a token is left out of the correction.
        logprobs = [float("nan") if value is None else value for value in choice.logprobs.token_logprobs or []]
        return Sample(list(ids), logprobs, finished=choice.finish_reason != "length")
