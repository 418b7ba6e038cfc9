"""A stand-in for vLLM on a CPU: the parts that TRL and we use, with a small model's samples and
log-probabilities.

It has three parts: the engine; a server with vLLM's HTTP protocol; and `install`, which adds a
module named `vllm` for TRL to import. Weights are sent through a folder in place of NCCL. It has no
batching, no speed and no memory limit: it tests our side and the protocol.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

VERSION = "0.31.0"


class Engine:
    """Samples one sequence at a time."""

    def __init__(self, model):
        self.lock = threading.Lock()
        # Not by `from_pretrained`, which under ZeRO-3 would shard the engine's copy as well.
        self.model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(model)).eval()
        self.load_weights(load_file(Path(model) / "model.safetensors"))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.seeds = itertools.count()  # of requests that bring none

    def load_weights(self, named):
        """Load all or some of the model's weights."""
        with self.lock:
            unexpected = self.model.load_state_dict(dict(named), strict=False).unexpected_keys
        assert not unexpected, unexpected

    @torch.no_grad()
    def sample(self, context, max_tokens, temperature=1.0, seed=None, stop=(), **ignored):
        """Token ids, their log-probabilities, and the reason for the end."""
        generator = torch.Generator().manual_seed(
            next(self.seeds) if seed is None else seed % 2**63
        )
        ids = []
        logprobs = []
        with self.lock:
            while True:
                logits = self.model(torch.tensor([[*context, *ids]])).logits[0, -1]
                distribution = (logits / temperature).log_softmax(-1)
                ids.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
                logprobs.append(float(distribution[ids[-1]]))
                text = self.tokenizer.decode(ids)
                if ids[-1] == self.tokenizer.eos_token_id or any(
                    text.endswith(end) for end in stop or ()
                ):
                    return ids, logprobs, "stop"
                if len(ids) == max_tokens:
                    return ids, logprobs, "length"


class Server(ThreadingHTTPServer):
    """`vllm serve` on a free port of loopback, with the flags TRL asks for; a context manager.

    Args:
        model (`Path`): The model that it serves.
        weights (`Path`): The folder that stands for NCCL.
        max_model_len (`int`): Longer requests are refused, as vLLM does.
        slow_update (`float`): Seconds of a weight update, so that a caller that does not wait for
            it is noticed.
    """

    daemon_threads = True

    def __init__(self, model, weights, max_model_len=512, slow_update=0.0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = Engine(model)
        self.weights = Path(weights)
        self.max_model_len = max_model_len
        self.slow_update = slow_update
        self.updates = 0
        self.asked = []
        self.gone = False
        self.made = {}  # updates before each turn, by its seed

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.vanish()

    def vanish(self):
        """Stop answering; open requests stay without a reply."""
        self.gone = True
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        known = {
            "/health": {},
            "/v1/models": {
                "object": "list",
                "data": [{"id": "policy", "max_model_len": self.server.max_model_len}],
            },
            "/server_info": {
                "vllm_config": {
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                    "weight_transfer_config": {"backend": "nccl"},
                }
            },
            "/get_world_size": {"world_size": 1},
        }
        self._answer(known[self.path.partition("?")[0]])

    def do_POST(self):
        if self.path == "/vanish":  # of this stand-in only
            self._answer({})
            return self.server.vanish()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/v1/completions":
            return self._complete(body)
        if self.path == "/update_weights":
            time.sleep(self.server.slow_update)
            self.server.engine.load_weights(
                _receive(self.server.weights, body["update_info"]["names"])
            )
            self.server.updates += 1
        self._answer({"success": True})

    def _complete(self, body):
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        self.server.asked.append(len(prompts))
        longest = max(map(len, prompts)) + body["max_tokens"]
        if longest > self.server.max_model_len:
            limit = (
                f"This model's maximum context length is {self.server.max_model_len} tokens, got "
                f"{longest}"
            )
            return self._answer({"error": {"message": limit, "code": 400}}, 400)
        assert body["return_token_ids"]
        assert body["return_tokens_as_token_ids"]
        assert body["logprobs"] == 0
        parameters = {
            name: body.get(name) for name in ("max_tokens", "temperature", "seed", "stop")
        }
        choices = []
        for prompt in prompts:
            ids, logprobs, reason = self.server.engine.sample(prompt, **parameters)
            self.server.made[body.get("seed")] = self.server.updates
            names = [f"token_id:{token}" for token in ids]
            top = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
            scored = {
                "tokens": names,
                "token_logprobs": logprobs,
                "top_logprobs": top,
                "text_offset": [0] * len(ids),
            }
            choices.append(
                {
                    "index": len(choices),
                    "text": self.server.engine.tokenizer.decode(ids),
                    "finish_reason": reason,
                    "prompt_token_ids": prompt,
                    "token_ids": ids,
                    "logprobs": scored,
                }
            )
        self._answer(
            {
                "id": "1",
                "object": "text_completion",
                "created": 0,
                "model": "policy",
                "choices": choices,
            }
        )

    def _answer(self, content, status=200):
        if self.server.gone:
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


# --- the folder that stands for NCCL --------------------------------------------------------------


def _send(iterator, group, src, post_iter_func):
    """`packed_nccl_broadcast_producer`."""
    tensors = {
        f"{i:05}": post_iter_func(item).detach().clone().contiguous()
        for i, item in enumerate(iterator)
    }
    save_file(tensors, group / "being-written")
    os.replace(group / "being-written", group / "weights")


def _receive(folder, names):
    while not (folder / "weights").exists():
        time.sleep(0.01)
    tensors = load_file(folder / "weights")
    (folder / "weights").unlink()
    return list(zip(names, (tensors[f"{i:05}"] for i in range(len(names))), strict=True))


# --- the module named vllm ------------------------------------------------------------------------


class _LLM:
    """The colocated engine: a step answers the oldest request."""

    def __init__(self, model, **ignored):
        self.engine = Engine(model)
        self.asked = {}
        at = self
        for name in ("llm_engine", "model_executor", "driver_worker", "model_runner", "model"):
            at.__dict__[name] = types.SimpleNamespace()
            at = at.__dict__[name]
        at.load_weights = self.engine.load_weights
        vars(self.llm_engine).update(
            add_request=self._add, abort_request=self._abort, step=self._step
        )

    def sleep(self, level):
        """Only what it was told: TRL gives the weights again before it is asked."""

    def wake_up(self, tags):
        """See `sleep`."""

    def generate(self, prompts, sampling_params, use_tqdm):
        for number, prompt in enumerate(prompts):
            self._add(str(number), prompt, sampling_params)
        return [self._step()[0] for _ in prompts]

    def reset_prefix_cache(self):
        assert not self.asked, "the weights change under a request"

    def _add(self, number, prompt, parameters):
        self.asked[number] = (prompt["prompt_token_ids"], parameters)

    def _abort(self, numbers):
        for number in numbers:
            del self.asked[number]

    def _step(self):
        number = next(iter(self.asked))
        prompt, parameters = self.asked.pop(number)
        ids, logprobs, reason = self.engine.sample(prompt, **parameters)
        scored = [
            {token: types.SimpleNamespace(logprob=one, rank=1)}
            for token, one in zip(ids, logprobs, strict=True)
        ]
        sampled = types.SimpleNamespace(token_ids=ids, logprobs=scored, finish_reason=reason)
        return [
            types.SimpleNamespace(
                request_id=number, finished=True, outputs=[sampled], prompt_token_ids=prompt
            )
        ]


def install(weights):
    """Add the module `vllm`, whose weights are sent through the folder `weights`; call it before
    trl is imported.
    """
    contents = {
        "vllm": {
            "__version__": VERSION,
            "LLM": _LLM,
            "SamplingParams": dict,
            "RequestOutput": object,
        },
        "vllm.sampling_params": {"StructuredOutputsParams": dict},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": None},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": _send},
    }
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        sys.modules[name] = module
    from trl.generation.vllm_client import VLLMClient

    def through_the_folder(self, device=0):  # TRL's own function refuses every device but CUDA
        self.communicator = Path(weights)

    VLLMClient.init_communicator = through_the_folder
    VLLMClient.close_communicator = lambda self: None
