"""What `headroom` says of a real small model: SmolLM2-135M, which may ask a library of facts about
countries.

    python -m benchmarks.real.headroom             # some minutes; appends to records/headroom.jsonl.gz
    python -m benchmarks.real.headroom --report    # the table, from the records

The model as it was published, and after the warm start of `demo --real` (64 demonstrations, 8
steps); the form of its turns, its limits and its reward are those of `examples/configs/real.yaml`.
The facts are those on which its settings were chosen. 64 questions, 8 rollouts each, one seed: a
record of what the command prints, no promise about other models.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.lab import RECORDS as RECORDED, REPOSITORY, Records, markdown, quiet

if TYPE_CHECKING:
    from agentic_prompting.sandbox.library_run import LibraryRun

RECORDS = RECORDED / "headroom.jsonl.gz"
NOT_RECORDED = "No run of it has been recorded yet."
CONFIG = REPOSITORY / "examples" / "configs" / "real.yaml"


def measure(seed: int, folder: Path, records: Records) -> None:
    """Measure the signal of the published model, then of the warm-started one."""
    from agentic_prompting.sandbox.library import country_facts
    from agentic_prompting.sandbox.library_run import prepare_library

    facts = country_facts()
    run = prepare_library(folder, seed=seed, facts=facts, warm_start_steps=0)
    records.add(measure_model(run, "published", run.model, seed))
    run = prepare_library(folder, seed=seed, facts=facts)
    records.add(measure_model(run, "warm-started", run.model, seed))


def measure_model(run: LibraryRun, name: str, model: str, seed: int) -> dict[str, Any]:
    """Measure the signal of one of the models, in the form of the training."""
    import torch

    from agentic_prompting import PromptAgent, headroom
    from agentic_prompting.local import has_bf16_instructions
    from agentic_prompting.rollout import AgentSpec, Limits
    from agentic_prompting.sandbox.library import brief_answer_reward

    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    spec = AgentSpec(
        prompt_template=run.environment.prompt_template,
        grammar=run.environment.grammar,
        limits=Limits(
            max_turns=values["max_turns"],
            max_turn_tokens=values["max_turn_tokens"],
            max_tokens=values["max_completion_length"],
        ),
        sampling={"temperature": values["temperature"]},
    )
    dtype = torch.bfloat16 if has_bf16_instructions() else torch.float32
    agent = PromptAgent.from_pretrained(model, run.environment, spec, dtype=dtype)

    started = time.perf_counter()
    measured = headroom(
        list(run.train),
        agent=agent,
        group_size=values["num_generations"],
        reward=brief_answer_reward,
        seed=seed,
    )
    assert measured.signal is not None
    return {
        "what": "real",
        "seed": seed,
        "model": name,
        "figures": [asdict(figure) for figure in measured.figures.measured],
        "sentence": measured.signal.sentence(),
        "rows": measured.signal.rows,
        "rollouts": measured.signal.rollouts,
        "calls": sum(measured.calls.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The figures of the latest run of each model, a column each."""
    latest = {entry["model"]: entry for entry in records if entry["what"] == "real"}
    if not latest:
        return NOT_RECORDED
    rows = []
    columns = [entry["figures"] for entry in latest.values()]
    for figures in zip(*columns, strict=True):
        row = [figures[0]["name"]]
        for figure in figures:
            row.append(f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]")
        rows.append(row)
    rows.append(["verdict", *(entry["sentence"] for entry in latest.values())])
    for name in ("rollouts", "calls", "seconds"):
        rows.append([name, *(round(entry[name]) for entry in latest.values())])
    return markdown(("SmolLM2-135M-Instruct", *latest), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", action="store_true", help="print the table, measure nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    records = Records(options.records)
    if not options.report:
        quiet()
        with tempfile.TemporaryDirectory() as folder:
            measure(options.seed, Path(folder), records)
    print(table(records.read()))


if __name__ == "__main__":
    main()
