"""What `headroom` says of a real small model: SmolLM2-135M, which may ask a library of facts about countries.

    python -m benchmarks.real.headroom             # some minutes; appends to records/headroom.jsonl.gz
    python -m benchmarks.real.headroom --report    # the table, from the records

The model, the form of its turns, its limits and its reward are those of `examples/configs/real.yaml` before training;
the facts are those on which its settings were chosen. 64 questions, 8 rollouts each, one seed: a record of what the
command prints, and no promise about other models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lab import RECORDS as RECORDED, REPOSITORY, Records, markdown, quiet

RECORDS = RECORDED / "headroom.jsonl.gz"
CONFIG = REPOSITORY / "examples" / "configs" / "real.yaml"


def measure(seed: int) -> dict[str, Any]:
    """Measure the signal of the untrained model."""
    import torch

    from agentic_prompting import PromptAgent, headroom
    from agentic_prompting.local import small_model
    from agentic_prompting.rollout import AgentSpec, Limits
    from agentic_prompting.sandbox.library import Library, brief_answer_reward, country_facts

    # The agent in the form of the training.
    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    facts = country_facts()
    library = Library(facts)
    spec = AgentSpec(
        prompt_template=library.prompt_template,
        grammar=library.grammar,
        limits=Limits(
            max_turns=values["max_turns"],
            max_turn_tokens=values["max_turn_tokens"],
            max_tokens=values["max_completion_length"],
        ),
        sampling={"temperature": values["temperature"]},
    )
    agent = PromptAgent.from_pretrained(small_model(), library, spec, dtype=torch.float32)

    started = time.perf_counter()
    measured = headroom(
        [fact.as_row() for fact in facts],
        agent=agent,
        group_size=values["num_generations"],
        reward=brief_answer_reward,
        seed=seed,
    )
    assert measured.signal is not None
    return {
        "what": "real",
        "seed": seed,
        "model": "SmolLM2-135M-Instruct",
        "figures": [asdict(figure) for figure in measured.figures.figures],
        "sentence": measured.signal.sentence(),
        "rows": measured.signal.rows,
        "rollouts": measured.signal.rollouts,
        "calls": sum(measured.calls.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The figures of the latest run."""
    latest = [entry for entry in records if entry["what"] == "real"][-1]
    rows = []
    for figure in latest["figures"]:
        value = f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
        rows.append([figure["name"], value])
    rows.append(["verdict", latest["sentence"]])
    rows.append(
        ["rows, rollouts, calls", f"{latest['rows']}, {latest['rollouts']}, {latest['calls']}"]
    )
    rows.append(["time", f"{latest['seconds']:.0f} s"])
    return markdown((latest["model"], "headroom"), rows)


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
        records.add(measure(options.seed))
    print(table(records.read()))


if __name__ == "__main__":
    main()
