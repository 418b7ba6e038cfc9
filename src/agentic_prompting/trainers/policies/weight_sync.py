"""Pushes the trainer's weights to running vLLM servers without NCCL.

Either as a LoRA adapter with a name per version, or all weights from a shared disk. TRL's push
needs a GPU and vLLM's code in the trainer's environment; here the trainer writes files and sends
HTTP requests. After each push, every server's log-probabilities at some positions of a text are
compared with the trainer's.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.generation.vllm_generation import VLLMGeneration

from ...llm.loop import gather, run
from ..config import MultiTurnGRPOConfig
from ..patches import replace_vllm_generation
from .vllm_client import (
    PolicyUnreachable,
    VLLMRequestRejected,
    VLLMServer,
    VLLMUnavailable,
    connect_servers,
    pause_server,
)

FOLDER = "vllm_weights"  # in output_dir
# Limits on the mean difference of a log-probability. The first push shows the difference that is
# due to arithmetic alone, about 0.01 with 16 bits.
MAX_DIFFERENCE = 0.05
TIMES_FIRST_DIFFERENCE = 5.0
MIN_TOLERANCE = 1e-3
VERSION_NAME = re.compile(r".+-[0-9a-f]{8,}-\d+")  # of weights that a trainer has pushed
RESTART_SECONDS = 2.0  # no server can restart within them
PROBE_OPTIONS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 5,
    "return_tokens_as_token_ids": True,
}
PROBE_TEXT = (
    "Nairobi is the capital of Kenya, a country in Africa. The shilling is its currency, and "
    "Swahili and English are its languages. Which currency is used in the country whose capital is "
    "Lima? First find the country: Lima is the capital of Peru. Then find its currency: Peru uses "
    "the sol. So the answer is the sol, and not the peso."
)
PROBE_STRIDE = 4  # tokens between two positions that are compared


def use_weight_sync(args: MultiTurnGRPOConfig) -> AbstractContextManager[None]:
    """Return a context in which TRL's trainer creates the [`WeightSync`] that `vllm_sync` names."""
    if args.use_vllm and args.vllm_sync != "nccl":
        sync_class = {"adapter": AdapterSync, "disk": DiskSync}[args.vllm_sync]
        return replace_vllm_generation(partial(sync_class, args))
    return nullcontext()


class AdapterVersions:
    """The versions of a LoRA adapter on running servers.

    A turn ends under the version that it began with.

    Args:
        name (`str`): Versions are `name-0`, `name-1`, ... Never use a name twice on a server for
            other weights, because its prefix cache is keyed by name.
        folder (`Path`): Has a folder per version, which the servers read under the same path,
            whenever they need it.
        servers (`list[VLLMServer]`): All servers that sample.
    """

    def __init__(self, name: str, folder: Path, servers: Sequence[VLLMServer]):
        self.name = name
        self.folder = folder
        self.servers = servers
        self.version = -1
        self.running: Counter[str] = Counter()  # turns of this process, by version
        # By version, the number of updates that have led to its weights.
        self.updates: dict[int, int] = {}

    @property
    def current(self) -> str:
        """The version that turns begin with."""
        return f"{self.name}-{self.version}"

    @property
    def upcoming(self) -> str:
        """The version after the current one."""
        return f"{self.name}-{self.version + 1}"

    @contextmanager
    def turn(self) -> Iterator[tuple[str, int]]:
        """Yield the version that a turn begins with, and the number of updates that led to it."""
        # The turn counts under the version that it began with, even if the next one is pushed.
        model = self.current
        self.running[model] += 1
        try:
            yield model, self.updates.get(self.version, self.version)
        finally:
            self.running[model] -= 1

    async def advance(self) -> set[str]:
        """Let turns begin under the next version, and return the versions in use.

        Runs on the loop of the turns.
        """
        self.version += 1
        # Turns of this process may still run under older versions.
        running = {model for model, count in self.running.items() if count > 0}
        return {self.current, *running}

    async def load(self, server: VLLMServer, model: str) -> None:
        """Make a server load a version, unless it has it already.

        Raises:
            [`PolicyUnreachable`]: If the server does not load it.
        """
        body = {"lora_name": model, "lora_path": str(self.folder / model)}
        try:
            await server.request("/v1/load_lora_adapter", body)
        except (VLLMUnavailable, VLLMRequestRejected) as error:
            if "has already been loaded" not in str(error):
                raise PolicyUnreachable(
                    f"the vLLM server at {server.address} does not load {body['lora_path']} (it "
                    "needs --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and read "
                    f"access to that folder): {error}"
                ) from None

    async def keep(self, models: Collection[str]) -> None:
        """Unload and delete all other versions, including those of an earlier start."""
        for folder in self.folder.glob("*-*"):
            if folder.name in models:
                continue
            for server in self.servers:
                # A server that has restarted or is down does not have the version.
                with suppress(VLLMUnavailable, VLLMRequestRejected):
                    await server.request("/v1/unload_lora_adapter", {"lora_name": folder.name})
            shutil.rmtree(folder, ignore_errors=True)


class WeightSync(VLLMGeneration):
    """A way of pushing weights that replaces TRL's. Created and called on every process alike.

    Args:
        args ([`MultiTurnGRPOConfig`]): The training arguments.
        **kwargs: Those of TRL's class.
    """

    def __init__(self, args: MultiTurnGRPOConfig, **kwargs: Any):
        self.args = args
        self.folder = Path(args.output_dir, FOLDER).absolute()
        self.first_difference: float | None = None
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        """Connect to the servers, in place of TRL's client."""
        self.servers = connect_servers(self.args)
        self.vllm_client = self  # TRL calls its `get_server_info`

        # The text at whose positions log-probabilities are compared.
        max_context = min(server.max_context or 1024 for server in self.servers)
        token_ids = self.processing_class(PROBE_TEXT, add_special_tokens=False)["input_ids"]
        # Leave room in the context for the one token that a request samples.
        self.probe_ids = token_ids[: max_context - 1]
        self.probe_positions = range(PROBE_STRIDE, len(self.probe_ids), PROBE_STRIDE)

        # Each start of the trainer has a new name, because a server may still have versions of the
        # previous one. All processes take the first one's.
        milliseconds = time.time_ns() // 10**6
        names = [f"{Path(self.args.output_dir).name}-{milliseconds:x}"]
        (self.name,) = broadcast_object_list(names)

    def get_server_info(self) -> dict[str, Any]:
        """Return the fact that TRL asks for: if log-probabilities are reported after processing.

        If only the likeliest token may be drawn, its log-probability is 0 after processing, and
        lower before.
        """

        async def reports_processed(server: VLLMServer) -> bool:
            choice = await server.complete(
                server.model, prompt=self.probe_ids, max_tokens=1, logprobs=0, top_k=1
            )
            return choice["logprobs"]["token_logprobs"][0] == 0

        are_processed = run(gather(reports_processed(server) for server in self.servers))
        mode = "processed_logprobs" if all(are_processed) else "raw_logprobs"
        return {"model_config": {"logprobs_mode": mode}}

    def sync_weights(self) -> None:
        """Make every server sample from the current weights.

        Raises:
            [`PolicyUnreachable`]: On every process, if one does not.
        """
        # Every process takes part in gathering the weights and scoring the probe.
        weights = self._gather_weights()
        expected_logprobs = self._score_probe()

        # The first process writes the weights and makes the servers load them.
        problem = None
        if self.accelerator.is_main_process:
            try:
                self._write(weights)
                differences = run(
                    gather(self._push(server, expected_logprobs) for server in self.servers)
                )
                self.first_difference = self.first_difference or max(differences)
            except (PolicyUnreachable, VLLMUnavailable, VLLMRequestRejected, OSError) as error:
                problem = str(error)

        # A failure on the first process is raised on all of them.
        problems = [message for message in gather_object([problem]) if message]
        if problems:
            raise PolicyUnreachable(problems[0])
        self._finish_push(expected_logprobs)

    @abstractmethod
    def _gather_weights(self) -> Mapping[str, Tensor]:
        """Return the tensors to write, gathered from all processes."""

    @abstractmethod
    def _write(self, weights: Mapping[str, Tensor]) -> None: ...

    @abstractmethod
    async def _push(self, server: VLLMServer, expected_logprobs: Tensor) -> float:
        """Make a server load the weights.

        Returns:
            `float`: The difference of its log-probabilities from the trainer's.
        """

    @abstractmethod
    def _finish_push(self, expected_logprobs: Tensor) -> None:
        """Called on every process when all servers have the weights."""

    async def ensure_current(self, server: VLLMServer) -> None:
        """Called before each request to a server, to make sure that it still has these weights."""

    @torch.no_grad()
    def _score_probe(self) -> Tensor:
        """Return the trainer's log-probabilities at the probe's positions.

        Returns:
            `torch.Tensor`: Of shape `(positions, vocabulary)`.
        """
        # One forward pass over the probe, without dropout and in the precision of training.
        ids = torch.tensor([self.probe_ids], device=self.accelerator.device)
        was_training = self.model.training
        self.model.eval()
        try:
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        finally:
            self.model.train(was_training)
        # The logits at a position predict the token after it.
        rows = [position - 1 for position in self.probe_positions]
        return logits[rows].float().log_softmax(-1).cpu()

    async def _measure_difference(
        self, server: VLLMServer, model: str, expected_logprobs: Tensor
    ) -> float:
        """Return the mean difference between a server's log-probabilities and the trainer's.

        They are compared for the server's likeliest tokens.

        Raises:
            [`PolicyUnreachable`]: If it is larger than arithmetic explains, or another model has
                answered.
        """
        # A request for each position. One for the probe's own log-probabilities would be enough,
        # but vLLM 0.30 crashes if it computes those of an adapter while other turns are in flight.
        choices = await gather(
            server.complete(model, prompt=self.probe_ids[:position], max_tokens=1, **PROBE_OPTIONS)
            for position in self.probe_positions
        )
        # A server reports only its likeliest tokens, so these are compared.
        differences = []
        for choice, expected in zip(choices, expected_logprobs, strict=True):
            for token, logprob in choice["logprobs"]["top_logprobs"][0].items():
                token_id = int(token.removeprefix("token_id:"))
                differences.append(abs(logprob - expected[token_id].item()))
        difference = sum(differences) / len(differences)

        # The first push shows the difference of the arithmetic, which then lowers the limit.
        limit = MAX_DIFFERENCE
        if self.first_difference is not None:
            tolerance = TIMES_FIRST_DIFFERENCE * self.first_difference + MIN_TOLERANCE
            limit = min(limit, tolerance)
        if not difference <= limit:  # NaN, too
            raise PolicyUnreachable(
                f"the vLLM server at {server.address} does not sample from the pushed weights "
                f"(vllm_sync={self.args.vllm_sync!r}): its log-probabilities differ from the "
                f"trainer's by {difference:.2g}, and at most {limit:.2g} is expected"
            )
        return difference

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"first_difference": self.first_difference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_difference = state["first_difference"]


class AdapterSync(WeightSync):
    """LoRA weights as an adapter that `vllm serve` loads while it samples.

    Nothing is paused: turns in flight end under the previous version.
    """

    def _init_vllm(self) -> None:
        # Other weights than LoRA's would be trained, but never reach the servers.
        trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        has_lora = getattr(self.model, "prefix", None) == "lora_"  # peft's
        other_weights = [name for name in trained if "lora_" not in name]
        if not has_lora or other_weights:
            example = f" ({other_weights[0]} is trained)" if has_lora else ""
            raise ValueError(
                "vllm_sync='adapter' pushes only LoRA weights: pass peft_config=LoraConfig(...) "
                f"without modules_to_save, or use vllm_sync='disk'{example}"
            )
        super()._init_vllm()
        self.adapters = AdapterVersions(self.name, self.folder, self.servers)

    def _gather_weights(self) -> Mapping[str, Tensor]:
        trained = {}
        for name, weight in self.model.named_parameters():
            if weight.requires_grad:
                trained[name] = weight
        with _gather_zero3(list(trained.values())):
            return {name: _copy_to_cpu(weight) for name, weight in trained.items()}

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        self.model.save_pretrained(
            self.folder / self.adapters.upcoming,
            state_dict=dict(weights),
            selected_adapters=[self.model.active_adapter],
            save_embedding_layers=False,
        )

    async def _push(self, server: VLLMServer, expected_logprobs: Tensor) -> float:
        await self.adapters.load(server, self.adapters.upcoming)
        return await self._measure_difference(server, self.adapters.upcoming, expected_logprobs)

    def _finish_push(self, expected_logprobs: Tensor) -> None:
        # Processes may have turns under older versions; all other versions are deleted.
        versions_by_process = gather_object([run(self.adapters.advance())])
        if self.accelerator.is_main_process:
            in_use = set().union(*versions_by_process)
            run(self.adapters.keep(in_use))

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "name": self.adapters.name,
            "version": self.adapters.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.adapters.version = state.get("version", -1)  # absent after `disk`


class DiskSync(WeightSync):
    """All weights as files that the servers load again.

    They are paused for it, and their prefix caches are emptied. A server reports its version, and
    one that has restarted loads the weights again before the next request.
    """

    def _init_vllm(self) -> None:
        super()._init_vllm()
        self.version = -1
        self._check_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by address

    def _gather_weights(self) -> Mapping[str, Tensor]:
        weights = {}
        for name, weight in self._iter_named_params():  # a collective, on every process
            if self.accelerator.is_main_process:
                weights[name] = _copy_to_cpu(weight)
        return weights

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        save_torch_state_dict(dict(weights), self.folder)

    async def _push(self, server: VLLMServer, expected_logprobs: Tensor) -> float:
        return await self._load(server, self.version + 1, expected_logprobs)

    async def _load(self, server: VLLMServer, version: int, expected_logprobs: Tensor) -> float:
        # Before the first push a server may have the weights of an earlier run, which is no
        # conflict.
        if self.version >= 0:
            await self._check_ownership(server)
        try:
            async with pause_server(server):
                arguments = {"weights_path": str(self.folder)}
                await server.request(
                    "/collective_rpc", {"method": "reload_weights", "kwargs": arguments}
                )
                await server.request("/reset_prefix_cache", {})
                # vLLM before 0.30 has no versions: it loads the weights more often than needed.
                with suppress(VLLMRequestRejected):
                    body = {"new_version": f"{self.name}-{version}"}
                    await server.request("/update_weight_version", body)
        except VLLMRequestRejected as error:
            raise PolicyUnreachable(
                f"the vLLM server at {server.address} loads no weights: start it with "
                f"VLLM_SERVER_DEV_MODE=1 ({error})"
            ) from None
        return await self._measure_difference(server, server.model, expected_logprobs)

    async def _check_ownership(self, server: VLLMServer) -> None:
        """Check that no other trainer pushes weights to a server.

        Raises:
            [`PolicyUnreachable`]: If the server has the weights of another trainer.
        """
        with suppress(VLLMRequestRejected):  # vLLM before 0.30
            version = str((await server.request("/weight_info"))["weight_version"])
            # A server that has restarted has no version of a trainer.
            is_pushed = VERSION_NAME.fullmatch(version) is not None
            if is_pushed and not version.startswith(f"{self.name}-"):
                raise PolicyUnreachable(
                    f"the vLLM server at {server.address} has the weights of another trainer "
                    f"({version}): give each trainer a server of its own, or train LoRA with "
                    "vllm_sync='adapter'"
                )

    def _finish_push(self, expected_logprobs: Tensor) -> None:
        self.version += 1
        self.expected_logprobs = expected_logprobs

    async def ensure_current(self, server: VLLMServer) -> None:
        # A server that has answered this recently cannot have restarted since.
        if time.monotonic() - server.answered_at < RESTART_SECONDS:
            return
        async with self._check_locks[server.address]:
            if time.monotonic() - server.answered_at < RESTART_SECONDS:
                return  # another turn has checked it
            # A server that reports this version needs nothing; any other loads the weights again.
            with suppress(VLLMRequestRejected):
                version = (await server.request("/weight_info"))["weight_version"]
                if version == f"{self.name}-{self.version}":
                    return
            await self._load(server, self.version, self.expected_logprobs)


def _gather_zero3(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which each process has the whole of weights that ZeRO-3 has sharded."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(weights)


def _copy_to_cpu(weight: Tensor) -> Tensor:
    """Return a copy of the whole tensor on the CPU."""
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return weight.detach().to("cpu", copy=True)
