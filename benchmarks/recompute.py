"""Recompute the figures of README and docs from the shipped records, offline and without a run.

    python -m benchmarks.recompute  # ends with an error if a page has other figures
    python -m benchmarks.recompute --write  # put the figures into the pages

A page has recomputed text between `<!-- recomputed: NAME -->` and `<!-- /recomputed -->`, in lines
of its own or within a line. For each NAME a function in `TEXTS` makes the text from the records of
one file, whose name NAME begins with (`speed.engine` is made from `speed.jsonl.gz`). Figures
without records are between `<!-- not recomputed: COMMAND -->` and `<!-- /not recomputed -->`; they
are listed at the end with their command. A score with an interval anywhere else is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentic_prompting.evaluation import Estimate, wilson_interval
from agentic_prompting.report.refine_plots import accuracy_table
from benchmarks import first_screen
from benchmarks.lab import REPOSITORY, Records, markdown
from benchmarks.learning import (
    calls,
    conductor_tables,
    espl_sandbox,
    harness_world,
    headroom_worlds,
    league,
    program_sandbox,
    prompt_r1_tables,
    prorefine,
    prorefine_budget,
    ratings,
    several_environments,
    wordings,
)
from benchmarks.learning.league_first import summarise, table, verdicts
from benchmarks.real import (
    calculator,
    conductor as real_conductor,
    espl_trainer,
    evolve_prompts,
    form_tables,
    headroom as real_headroom,
    langgraph_agent,
    large_llm,
    library,
    prorefine as real_prorefine,
)
from benchmarks.reliability import harnesses
from benchmarks.speed import async_training, gpu_day, long_contexts, model_tables, plan, scale

BLOCK = re.compile(r"(<!-- recomputed: (\S+) -->)(.*?)(<!-- /recomputed -->)", re.DOTALL)
BY_HAND = re.compile(r"<!-- not recomputed: (.+?) -->(.*?)<!-- /not recomputed -->", re.DOTALL)
INTERVAL = re.compile(
    r"\d*\.\d+\W*\s\[[-+]?\d*\.\d+,\s+[-+]?\d*\.\d+\]|interval\s+\d*\.\d+\s+to\s+\d*\.\d+"
)
NUMBER = re.compile(r"\d*\.?\d+")
Entries = Sequence[Mapping[str, Any]]
# The sentences of some figures.
STEP = (
    "the loss {head_ratio:.2f} × faster with the GPU's branch forced on a CPU, which no user of a "
    "CPU takes; {memory_ratio:.2f} × less memory for the loss and its gradients; the largest "
    "difference of a gradient {gradient_difference:.0e} of the largest gradient. A whole step of "
    "our trainer takes {overhead:.3f} times one of plain `GRPOTrainer` on the same tokens"
)
PROGRAM_MODEL = (
    "{wall_ratio:.2f} × the native loop's step in wall time, {cpu_ratio:.2f} × in processor time "
    "(steps of {step_s[native]:.1f} and {step_s[program]:.1f} s; {same_rollouts:.0%} of the "
    "rollouts have the same tokens)"
)


# --- texts made from records, one function each ---------------------------------------------------


def speed(records: Entries) -> str:
    """The table of all_figures.py, from the latest run of each script."""
    from benchmarks.speed import all_figures

    latest = {record["script"]: record for record in records}
    rows = [figure.row(latest.get(figure.script)) for figure in all_figures.FIGURES]
    return all_figures.table(rows)


def rollout_grid(records: Entries) -> str:
    """The table of four loops over turns of different length, from the latest full run."""
    full = latest_full(records, "rollout.py")
    titles = [
        "rollouts",
        "tokens a turn",
        "replies",
        "limit",
        "ours",
        "lock-step",
        "TRL's async loop",
        "TRL's tool loop",
        "ours / limit",
        "lock-step / ours",
        "async loop / ours",
    ]
    rows = []
    for row in full["settings"]:
        seconds = [row[f"{name}_s"] for name in ("limit", "ours", "lockstep", "async_loop", "trl")]
        ours = row["ours_s"]
        ratios = [ours / row["limit_s"], row["lockstep_s"] / ours, row["async_loop_s"] / ours]
        cells = [str(row["n"]), row["tokens"], row["replies"]]
        cells += ["" if value is None else f"{value:.2f} s" for value in seconds]
        rows.append([*cells, *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown(titles, rows)


def growth(records: Entries) -> str:
    """Sentences on the costs that grow with rollouts, turns, prompts and cached replies, from the
    latest full run.
    """
    full = latest_full(records, "growth.py")
    cost = full["rollouts"]
    memory = full["memory_kb"]
    first, *_, last = cost
    turns = full["turns"]
    second_turn = turns["2"] - turns["1"]
    later_turn = (turns["8"] - turns["4"]) / 4
    sentences = [
        f"Among {first} rollouts of 4 turns, with replies of 2,048 characters, each costs "
        f"{cost[first]:.1f} ms and {memory[first]:.0f} KB, among {last} {cost[last]:.1f} ms and "
        f"{memory[last]:.0f} KB.",
        f"A further turn costs {second_turn:.1f} ms as the second and {later_turn:.1f} ms between "
        "the fifth and the eighth.",
        "Choosing and rating 3 of 10,000 prompts: {population_ms:.1f} ms under the default rule, "
        "{population_worst_ms:.1f} ms under the slowest.",
        (
            "A recording of {entries:,} replies opens in {opening_s} s and finds one in "
            "{lookup_ms} ms."
        ),
        "`import agentic_prompting` takes {import_s} s, `agentic-prompting --help` {help_s} s.",
    ]
    return " ".join(sentences).format(**full)


def engine(records: Entries) -> str:
    """The table of the engine against batches, from the latest full run."""
    full = latest_full(records, "engine.py")
    rows = []
    for name, row in full["settings"].items():
        speeds = [row["engine_tokens_per_s"], row["batches_tokens_per_s"]]
        rows.append([name, *speeds, f"{row['speedup']:.2f}", f"{row['identical']:.2f}"])
    titles = ("setting", "engine, tokens/s", "batches, tokens/s", "ratio", "identical")
    return markdown(titles, rows)


def on_real_model(
    script: str, describe: Callable[[Mapping[str, Any]], str]
) -> Callable[[Entries], str]:
    """A function that describes the latest run of a script on SmolLM2, and says when and on what it
    ran.
    """

    def text(records: Entries) -> str:
        runs = [record for record in records if record["script"] == f"{script} --model smollm2"]
        if not runs:
            return "Not measured yet."
        latest = runs[-1]
        size = "quick" if latest["quick"] else "full"
        description = describe(latest["printed"])
        return f"{description}\n\n({size} run, {latest['date']}; {latest['machine']})"

    return text


def engine_model_tables(printed: Mapping[str, Any]) -> str:
    """The engine on a real model, and what its largest runs spend their time on."""
    speeds = model_tables.engine_table(printed["settings"])
    parts = model_tables.parts_table(printed["parts"])
    return f"{speeds}\n\nWhere the processor time of the largest runs goes:\n\n{parts}"


def updates_table(printed: Mapping[str, Any]) -> str:
    """The loss and its gradients on a real model, with the head at every position and at the scored
    ones.
    """
    return model_tables.updates_table(printed["updates"])


def program_model_sentence(printed: Mapping[str, Any]) -> str:
    """A program beside the native loop on a real model."""
    return PROGRAM_MODEL.format(**printed)


def dialogue(records: Entries) -> str:
    """The demo's telling question before and after training."""
    lines = []
    for when, turns in records[-1]["trajectories"].items():
        lines += [f"--- {when} training", *turns, ""]
    return "\n".join(["```", *lines[:-1], "```"])


def broken(records: Entries) -> str:
    """The table of problems that learning.py found in the latest runs with one part broken."""
    latest = {record["what"]: record for record in records}
    rows = []
    for part, record in latest.items():
        demo = record["demo"]
        espl = record["espl"]["exact_match"]
        espl_start = espl["policy before, initial prompt"][0]
        espl_end = espl["policy after, best prompt"][0]
        espl_first_prompt = espl["policy after, initial prompt"][0]
        problems = len(record["found"])
        rows.append(
            [
                part.partition("-")[0],
                f"{demo['exact_match_before']:.3f} → {demo['exact_match_after']:.3f}",
                f"{espl_start:.3f} → {espl_end:.3f}",
                f"{espl_first_prompt:.3f}",
                f"{record['agreement']:.2f}",
                f"yes, in {problems} ways" if problems else "nothing found",
            ]
        )
    titles = ("broken", "Prompt-R1", "E-SPL", "its first prompt", "ratings agree", "noticed")
    return markdown(titles, rows)


def prorefine_accuracy(records: Entries) -> str:
    """The table of ProRefine's verifier settings on the sandbox's puzzles, with Wilson's intervals
    over the puzzles.
    """
    tables: dict[str, dict[str, Any]] = {}
    for title, methods in latest_full(records, "prorefine.py")["correct"].items():
        tables[title] = {}
        for method, row in methods.items():
            tables[title][method] = {model: _wilson(correct) for model, correct in row.items()}
    return accuracy_table(tables)


def _wilson(correct: str) -> Estimate:
    return wilson_interval(correct.count("1"), len(correct))


def printed(script: str, form: str) -> Callable[[Entries], str]:
    """A function that fills `form` with the results of a script's latest full run."""

    def text(records: Entries) -> str:
        return form.format(**latest_full(records, script))

    return text


def latest_full(records: Entries, script: str) -> Mapping[str, Any]:
    """The results of a script's latest full run.

    Raises:
        `IndexError`: No full run of the script is recorded.
    """
    full = [record for record in records if record["script"] == script and not record["quick"]]
    return full[-1]["printed"]


def hopeless_bias(records: Entries) -> str:
    """The relative bias of the gradient when hopeless episodes are ended and advantages divided by
    the deviation.
    """
    row = records[-1]["rules"]["hopeless ended, divided by the deviation"]
    return f"{row['bias']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"


def tools_table(records: Entries) -> str:
    """The table of the demo trained through native tool calls, by seed and kind of tool."""
    rows = []
    for record in records:
        cells = []
        for when in ("before", "after"):
            share = wilson_interval(record[when]["right"], record[when]["n"])
            cells.append(f"{share.mean:.3f} [{share.low:.3f}, {share.high:.3f}]")
        rows.append([record["seed"], record["through"], *cells])
    return markdown(("seed", "through", "before [95 %]", "after [95 %]"), rows)


def drafting(records: Entries) -> str:
    """ProRefine's table of drafting, from the latest full run."""
    return prorefine.drafting_table(latest_full(records, "prorefine.py")["drafting"])


TEXTS: dict[str, Callable[[Entries], str]] = {
    "bias": hopeless_bias,
    "calls": calls.finding,
    "lead": async_training.table,
    "forms.untrained": form_tables.untrained,
    "forms.warm_start": form_tables.warm_started,
    "harness_world": harness_world.table,
    "harnesses": harnesses.table,
    "headroom.worlds": headroom_worlds.table,
    "headroom.worlds_first": partial(headroom_worlds.table, protocol=1),
    "headroom.demo": headroom_worlds.demo_table,
    "headroom.demo_verdicts": headroom_worlds.demo_verdicts,
    "headroom.real": real_headroom.table,
    "league": lambda records: table(summarise(records)),
    "league.verdicts": lambda records: verdicts(summarise(records)),
    "league_two": league.table,
    "league_two.each": league.each_setting,
    "league_two.verdicts": league.verdicts,
    "ratings": espl_sandbox.table,
    "simulated": ratings.table,
    "tools": tools_table,
    "broken": broken,
    "demo.first_screen": lambda _: first_screen.table(),
    "demo.dialogue": dialogue,
    "prompt_r1.headline": prompt_r1_tables.headline,
    "prompt_r1.results": prompt_r1_tables.results,
    "prompt_r1.turns": prompt_r1_tables.turns,
    "prompt_r1.transfer": prompt_r1_tables.transfer,
    "prompt_r1.splits": prompt_r1_tables.splits,
    "programs": program_sandbox.table,
    "programs.verdict": program_sandbox.verdict,
    "speed": speed,
    "speed.rollout": rollout_grid,
    "speed.rollout.worst": printed("rollout.py", "{worst_to_limit:.2f}"),
    "speed.rollout.lockstep": printed("rollout.py", "{median_lockstep_over_ours:.2f}"),
    "speed.rollout.async": printed("rollout.py", "{async_loop_over_ours:.2f}"),
    "speed.engine": engine,
    "speed.espl": printed("espl_sandbox.py", "{overhead_ratio:.2f}"),
    "speed.growth": growth,
    "speed.training_step": printed("training_step.py", STEP),
    "speed.engine.wall": printed("engine.py", "{prefix_wall_ratio:.2f}"),
    "speed.engine.read": printed("engine.py", "{prefix_read_ratio:.2f}"),
    "speed.engine_model": on_real_model("engine.py", engine_model_tables),
    "speed.updates": on_real_model("training_step.py", updates_table),
    "speed.program_model": on_real_model("program.py", program_model_sentence),
    "conductor.table": conductor_tables.systems_table,
    "real.library": library.table,
    "real.settings": library.settings_table,
    "calculator.table": calculator.table,
    "langgraph_agent.table": langgraph_agent.table,
    "real_conductor.systems": real_conductor.systems_table,
    "real_conductor.kinds": real_conductor.kinds_table,
    "real_conductor.calls": real_conductor.calls_table,
    "evolve_prompts.table": evolve_prompts.table,
    "large_llm.table": large_llm.table,
    "real_espl.table": espl_trainer.table,
    "real_espl.modes": espl_trainer.compare_modes,
    "real_prorefine.table": real_prorefine.table,
    "conductor_coder.systems": real_conductor.systems_table,
    "conductor_coder.kinds": real_conductor.kinds_table,
    "conductor_coder.calls": real_conductor.calls_table,
    "conductor.kinds": conductor_tables.kinds_table,
    "conductor.variants": conductor_tables.variants_table,
    "conductor.budget": conductor_tables.budget_table,
    "conductor.retyping": conductor_tables.retyping_table,
    "several.table": several_environments.table,
    "several.cost": several_environments.cost,
    "wordings.table": wordings.table,
    "wordings.verdict": wordings.verdict,
    "gpu_day.table": gpu_day.table,
    "gpu_day.engine": partial(gpu_day.figures_of, "engine, 0.6B"),
    "gpu_day.trl": partial(gpu_day.figures_of, "loss and step beside TRL"),
    "plan": plan.table,
    "long_contexts.memory": long_contexts.memory,
    "long_contexts.times": long_contexts.times,
    "scale.memory": scale.memory,
    "prorefine_budget.table": prorefine_budget.table,
    "prorefine_budget.against": prorefine_budget.against,
    "prorefine_budget.lift": prorefine_budget.lift,
    "prorefine_budget.seeds": prorefine_budget.each_seed,
    "speed.prorefine.accuracy": prorefine_accuracy,
    "speed.prorefine.drafting": drafting,
}


# --- pages ----------------------------------------------------------------------------------------


def recompute(page: str) -> tuple[str, list[str]]:
    """A page with recomputed blocks, and the names of its blocks.

    Raises:
        `KeyError`: No function makes the text of a block.
    """
    texts = {}
    for name in dict.fromkeys(block[2] for block in BLOCK.finditer(page)):
        records = Records(REPOSITORY / "records" / f"{name.partition('.')[0]}.jsonl.gz").read()
        # The tables of `gpu_day` say of each row whether it was measured.
        if records or name.startswith("gpu_day"):
            texts[name] = TEXTS[name](records)
        else:
            texts[name] = "No run of it has been recorded yet."

    def fill_block(block: re.Match[str]) -> str:
        opening_mark, name, old_text, closing_mark = block.groups()
        line_break = "\n" if old_text.startswith("\n") else ""
        return f"{opening_mark}{line_break}{texts[name]}{line_break}{closing_mark}"

    return BLOCK.sub(fill_block, page), list(texts)


def unmarked(page: str) -> list[str]:
    """The scores with intervals that are outside all marks."""
    return INTERVAL.findall(BY_HAND.sub("", BLOCK.sub("", page)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Recompute the pages' figures from records/.")
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    options = parser.parse_args()
    problems = 0
    figures_by_hand = []
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        old_page = path.read_text(encoding="utf-8")
        file = path.relative_to(REPOSITORY)
        page, names = recompute(old_page)
        if options.write and page != old_page:
            path.write_text(page, encoding="utf-8")

        # The recomputed blocks, which may differ from those of the page.
        blocks = {block[2]: block for block in BLOCK.finditer(page)}
        for name in names:
            block_text = blocks[name][0]
            if block_text in old_page:
                state = "as recorded"
            elif options.write:
                state = "written"
            else:
                state = "NOT as recorded"
                problems += 1
            print(f"{file}: {name}: {len(NUMBER.findall(blocks[name][3]))} numbers, {state}")

        # Scores without any mark, and figures that a person has to measure.
        for text in unmarked(page):
            problems += 1
            print(f"{file}: {' '.join(text.split())}: NEITHER recomputed nor marked as not")
        for command, text in BY_HAND.findall(page):
            figures_by_hand.append((file, command, len(NUMBER.findall(text))))
    print("\nNot recomputed, since no records are shipped of them:")
    for file, command, count in figures_by_hand:
        print(f"{file}: {count} numbers, of `{command}`")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
