"""The commands that are a few lines over their rooms: `ask`, `serve`, `evaluate`, `report` and `data`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import AsJson, LargeLLM, OutputDir, option, setting
from .show import Conversation, busy, say

if TYPE_CHECKING:
    from ..rollout import Rollout


def ask(
    question: Annotated[str, typer.Argument(help="What to ask the agent.")],
    llm: LargeLLM,
    run: Annotated[Path | None, option("The trained agent: the folder that its trainer saved.")] = None,
    seed: Annotated[int, option("The same seed gives the same conversation: 0.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    if run is None:
        raise ValueError(
            "say which trained agent to ask: --run FOLDER. `agentic-prompting demo` trains one in the sandbox, in "
            "runs/demo"
        )
    llm.check()
    if not run.is_dir():
        raise ValueError(f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent there")
    if llm.sandbox:
        question = _in_the_sandbox(question)
    from rich.console import Console

    watched = Conversation(None if as_json else Console(soft_wrap=True, highlight=False))
    with ExitStack() as stack:
        with busy(f"loading {run}"):
            from transformers.utils.logging import disable_progress_bar

            from ..agent import PromptAgent

            environment = llm.as_environment(llm.connect(stack, *llm.endpoint(stack), budget_usd=llm.budget_usd))
            environment.check()
            disable_progress_bar()  # of loading weights: `busy` says it, on a terminal alone
            agent = PromptAgent.from_pretrained(run, watched.around(environment))
        rollout = agent.answer(question, seed)
        watched.end(rollout)
    if as_json:
        say(json.dumps(_as_json(question, rollout), ensure_ascii=False))
    return int(rollout.answer is None)


def _in_the_sandbox(question: str) -> str:
    """The question in the sandbox's own wording, which is all that its policy can read.

    Raises:
        `ValueError`: If it is none of the sandbox's questions; shows some.
    """
    from ..sandbox.world import parse_question

    parsed = parse_question(question)
    if parsed is None:
        raise ValueError(
            "the sandbox knows countries, capitals, airports, currencies, languages and continents only; ask, for "
            'example, "what is the currency of the country whose capital is Nairobi ?" or "which country has the '
            'capital served by airport NBO ?"'
        )
    return parsed.text


def _as_json(question: str, rollout: Rollout) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for i, turn in enumerate(rollout.turns):
        said.append({"role": "agent", "kind": turn.kind, "text": turn.text, "request": turn.request})
        if i < len(rollout.observations):
            observation = rollout.observations[i]
            error = None if observation.error is None else str(observation.error)
            said.append({"role": "environment", "text": observation.text, "error": error})
    replies = rollout.replies
    usage = {
        "calls": len(replies),
        "prompt_tokens": sum(reply.usage.prompt_tokens for reply in replies),
        "completion_tokens": sum(reply.usage.completion_tokens for reply in replies),
        "cost_usd": sum(reply.usage.cost_usd for reply in replies),
        "agent_tokens": sum(rollout.mask),
    }
    error = None if rollout.error is None else str(rollout.error)
    shown = {"question": question, "answer": rollout.answer, "status": rollout.status, "error": error}
    return {**shown, "conversation": said, "usage": usage}


@dataclass
class ServeOptions:
    """Where the service listens and what a request may take: [`ServeConfig`], with its defaults."""

    host: str = setting("Address to listen on. Others than this machine's own need a key.", "127.0.0.1")
    port: int = setting("Port to listen on.", 8080)
    key_variable: str = setting("Environment variable with the key that clients send.", "AGENTIC_PROMPTING_API_KEY")
    max_concurrency: int = setting("Requests answered at once.", 256)
    max_body_bytes: int = setting("Of a request.", 2**20)
    timeout: float = setting("Seconds for a request.", 120.0)
    max_cost_usd: float | None = setting("Dollars that one request may cost.")
    greedy: bool = setting("Take the likeliest token each time, not only where temperature=0 is asked for.", False)


def serve(
    run: Annotated[Path, typer.Argument(help="The trained agent: what its trainer saved.")],
    llm: LargeLLM,
    service: ServeOptions,
    refine: Annotated[bool, option("Serve ProRefine over the large LLM too, as `prorefine`.", "--refine")] = False,
    name: Annotated[str, option("What clients call the agent: agent.")] = "agent",
) -> int:
    """Serve a trained agent and its large LLM as one model, for any OpenAI client."""
    llm.check()
    try:
        from ..serve import ServeConfig, agent_service, run_service
    except ImportError as error:
        raise ValueError(f"serving needs more ({error.name}): pip install 'agentic-prompting[serve]'") from error
    from ..agent import PromptAgent
    from ..llm import Budget, charge
    from ..refine import ProRefiner, RefinedChat

    config = ServeConfig(**vars(service))
    config.find_key()  # a missing key is found before the model is loaded, not after
    with ExitStack() as stack:
        endpoint, budget = llm.endpoint(stack), Budget(usd=llm.budget_usd)
        environment = llm.as_environment(llm.connect(stack, *endpoint))
        charge(budget, environment=environment)  # a budget that cannot be kept is found before anything is spent
        environment.check()
        roles = [llm.connect(stack, *endpoint) for _ in range(4)]  # an account for each
        refined = RefinedChat(ProRefiner(*roles)) if refine else None
        served = agent_service(PromptAgent.from_pretrained(run, environment), config, name, refined, budget)
        print(f"http://{config.host}:{config.port}/v1  models: {', '.join(served.models)}  (Ctrl-C stops)", flush=True)
        run_service(served)
    return 0


def evaluate(
    config: Annotated[Path | None, option("A table: examples/configs/eval_*.yaml, in a clone.")] = None,
    sandbox: Annotated[bool, option("Stand-ins for its models and tasks; no key.", "--sandbox")] = False,
    metric: Annotated[
        list[str] | None,
        option("Instead of the table's metrics; several times for several: ours, or `evaluate`'s by name."),
    ] = None,
    output_dir: OutputDir = None,
    compare: Annotated[tuple[Path, Path] | None, option("Folders of two finished tables.")] = None,
    seeds: Annotated[list[int] | None, option("`--seeds 1 2 3`: a training each, intervals over them.")] = None,
    more_seeds: Annotated[list[int] | None, typer.Argument(hidden=True, metavar="SEED")] = None,
    as_json: AsJson = False,
) -> int:
    """Ask systems the questions of tasks and write a table; run again, a stopped run goes on."""
    if (config is None) == (compare is None) or (more_seeds and not seeds):
        raise ValueError("say what to do: --config FILE, or --compare FOLDER FOLDER")
    if compare is not None:
        return _compare(*compare, as_json)
    assert config is not None
    from ..evaluation import EvaluationStopped

    tables = paper_tables()
    table = tables.load_config(config)
    if metric:
        table = replace(table, metrics=metric, sandbox={**table.sandbox, "metrics": metric})
    try:
        all_seeds = [*(seeds or ()), *(more_seeds or ())]
        run = tables.run_table(table, sandbox, output_dir, sys.stderr.isatty(), all_seeds)
    except EvaluationStopped as error:
        print(f"agentic-prompting: {error}; run the same command again to go on", file=sys.stderr)
        return 1
    if as_json:
        found = json.loads(run.files["json"].read_text(encoding="utf-8"))
        files = {kind: str(path) for kind, path in run.files.items()}
        say(json.dumps({**found, "skipped": {**run.skipped, **run.left_out}, "files": files}, ensure_ascii=False))
        return 0
    say(run.files["md"].read_text(encoding="utf-8"))
    for name, reason in {**run.skipped, **run.left_out}.items():
        say(f"left out: {name}: {reason}")
    print("written to " + ", ".join(str(path) for path in run.files.values()))
    return 0


def paper_tables() -> Any:
    """The module `benchmarks/paper_tables`, which comes with a clone of the repository and not with the package.

    Of the clone that the package is installed from (`pip install -e`), else of the one that the current folder is in.

    Raises:
        `FileNotFoundError`: There is no clone; says what to do.
    """
    name, here = "paper_tables", Path.cwd()
    for root in (Path(__file__).parents[3], here, *here.parents):
        script = root / "benchmarks" / name / "__init__.py"
        if script.is_file():
            break
    else:
        raise FileNotFoundError(
            "tables from configurations are filled by benchmarks/paper_tables, which comes with a clone of the "
            "repository and not with the package: run this command inside a clone. To compare systems of your own, "
            "`agentic_prompting.evaluate_agent` needs no clone (docs/evaluation.md)"
        )
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, script)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _compare(first: Path, second: Path, as_json: bool) -> int:
    from ..evaluation import compare_runs, differences_table, load_run, to_markdown

    comparisons = compare_runs(load_run(first), load_run(second), (first.name, second.name))
    if as_json:
        print(json.dumps({"comparisons": [asdict(one) for one in comparisons]}, ensure_ascii=False))
    else:
        print(to_markdown(differences_table(comparisons)))
    return 0


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one file: refinement results, or a population.")],
    output_dir: OutputDir = None,
    max_trajectories: Annotated[int, option("Show at most this many, drawn evenly over the run: 20000.")] = 20_000,
    pictures: Annotated[bool, typer.Option(help="Write PNGs as well.")] = True,
    as_json: AsJson = False,
) -> int:
    """Show what a run left behind: curves, trajectories, the evolution of system prompts, refined prompts."""
    from ..report import write_report

    if pictures and importlib.util.find_spec("matplotlib") is None:
        print(
            "agentic-prompting: no pictures without matplotlib: pip install 'agentic-prompting[report]'",
            file=sys.stderr,
        )
        pictures = False
    page = write_report(run, output_dir, max_trajectories, pictures)
    drawn = sorted(str(path) for path in page.parent.glob("*.png")) if pictures else []
    print(json.dumps({"page": str(page), "pictures": drawn}) if as_json else page)
    return 0


def data(
    action: Annotated[
        Literal["list", "show", "check"], typer.Argument(help="list all, show one in full, or check the records.")
    ],
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; check takes all by default.")] = None,
    online: Annotated[
        bool, typer.Option("--online", help="check: ask the hub; streams one row of each split.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the data sets, show one, or check them against their sources."""
    from ..data import TASKS, check_sources, check_table, describe_task, list_tasks

    if action == "list":
        print(_sets_as_json(TASKS) if as_json else list_tasks())
        return 0
    if action == "show":
        if not names:
            raise ValueError("say which data set: agentic-prompting data show NAME; `data list` shows their names")
        print(_sets_as_json(names) if as_json else "\n\n".join(map(describe_task, names)))
        return 0
    checks = check_sources(names or (), online)
    wrong = [check for check in checks if check.problem]
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
        return int(bool(wrong))
    print(check_table(checks if online else wrong) if online or wrong else f"{len(checks)} records are consistent")
    return int(bool(wrong))


def _sets_as_json(names: Iterable[str]) -> str:
    """The sets with their splits (rows), metrics, sources and licence."""
    from ..data.loading import find_task

    found = [find_task(name)[::2] for name in names]
    sets = [
        {
            "name": name,
            "splits": dict(task.expected_rows),
            "metrics": list(task.metrics),
            "sources": list(map(str, task.sources)),
            "licence": task.licence,
        }
        for name, task in found
    ]
    return json.dumps({"sets": sets}, ensure_ascii=False)
