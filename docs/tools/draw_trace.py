"""Draws the trace of a real training step: `docs/images/trace.svg`.

    python docs/tools/draw_trace.py

The sandbox's warm-started policy plays two questions twice each and learns from them, its large LLM
answers over HTTP after 40 ms. Times differ from run to run, so no test compares the picture.
"""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentic_prompting import LLMEnvironment, OpenAIChat, PromptR1Config, PromptR1Trainer
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.server import MODEL, OracleServer
from agentic_prompting.sandbox.setup import DEMO_SEED, prepare_sandbox

PICTURE = Path(__file__).parents[1] / "images" / "trace.svg"
WIDTH = 900
NAMES = 300
ROW = 19
COLOURS = {
    "chat agent": "#3f51b5",
    "chat": "#b4532a",
    "execute_tool": "#d9a441",
    "reward": "#2e7d4f",
}


def spans_of_a_step() -> list[Any]:
    """The spans of one step, in the order of their starts."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    with tempfile.TemporaryDirectory() as folder, OracleServer(Oracle(latency=0.04)) as server:
        sandbox = prepare_sandbox(folder, DEMO_SEED)
        args = PromptR1Config(
            output_dir=f"{folder}/run",
            max_steps=1,
            num_generations=2,
            per_device_train_batch_size=4,
            max_turn_tokens=48,
            max_completion_length=320,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            traces=True,
            save_strategy="no",
        )
        with OpenAIChat(MODEL, base_url=server.base_url) as chat:
            PromptR1Trainer(
                str(sandbox.model),
                environment=LLMEnvironment(chat),
                args=args,
                train_dataset=sandbox.train,
            ).train()
    return sorted(memory.get_finished_spans(), key=lambda one: one.start_time)


def draw(spans: list[Any]) -> str:
    """The trace as SVG: a row for each span below its parent, a bar from start to end."""
    (root,) = [one for one in spans if one.name == "training_step"]
    rows: list[tuple[int, Any]] = []

    def add(span: Any, depth: int) -> None:
        rows.append((depth, span))
        for one in spans:
            if one.parent is not None and one.parent.span_id == span.context.span_id:
                add(one, depth + 1)

    add(root, 0)
    scale = (WIDTH - NAMES - 90) / (root.end_time - root.start_time)
    parts = []
    for number, (depth, span) in enumerate(rows):
        y = 8 + number * ROW
        left = NAMES + (span.start_time - root.start_time) * scale
        wide = max((span.end_time - span.start_time) * scale, 2)
        colour = _colour(span.name)
        parts.append(
            f'<text x="{8 + 14 * depth}" y="{y + 13}" fill="#222">{escape(span.name)}</text>'
        )
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 3}" width="{wide:.1f}" height="12" rx="2" fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{left + wide + 5:.1f}" y="{y + 13}" class="s" fill="#555">{_said(span)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {16 + len(rows) * ROW}" role="img" '
        'aria-label="The spans of a training step, each below its parent, as bars over time">\n'
        "<style>text{font:12px system-ui,sans-serif}.s{font-size:11px}</style>\n"
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _colour(name: str) -> str:
    return COLOURS.get(name) or COLOURS.get(name.partition(" ")[0], "#8a8f98")


def _said(span: Any) -> str:
    if span.name == "reward":
        return f"{span.attributes['gen_ai.evaluation.score.value']:.2f}"
    return f"{(span.end_time - span.start_time) / 1e6:.0f} ms"


if __name__ == "__main__":
    PICTURE.write_text(draw(spans_of_a_step()), encoding="utf-8")
