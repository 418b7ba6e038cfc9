"""Code blocks of the documentation and of docstrings, and the stand-ins with which they run free of
charge.

In a page, `<!-- python, not shown:` ... `-->` has lines that a reader knows and a test needs; they
run in their place among the blocks. Before a block that cannot run here, a line gives the reason:
`<!-- not run: REASON -->`.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).parents[2]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT_PAGES])
# Transformers opens folders of these names.
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.2-3B-Instruct")

_ON_A_LAPTOP = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "max_turn_tokens": 32,
    "max_completion_length": 128,
}

_FENCE = re.compile(
    r"(?:^ *<!-- (not run: [^\n]+) -->\n)?^( *)```(\w*)([^\n`]*)\n(.*?)^\2```$"
    r"|^<!-- python, not shown:\n(.*?)^-->$",
    re.M | re.S,
)
_ADDRESS = re.compile(r"https?://[\w.:<>-]+(?:/openai)?/v1/?")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Args:
        where (`str`): The file, from the repository's root.
        line (`int`): The number of its first line of code.
        language (`str`): The fence's language; `""` if it has none.
        note (`str`): The rest of the fence's first line, or `not run: REASON`.
        code (`str`): The code without the fence's indentation.
        shown (`bool`): Whether readers see it.
    """

    where: str
    line: int
    language: str
    note: str
    code: str
    shown: bool = True

    @property
    def runs(self) -> bool:
        """Whether it runs here; a file that the reader writes is run with its page as a whole."""
        return self.language == "python" and not self.note.startswith(("not run:", "title="))

    def run(
        self, names: dict[str, Any], addresses: dict[str, str], called: set[str] | None = None
    ) -> None:
        """Run it; `addresses`: port -> the address that stands in for it, `""` for all others.

        The functions in it that are called, then or later, put their names into `called`.
        """
        code = _ADDRESS.sub(lambda url: _stand_in(url[0], addresses), self.code)
        # Empty lines in front, so that a traceback names the page's line.
        tree = ast.parse("\n" * (self.line - 1) + code)
        if called is not None:
            for function in _functions(tree):
                _note_calls(function)
        names["__called__"] = called
        exec(compile(tree, str(ROOT / self.where), "exec"), names)

    def functions(self) -> list[str]:
        """The functions in it, methods too, as `run` notes them."""
        return [
            f"{node.name}, line {node.lineno + self.line - 1}"
            for node in _functions(ast.parse(self.code))
        ]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _note_calls(function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Let a function add its name to the set `__called__` when it is called."""
    name = f"{function.name}, line {function.lineno}"
    note = ast.parse(f"__called__.add({name!r})").body[0]
    for node in ast.walk(note):
        ast.copy_location(node, function.body[0])
    function.body.insert(1 if ast.get_docstring(function) else 0, note)


def _stand_in(url: str, addresses: dict[str, str]) -> str:
    port = re.search(r":(\d+)/", url)
    return addresses.get(port[1] if port else "", addresses[""])


def blocks_of(text: str, where: str, first_line: int = 1) -> list[Block]:
    """The fenced and the hidden blocks of a text in Markdown."""
    blocks = []
    for match in _FENCE.finditer(text):
        reason, _, language, note, code, hidden = match.groups()
        # The first line of the code, after the fence.
        start = match.start(5) if hidden is None else match.start(6)
        line = first_line + text.count("\n", 0, start)
        if hidden is not None:
            blocks.append(Block(where, line, "python", "", hidden, shown=False))
        else:
            code = textwrap.dedent(code)
            blocks.append(Block(where, line, language, reason or note.strip(), code))
    return blocks


def page_blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())


def docstring_blocks() -> Iterator[Block]:
    """The ```python blocks in the docstrings of the package."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "```python" not in source:
            continue
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            if text := ast.get_docstring(node, clean=True):
                yield from blocks_of(text, where, node.body[0].lineno)


def docstring_names(block: Block) -> dict[str, Any]:
    """The names that a docstring's example may use: all public names, its module's, and some
    objects.
    """
    import agentic_prompting
    from agentic_prompting import OpenAIChat

    module = import_module(block.where.removeprefix("src/").removesuffix(".py").replace("/", "."))
    models = {name: OpenAIChat("gpt-4o-mini") for name in ("critic", "rewriter", "judge")}
    public = {name: getattr(agentic_prompting, name) for name in agentic_prompting.__all__}
    names = {**public, "OpenAI": OpenAI, **vars(module), **models, "__name__": "__main__"}
    if re.search(r"\btrainer\b(?! =)", block.code) and "trainer = " not in block.code:
        names["trainer"] = agentic_prompting.PromptR1Trainer(
            model=MODELS[0],
            environment=agentic_prompting.LLMEnvironment(models["critic"]),
            args=agentic_prompting.PromptR1Config(output_dir="runs/docstring"),
            train_dataset=agentic_prompting.load_task("hotpotqa", split="train", n=8),
        )
    return names


def stand_ins(monkeypatch: Any, folder: Path, policy: Path, stack: ExitStack) -> dict[str, str]:
    """Stand-ins for a page's code in `folder`: endpoints on loopback, tiny models under large
    names, sandbox questions.

    Returns:
        `dict[str, str]`: The addresses for [`Block.run`].
    """
    from huggingface_hub import HfApi
    from trl import GRPOConfig

    from agentic_prompting import evolve
    from agentic_prompting.data import loading
    from agentic_prompting.evolution import EvolveConfig
    from agentic_prompting.llm import complete
    from agentic_prompting.sandbox import Oracle, as_rows, make_split
    from support.servers import LoopbackServer
    from support.serving import running, scripted_agent, service_of
    from support.tokenizers_for_tests import with_tools

    oracle = Oracle()

    def say(asked: dict[str, Any], _: Any) -> str:
        if form := asked.get("response_format"):  # a judge's
            names = form["json_schema"]["schema"]["properties"]["scores"]["properties"]
            return json.dumps({"reason": "", "scores": dict.fromkeys(names, 5)})
        return complete(oracle, asked["messages"]).text

    endpoint = stack.enter_context(LoopbackServer(say))
    agent = scripted_agent(policy, oracle)
    service = stack.enter_context(running(service_of(agent)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "no-key-at-all")
    model = with_tools(policy, folder / "model_with_tools")
    for name in MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)

    questions = [
        {**row, "task": "sandbox", "meta": {}} for row in as_rows(make_split(0, n_test=12)[1])
    ]
    monkeypatch.setattr(
        loading,
        "_load_from_hub",
        lambda name, task, split, revision: _checked(questions, task, split),
    )
    monkeypatch.setattr(loading, "sample_records", lambda name, records, n, seed: records[:n])

    # The last step before the network, after the files for the upload have been collected.
    done: Future[None] = Future()
    done.set_result(None)
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo_id, **options: SimpleNamespace(repo_id=repo_id)
    )
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: done)

    steps = EvolveConfig(steps=2)
    monkeypatch.setattr(evolve, "__defaults__", (steps, *(evolve.__defaults__ or ())[1:]))
    begin = GRPOConfig.__post_init__
    monkeypatch.setattr(
        GRPOConfig, "__post_init__", lambda args: (vars(args).update(_ON_A_LAPTOP), begin(args))[1]
    )
    return {"": endpoint.base_url, "8080": f"{service}/v1"}


def _checked(rows: list[dict[str, Any]], task: Any, split: str) -> list[dict[str, Any]]:
    assert split in task.expected_rows, f"there is no split {split}"
    return rows
