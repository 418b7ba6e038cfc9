"""Retrievers: BM25, Search-R1 over HTTP, Chroma."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from agentic_prompting.environments import (
    BM25Retriever,
    ChromaRetriever,
    Document,
    HTTPRetriever,
)
from support.search_facts import FACTS


def test_bm25_finds():
    hits = BM25Retriever(FACTS)(["capital of Kenya", "zebra"], k=2)
    assert hits[0][0].text == FACTS[0] and hits[0][0].id == "0" and hits[0][0].score > 0
    assert hits[1] == [] and len(BM25Retriever(FACTS)(["Kenya"], k=10)[0]) <= 3
    with pytest.raises(ValueError, match="at least one document"):
        BM25Retriever([])


def test_bm25_leaves_the_gpu_alone_where_jax_is_installed(tmp_path):
    """bm25s tries JAX at its import, which by default takes three quarters of a GPU's memory."""
    jax = tmp_path / "jax"
    jax.mkdir()
    (jax / "__init__.py").write_text("")
    (jax / "lax.py").write_text(
        "import os\n"
        "def top_k(scores, k):\n"
        "    print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\n"
    )
    script = (
        "from agentic_prompting.environments import BM25Retriever\n"
        "print(BM25Retriever(['a nice river', 'a tall hill'])(['river'], k=1)[0][0].text)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    finished = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    # JAX is used once, by the import, and not to find the best documents.
    assert finished.stdout.split("\n")[:2] == ["false", "a nice river"]


def test_http_retriever_speaks_search_r1():
    seen = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            if len(seen) == 1:  # once: a failure that is retried
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            hits = [
                [{"document": {"id": "7", "contents": f'"{q}"\ntext'}, "score": 0.5}]
                for q in body["queries"]
            ]
            answer = json.dumps({"result": hits}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        hits = HTTPRetriever(f"http://127.0.0.1:{server.server_port}/retrieve")(["a", "b"], k=3)
    finally:
        server.shutdown()
        server.server_close()
    assert hits == [[Document('"a"\ntext', "7", 0.5)], [Document('"b"\ntext', "7", 0.5)]]
    assert seen[-1] == {"queries": ["a", "b"], "topk": 3, "return_scores": True} and len(seen) == 2


def test_a_server_that_names_an_hour_to_wait_is_not_waited_for(monkeypatch):
    """A proxy in front of the retriever says 503 with Retry-After: 3600, and every search would
    sleep for it.
    """
    slept = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503)
            self.send_header("Retry-After", "3600")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("urllib3.util.retry.time.sleep", slept.append)
    try:
        with pytest.raises(OSError, match="503"):
            HTTPRetriever(f"http://127.0.0.1:{server.server_port}")(["a"], k=1)
    finally:
        server.shutdown()
        server.server_close()
    assert max(slept) < 10


def test_chroma_retriever_reads_its_shape():
    class Collection:
        def query(self, query_texts, n_results):
            return {
                "ids": [["1"]] * len(query_texts),
                "documents": [["t"]] * len(query_texts),
                "distances": [[0.2]],
            }

    assert ChromaRetriever(Collection())(["a"], k=1) == [[Document("t", "1", -0.2)]]
