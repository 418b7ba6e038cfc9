"""Pushes the trainer's weights to running vLLM servers without NCCL: LoRA as an adapter with a name per version, or all
weights from a shared disk.

TRL's push needs a GPU and vLLM's code in the trainer's environment. Here the trainer writes files and sends HTTP
requests. After each push every server's log-probabilities at some positions of a text are compared with the trainer's.
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
from trl.trainer import grpo_trainer

from ...llm.loop import gather, run
from ..config import MultiTurnGRPOConfig
from .vllm_client import NoAnswer, PolicyUnreachable, Refused, Server, paused, servers_of

FOLDER = "vllm_weights"  # in output_dir
# Mean difference of a log-probability. The first push shows the difference by arithmetic alone, ~0.01 with 16 bits.
_MOST, _TIMES_THE_FIRST, _LEAST = 0.05, 5.0, 1e-3
_OF_A_TRAINER = re.compile(r".+-[0-9a-f]{8,}-\d+")  # a version's name
_NO_START = 2.0  # seconds in which no server can restart
_PLAINLY = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 5,
    "return_tokens_as_token_ids": True,
}  # fmt: skip
_PROBE = (
    "Nairobi is the capital of Kenya, a country in Africa. The shilling is its currency, and Swahili and English are "
    "its languages. Which currency is used in the country whose capital is Lima? First find the country: Lima is the "
    "capital of Peru. Then find its currency: Peru uses the sol. So the answer is the sol, and not the peso."
)


@contextmanager
def pushed_by(args: MultiTurnGRPOConfig) -> Iterator[None]:
    """Within it TRL's trainer makes the [`WeightSync`] that `vllm_sync` names; TRL has no argument for that."""
    theirs = grpo_trainer.VLLMGeneration
    if args.use_vllm and args.vllm_sync != "nccl":
        kind = {"adapter": AdapterSync, "disk": DiskSync}[args.vllm_sync]
        grpo_trainer.VLLMGeneration = partial(kind, args)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = theirs


class Adapters:
    """The versions of a LoRA adapter on running servers. A turn ends under the version that it began with.

    Args:
        name (`str`): Versions are `name-0`, `name-1`, ... Never use a name twice on a server for other weights, because
            its prefix cache is keyed by name.
        folder (`Path`): Has a folder per version, which the servers read under the same path, whenever they need it.
        servers (`list[Server]`): All servers that sample.
    """

    def __init__(self, name: str, folder: Path, servers: Sequence[Server]):
        self.name, self.folder, self.servers = name, folder, servers
        self.version = -1
        self.running: Counter[str] = Counter()  # turns of this process, by version
        self.updates: dict[
            int, int
        ] = {}  # by version, the number of updates that have made its weights

    @property
    def current(self) -> str:
        return f"{self.name}-{self.version}"

    @contextmanager
    def turn(self) -> Iterator[tuple[str, int]]:
        """The version that a turn begins with, and the number of updates that have made it."""
        model = self.current
        self.running[model] += 1
        try:
            yield model, self.updates.get(self.version, self.version)
        finally:
            self.running[model] -= 1

    @property
    def coming(self) -> str:
        return f"{self.name}-{self.version + 1}"

    async def begin_with_the_next(self) -> set[str]:
        """Let turns begin under the next version, and return the versions in use. Runs on the loop of the turns."""
        self.version += 1
        return {self.current, *(+self.running)}

    async def load(self, server: Server, model: str) -> None:
        """Make a server load a version, unless it has it already.

        Raises:
            [`PolicyUnreachable`]: The server does not load it.
        """
        body = {"lora_name": model, "lora_path": str(self.folder / model)}
        try:
            await server.ask("/v1/load_lora_adapter", body)
        except (NoAnswer, Refused) as error:
            if "has already been loaded" not in str(error):
                raise PolicyUnreachable(
                    f"the vLLM server at {server.address} does not load {body['lora_path']} (it needs --enable-lora, "
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and to read that folder): {error}"
                ) from None

    async def keep(self, models: Collection[str]) -> None:
        """Unload and delete all other versions, including those of an earlier start."""
        for folder in self.folder.glob("*-*"):
            if folder.name in models:
                continue
            for server in self.servers:
                with suppress(
                    NoAnswer, Refused
                ):  # it has restarted or is down: the version is not loaded there
                    await server.ask("/v1/unload_lora_adapter", {"lora_name": folder.name})
            shutil.rmtree(folder, ignore_errors=True)


class WeightSync(VLLMGeneration):
    """A way of pushing weights that replaces TRL's. Made and called on every process alike."""

    def __init__(self, args: MultiTurnGRPOConfig, **of_trl: Any):
        self.args, self.folder = args, Path(args.output_dir, FOLDER).absolute()
        self.first_difference: float | None = None
        super().__init__(**of_trl)

    def _init_vllm(self) -> None:
        self.servers = servers_of(self.args)
        self.vllm_client = self  # TRL asks it for `get_server_info`
        longest = min(server.max_context or 1024 for server in self.servers)
        self.probe = self.processing_class(_PROBE, add_special_tokens=False)["input_ids"][
            : longest - 1
        ]
        self.places = range(4, len(self.probe), 4)
        # Each start of the trainer has a new name, because a server may still have versions of the last one.
        (self.name,) = broadcast_object_list(
            [f"{Path(self.args.output_dir).name}-{time.time_ns() // 10**6:x}"]
        )

    def get_server_info(self) -> dict[str, Any]:
        """The fact that TRL asks for: whether log-probabilities are those before or after processing. If only the
        likeliest token may be drawn, its log-probability is 0 after processing, and lower before."""

        async def processed(server: Server) -> bool:
            choice = await server.complete(
                server.model, prompt=self.probe, max_tokens=1, logprobs=0, top_k=1
            )
            return choice["logprobs"]["token_logprobs"][0] == 0

        all_processed = all(run(gather(map(processed, self.servers))))
        return {
            "model_config": {
                "logprobs_mode": "processed_logprobs" if all_processed else "raw_logprobs"
            }
        }

    def sync_weights(self) -> None:
        """Make every server sample from the current weights.

        Raises:
            [`PolicyUnreachable`]: On every process, if one does not.
        """
        weights, expected, failed = self._weights(), self._score(), None
        if self.accelerator.is_main_process:
            try:
                self._write(weights)
                differences = run(gather(self._push(server, expected) for server in self.servers))
                self.first_difference = self.first_difference or max(differences)
            except (PolicyUnreachable, NoAnswer, Refused, OSError) as error:
                failed = str(error)
        if said := [one for one in gather_object([failed]) if one]:
            raise PolicyUnreachable(said[0])
        self._pushed(expected)

    @abstractmethod
    def _weights(self) -> Mapping[str, Tensor]:
        """The tensors to write, gathered from all processes."""

    @abstractmethod
    def _write(self, weights: Mapping[str, Tensor]) -> None: ...

    @abstractmethod
    async def _push(self, server: Server, expected: Tensor) -> float:
        """Make a server load the weights, and return the difference of its log-probabilities from the trainer's."""

    @abstractmethod
    def _pushed(self, expected: Tensor) -> None:
        """Called on every process when all servers have the weights."""

    async def tell(self, server: Server) -> None:
        """Called before each request to a server, to make sure that it still has these weights."""

    @torch.no_grad()
    def _score(self) -> Tensor:
        """The trainer's log-probabilities at some positions of the probe, of shape (positions, vocabulary)."""
        ids = torch.tensor([self.probe], device=self.accelerator.device)
        training = self.model.training
        self.model.eval()
        try:
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        finally:
            self.model.train(training)
        return logits[[place - 1 for place in self.places]].float().log_softmax(-1).cpu()

    async def _difference(self, server: Server, model: str, expected: Tensor) -> float:
        """The mean difference between the log-probabilities of a server's likeliest tokens and the trainer's.

        Raises:
            [`PolicyUnreachable`]: It is larger than arithmetic explains, or another model has answered.
        """
        # A request for each position. One for the probe's own log-probabilities would be enough, but vLLM 0.30 crashes
        # when it computes those of an adapter while other turns are in flight.
        choices = await gather(
            server.complete(model, prompt=self.probe[:place], max_tokens=1, **_PLAINLY)
            for place in self.places
        )
        scored = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        apart = [
            abs(logprob - row[int(token.removeprefix("token_id:"))].item())
            for likeliest, row in zip(scored, expected, strict=True)
            for token, logprob in likeliest.items()
        ]
        difference = sum(apart) / len(apart)
        limit = (
            _MOST
            if self.first_difference is None
            else _TIMES_THE_FIRST * self.first_difference + _LEAST
        )
        if not difference <= min(limit, _MOST):  # NaN, too
            raise PolicyUnreachable(
                f"the vLLM server at {server.address} does not sample from the weights it was given (vllm_sync="
                f"{self.args.vllm_sync!r}): its log-probabilities are {difference:.2g} away from the trainer's, where "
                f"{min(limit, _MOST):.2g} is the most"
            )
        return difference

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"first_difference": self.first_difference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_difference = state["first_difference"]


class AdapterSync(WeightSync):
    """LoRA weights as an adapter that `vllm serve` loads while it samples. Nothing is paused: turns in flight end under
    the version before."""

    def _init_vllm(self) -> None:
        prefix = getattr(self.model, "prefix", None)  # peft's
        trained = [name for name, weights in self.model.named_parameters() if weights.requires_grad]
        if prefix != "lora_" or (others := [name for name in trained if prefix not in name]):
            raise ValueError(
                "vllm_sync='adapter' carries LoRA weights and nothing else: pass peft_config=LoraConfig(...) without "
                "modules_to_save, or use vllm_sync='disk'"
                + (f" ({others[0]} is trained)" if prefix == "lora_" else "")
            )
        super()._init_vllm()
        self.adapters = Adapters(self.name, self.folder, self.servers)

    def _weights(self) -> Mapping[str, Tensor]:
        trained = {
            name: weights
            for name, weights in self.model.named_parameters()
            if weights.requires_grad
        }
        with _whole(list(trained.values())):
            return {name: _on_cpu(weights) for name, weights in trained.items()}

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        self.model.save_pretrained(
            self.folder / self.adapters.coming,
            state_dict=dict(weights),
            selected_adapters=[self.model.active_adapter],
            save_embedding_layers=False,
        )

    async def _push(self, server: Server, expected: Tensor) -> float:
        await self.adapters.load(server, self.adapters.coming)
        return await self._difference(server, self.adapters.coming, expected)

    def _pushed(self, expected: Tensor) -> None:
        in_use = set().union(*gather_object([run(self.adapters.begin_with_the_next())]))
        if self.accelerator.is_main_process:
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
    """All weights as files that the servers load again. They are paused for it, and their prefix caches are emptied. A
    server reports its version, and one that has restarted loads the weights again before the next request."""

    def _init_vllm(self) -> None:
        super()._init_vllm()
        self.version = -1
        self._telling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by address

    def _weights(self) -> Mapping[str, Tensor]:
        writes = self.accelerator.is_main_process
        return {name: _on_cpu(weights) for name, weights in self._iter_named_params() if writes}

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        save_torch_state_dict(dict(weights), self.folder)

    async def _push(self, server: Server, expected: Tensor) -> float:
        return await self._load(server, self.version + 1, expected)

    async def _load(self, server: Server, version: int, expected: Tensor) -> float:
        if self.version >= 0:
            await self._check_ours(server)
        try:
            async with paused(server):
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
                await server.ask("/collective_rpc", reload)
                await server.ask("/reset_prefix_cache", {})
                with suppress(
                    Refused
                ):  # before vLLM 0.30: it loads the weights more often than it needs to
                    await server.ask(
                        "/update_weight_version", {"new_version": f"{self.name}-{version}"}
                    )
        except Refused as error:
            raise PolicyUnreachable(
                f"the vLLM server at {server.address} loads no weights: was it started without VLLM_SERVER_DEV_MODE=1? "
                f"({error})"
            ) from None
        return await self._difference(server, server.model, expected)

    async def _check_ours(self, server: Server) -> None:
        """Check that no other trainer pushes weights to a server, from which this one would then sample.

        Raises:
            [`PolicyUnreachable`]: The server has the weights of another trainer.
        """
        with suppress(Refused):  # before vLLM 0.30
            found = str((await server.ask("/weight_info"))["weight_version"])
            if _OF_A_TRAINER.fullmatch(found) and not found.startswith(
                f"{self.name}-"
            ):  # else: started anew
                raise PolicyUnreachable(
                    f"the vLLM server at {server.address} has the weights of another trainer ({found}): give each "
                    "trainer a server of its own, or train LoRA with vllm_sync='adapter'"
                )

    def _pushed(self, expected: Tensor) -> None:
        self.version, self.expected = self.version + 1, expected

    async def tell(self, server: Server) -> None:
        if time.monotonic() - server.answered < _NO_START:
            return
        async with self._telling[server.address]:
            if time.monotonic() - server.answered < _NO_START:  # another turn has asked
                return
            with suppress(Refused):
                if (await server.ask("/weight_info"))[
                    "weight_version"
                ] == f"{self.name}-{self.version}":
                    return
            await self._load(server, self.version, self.expected)


def _whole(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """Within it each process has the whole of weights that ZeRO-3 has sharded."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(weights)


def _on_cpu(weights: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU."""
    whole = weights.full_tensor() if isinstance(weights, DTensor) else weights
    return whole.detach().to("cpu", copy=True)
