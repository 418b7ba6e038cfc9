"""llama.cpp's tokens per second of the processor, in a process of its own; needs the package
`xllamacpp`.

    python -m benchmarks.speed.llama_cpp model.gguf ROWS CONTEXT_LENGTH NEW_TOKENS  # prints one JSON object

One thread: with more, those that wait spin, and take the processor from all others. Each row is a
slot of the server with a context of its own; none shares a prefix.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp


def make_server(file: str, rows: int, length: int) -> Any:
    """A server in this process with a slot for each row."""
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel = rows
    params.n_ctx = rows * length
    params.cont_batching = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def main() -> None:
    file = sys.argv[1]
    rows, context_length, new_tokens = map(int, sys.argv[2:])
    server = make_server(file, rows, context_length + new_tokens + 8)

    def complete(row: int) -> int:
        """Sample one row's tokens; their number."""
        # Ids of ordinary words, different for each row.
        first = row * context_length
        prompt = [1000 + number % 20_000 for number in range(first, first + context_length)]
        request = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": row,
        }
        reply = server.handle_completions(request)
        return int(reply["usage"]["completion_tokens"])

    with ThreadPoolExecutor(rows) as pool:
        complete(0)
        started = time.process_time()
        tokens = sum(pool.map(complete, range(rows)))
        seconds = time.process_time() - started
    print(json.dumps({"rows": rows, "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}))


if __name__ == "__main__":
    main()
