"""`agentic-prompting check-env --harness codex`: one task in the real program, with a script in place of the policy."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loader import load_object
from .terminal import print_styled, print_text

if TYPE_CHECKING:
    from ..programs import Harness, Program
    from ..rollout import ChatFormat, Rollout, Sample, SampleRequest

TASK = "Create a file hello.txt that contains the word hi, then read it back and say done"
ROW = {"question": TASK, "answer": "a word that no prompt may hold: SECRET42"}
_STEPS = ("echo hi > hello.txt", "cat hello.txt")
_SHELLS = ("bash", "exec_command", "run_shell_command", "shell", "shell_command")
_FILES = (("write_file", "write"), ("read_file", "read"))
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"  # how mini-swe-agent says that it is done
_ENDS_BY_TOOL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_EXAMPLES = {"boolean": False, "number": 9000, "integer": 9000, "array": []}


def check_harness(name: str, dialect: str, isolation: str, as_json: bool) -> int:
    """Play one task and show what was seen: calls, their roles, token sequences, seconds, names that it looked up."""
    from ..programs import Harness, Program, Workspace, harness

    settings = load_object(name, "harness") if ":" in name else harness(name, dialect)
    if not isinstance(settings, Harness):
        raise ValueError(f"{name} is a {type(settings).__name__}, and not a Harness")
    names: list[str] = []
    workspace = Workspace(on_lookup=names.append, isolation=isolation)  # type: ignore[arg-type]  # which checks it
    program = Program(settings, workspace=workspace, reward=wrote_the_file, timeout=300)
    program.check()
    started = time.monotonic()
    rollout, agent = play_scripted(program)
    seen = report_of(settings, rollout, agent, time.monotonic() - started)
    has_own_network = isolation != "none"
    seen["looked_up"] = (
        sorted({*names}) if has_own_network else "not seen without a network of its own"
    )
    if as_json:
        print_text(json.dumps(seen, default=str))
    else:
        for what, value in seen.items():
            print_styled(f"{what:22}{value}")
    return int(not seen["wrote_the_file"])


def wrote_the_file(rollout: Rollout, folder: Path) -> float:
    """The reward of the task."""
    file = folder / "hello.txt"
    return float(file.is_file() and file.read_text() == "hi\n")


def report_of(
    settings: Harness, rollout: Rollout, agent: ScriptedAgent, seconds: float
) -> dict[str, Any]:
    """The observations, by name."""
    counts = rollout.counts
    return {
        "harness": settings.name, "dialect": settings.dialect, "status": rollout.status,
        "error": str(rollout.error) if rollout.error else None, "answer": rollout.answer,
        "wrote_the_file": bool((rollout.returned or {}).get("reward")),
        "calls": int(counts.get("program/calls", 0)),
        "auxiliary_calls": int(counts.get("program/auxiliary_calls", 0)),
        "sequences": int(counts.get("program/sequences", 0)),
        "undelivered_tokens": int(counts.get("program/undelivered_tokens", 0)),
        "witness_differences": counts.get("program/witness_differences", "no record that can be read"),
        "prompt_characters": [len(text) for text in agent.read],
        "answer_in_prompt": any("SECRET42" in text for text in agent.read),
        "tools": sorted({tool["name"] for text in agent.read for tool in tools_in(text)}),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def play_scripted(
    program: Program,
    agent: ScriptedAgent | None = None,
    max_context: int = 400_000,
    row: Mapping[str, Any] = ROW,
) -> tuple[Rollout, ScriptedAgent]:
    """One rollout of the task, and the script that played the policy."""
    from ..llm import run
    from ..rollout import Limits, Rollout

    agent = agent or ScriptedAgent(byte_format())
    rollout = Rollout([1], row=dict(row), seed=0)
    limits = Limits(max_turns=64, max_turn_tokens=8000, max_tokens=400_000, max_context=max_context)
    return run(program.play_episode(rollout, agent, agent.form, limits)), agent


class ScriptedAgent:
    """Writes the file, reads it, says done, with whatever tools it is offered; a title where there are none."""

    def __init__(self, form: ChatFormat):
        self.form, self.read = form, list[str]()
        self.samples: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def __call__(self, request: SampleRequest) -> Sample:
        from ..rollout import Sample

        text = self.form.tokenizer.decode(request.context)
        self.read.append(text)
        ids = self.form.tokenizer(self.turn(text), add_special_tokens=False)["input_ids"]
        ids = [*ids[: request.max_new_tokens - 1], self.form.tokenizer.eos_token_id]
        self.samples.append((tuple(request.context), tuple(ids)))
        return Sample(ids, [-0.1] * len(ids))

    def turn(self, text: str) -> str:
        """The next turn behind a conversation."""
        tools = {tool["name"]: tool for tool in tools_in(text)}
        if not tools:
            return "Hello file task"
        behind = text.rpartition(TASK)[2]
        done = behind.count("<tool_response>")
        by_tool = _ENDS_BY_TOOL in text
        if done >= len(_STEPS) + by_tool:
            return "done"
        known = (*_SHELLS, *((*_FILES, ())[done]))
        tool = next((tools[name] for name in known if name in tools), None)
        if tool is None:
            return "No tool that I know."
        command = (*_STEPS, _SUBMIT)[done]
        return self.written(tool["name"], filled(tool, command))

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call of a tool, as Qwen3 writes it."""
        return "<think>\nI use a tool.\n</think>\n\n" + call_of(
            name, json.dumps(arguments, ensure_ascii=False)
        )


def filled(tool: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Arguments for a tool that runs commands, or reads or writes files."""
    parameters = tool.get("parameters") or {}
    needed, known = parameters.get("required") or (), (parameters.get("properties") or {}).items()
    values = {name: _value(name, one, command, name in needed) for name, one in known}
    return {name: value for name, value in values.items() if value is not None}


def _value(name: str, parameter: Mapping[str, Any], command: str, is_needed: bool) -> Any:
    """A value for a parameter of a tool; `None` leaves it out."""
    if name in ("command", "cmd", "input"):
        return ["bash", "-lc", command] if parameter.get("type") == "array" else command
    if name.lower().replace("_", "") in ("path", "filepath", "absolutepath"):
        return "/tmp/agent/work/hello.txt"
    if name in ("content", "contents", "text"):
        return "hi\n"
    return (
        (parameter.get("enum") or [_EXAMPLES.get(parameter.get("type", ""), "hello")])[0]
        if is_needed
        else None
    )


def call_of(name: str, arguments: str) -> str:
    """A call of a tool in Qwen3's tags; `arguments` is JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tools_in(text: str) -> Sequence[dict[str, Any]]:
    """The tools that a prompt of Qwen3's template offers."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", text, re.DOTALL)
    return [json.loads(one)["function"] for one in found[1].splitlines()] if found else []


def byte_format() -> ChatFormat:
    """Bytes as tokens, and a template with tools: no model is needed to see what a harness asks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from ..rollout import ChatFormat, FreeText

    core = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    core.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    template = Path(spec.submodule_search_locations[0], "chat_templates", "qwen3.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return ChatFormat(tokenizer, FreeText())
