"""The cost of traces in a step's rollouts: the same rollouts with spans and without, in turns, in
one run.

    python -m benchmarks.speed.traces --json  # under ten minutes: in real time
    python -m benchmarks.speed.traces --json --quick  # two minutes: every time divided by four

The rollouts are those of `rollout.py`: 64, turns of 150 tokens, replies of 2 s, waited for and not
computed. Divided times make what spans cost count for more. The spans are sent by OTLP over HTTP to
a process that reads them and throws them away. The last line of `--json` holds `overhead`, the
median over pairs of seconds with spans / without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.speed.rollout import Workload, play_ours

SINK = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Sink(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", 0), Sink)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def measure(pairs: int, scale: float) -> list[dict[str, float]]:
    """Seconds of each pair, without and with spans; which comes first alternates."""
    from agentic_prompting.llm import spans, start_traces

    start_traces()
    traces: Any = spans._traces
    rows = []
    for pair in range(-1, pairs):  # the first warms up
        workload = Workload.draw(64, 150, 0.6, 2.0, scale, pair)
        row = {}
        for name in sorted(("with", "without"), reverse=bool(pair % 2)):
            spans._traces = traces if name == "with" else None
            row[name] = play_ours(workload)
        if pair >= 0:
            rows.append(row)
    traces.api.get_tracer_provider().force_flush()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="every time divided by four")
    arguments = parser.parse_args()
    sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    try:
        assert sink.stdout is not None
        port = int(sink.stdout.readline())
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
        rows = measure(8, 1 / 4 if arguments.quick else 1)
    finally:
        sink.kill()
    overhead = statistics.median(row["with"] / row["without"] for row in rows)
    print(f"seconds with spans / without, median of {len(rows)} pairs: {overhead:.4f}")
    if arguments.json:
        print(json.dumps({"overhead": round(overhead, 4), "pairs": rows}))


if __name__ == "__main__":
    main()
