"""A real `vllm serve` on loopback, to be paused, killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import torch

LOGPROBS = ["--logprobs-mode", "processed_logprobs"]
"""The log-probabilities that training needs."""

CPU = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens",
    "16384",
]
"""What a CPU needs (docs/howto/vllm.md)."""

LORA = ("--enable-lora", "--max-loras", "2")
"""What adapters need."""

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_SERVER_DEV_MODE": "1",  # pausing, and weights from a disk
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_START_SECONDS = 280


class VLLMServer:
    """A context manager; its log is `folder/vllm.log`.

    Args:
        model (`Path`): The model that it serves under the name `policy`.
        folder (`Path`): The folder for its log.
        *flags (`str`): Further flags of `vllm serve`.
        gpu (`str`, *optional*): The GPUs that it sees.
    """

    def __init__(self, model, folder, *flags, gpu=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "vllm.log"
        # Not the command `vllm`, which looks for a distribution of that name: here it is vllm-cpu.
        self.command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "policy",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *LOGPROBS,
            *([] if torch.cuda.is_available() else CPU),
            *flags,
        ]
        self.variables = {**VARIABLES, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception):
        self.kill()

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self):
        """Kill it at once with its engine, as the kernel does when memory runs out."""
        with suppress(ProcessLookupError):  # killed before
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _answers(self):
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.get("/health") is not None
        except (urllib.error.URLError, OSError):
            return False

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path):
        with urllib.request.urlopen(self.url + path, data=b"", timeout=60) as answer:
            return answer.read().decode()

    def counted(self, name):
        """The value of one of its metrics."""
        return sum(
            float(line.split()[-1])
            for line in self.get("/metrics").splitlines()
            if line.startswith(name)
        )
