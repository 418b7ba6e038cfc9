"""[`check_harness`]: one task in the real program of a harness, with a script in place of the
policy.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..llm import run
from ..programs import AgentProgram
from ..rollout import ChatFormat, FreeText, Limits, Rollout, Sample, SampleRequest
from .command_program import CommandProgram
from .harness import Harness
from .workspace import Workspace

TASK = "Create a file hello.txt that contains the word hi, then read it back and say done"
ROW = {"question": TASK, "answer": "a word that no prompt may hold: SECRET42"}

# Added to the task: tools for files want absolute paths, and an unconfined rollout has its own
# folder.
_WORK_FOLDER_SUFFIX = " (work folder: `{work}`)"
_CONFINED_WORK_FOLDER = "/tmp/agent/work"

# The steps of the script, with a tool that runs commands or one for files.
_STEPS = ("echo hi > hello.txt", "cat hello.txt")
_SHELL_TOOLS = ("bash", "Bash", "exec_command", "run_shell_command", "shell", "shell_command")
_FILE_TOOLS = (("write_file", "write"), ("read_file", "read"))

# This command ends a task of mini-swe-agent. Its prompt contains the first part.
_SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SUBMIT_COMMAND = f"echo {_SUBMIT_MARK} && echo done"

# Values of required parameters, by their types.
_EXAMPLES = {"boolean": False, "number": 9000, "integer": 9000, "array": []}


def check_harness(
    harness: Harness, isolation: Literal["bwrap", "none"] = "bwrap"
) -> dict[str, Any]:
    """Play one task in a harness, and report what was seen.

    Args:
        harness ([`Harness`]): The settings.
        isolation (`"bwrap"` or `"none"`, *optional*, defaults to `"bwrap"`): As for [`Workspace`].

    Returns:
        `dict`: Observations by name: calls, their roles, token sequences, seconds, names that it
        looked up.

    Raises:
        [`LLMError`]: The harness is not installed, or cannot be isolated.
    """
    # Play the task in a workspace that notes the names which the harness looks up. The task names
    # the work folder, which the script needs for tools that take a path.
    harness = replace(harness, task=harness.task + _WORK_FOLDER_SUFFIX)
    lookups: list[str] = []
    workspace = Workspace(on_dns_lookup=lookups.append, isolation=isolation)
    program = CommandProgram(harness, workspace=workspace, reward=wrote_the_file, timeout=300)
    program.check()
    start = time.monotonic()
    rollout, agent = play_scripted(program)
    seconds = time.monotonic() - start

    # Report what the gateway counted and what the script read.
    counts = rollout.counts
    tool_names = {tool["name"] for prompt in agent.prompts for tool in find_tools(prompt)}
    has_own_network = isolation != "none"
    return {
        "harness": harness.name,
        "dialect": harness.dialect,
        "status": rollout.status,
        "error": str(rollout.error) if rollout.error else None,
        "answer": rollout.answer,
        "wrote_the_file": bool((rollout.returned or {}).get("reward")),
        "calls": int(counts.get("program/calls", 0)),
        "auxiliary_calls": int(counts.get("program/auxiliary_calls", 0)),
        "sequences": int(counts.get("program/sequences", 0)),
        "undelivered_tokens": int(counts.get("program/undelivered_tokens", 0)),
        "witness_differences": counts.get(
            "program/witness_differences", "no record that can be read"
        ),
        "prompt_characters": [len(prompt) for prompt in agent.prompts],
        "answer_in_prompt": any("SECRET42" in prompt for prompt in agent.prompts),
        "tools": sorted(tool_names),
        "seconds": round(seconds, 1),
        "looked_up": (
            sorted(set(lookups)) if has_own_network else "not seen without a network of its own"
        ),
    }


def wrote_the_file(rollout: Rollout, folder: Path) -> float:
    """The reward of the task."""
    file = folder / "hello.txt"
    return float(file.is_file() and file.read_text() == "hi\n")


def play_scripted(
    program: AgentProgram,
    agent: ScriptedAgent | None = None,
    max_context: int = 400_000,
    row: Mapping[str, Any] = ROW,
) -> tuple[Rollout, ScriptedAgent]:
    """One rollout of the task, and the script that played the policy."""
    agent = agent or ScriptedAgent(byte_format())
    rollout = Rollout([1], row=dict(row), seed=0)
    limits = Limits(max_turns=64, max_turn_tokens=8000, max_tokens=400_000, max_context=max_context)
    return run(program.play_episode(rollout, agent, agent.chat_format, limits)), agent


class ScriptedAgent:
    """Writes the file, reads it, says done, with whatever tools it is offered; a title where there
    are none.

    Args:
        chat_format ([`ChatFormat`]): How conversations are written.

    Attributes:
        prompts (`list[str]`): The texts that it has read.
        samples (`list[tuple]`): The token ids of each prompt and of its reply.
    """

    def __init__(self, chat_format: ChatFormat):
        self.chat_format = chat_format
        self.prompts: list[str] = []
        self.samples: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def __call__(self, request: SampleRequest) -> Sample:
        tokenizer = self.chat_format.tokenizer
        prompt = tokenizer.decode(request.context)
        self.prompts.append(prompt)
        ids = tokenizer(self.turn(prompt), add_special_tokens=False)["input_ids"]
        # At most as many tokens as are asked for, the end token included.
        ids = [*ids[: request.max_new_tokens - 1], tokenizer.eos_token_id]
        self.samples.append((tuple(request.context), tuple(ids)))
        # The log-probabilities only have to exist: nothing is trained.
        return Sample(ids, [-0.1] * len(ids))

    def turn(self, prompt: str) -> str:
        """The next turn of a conversation."""
        tools = {tool["name"]: tool for tool in find_tools(prompt)}
        # A call without tools asks for the title of the session.
        if not tools:
            return "Hello file task"

        # The number of results says which step comes next. The last one submits, where that is
        # asked for.
        commands = [*_STEPS]
        if _SUBMIT_MARK in prompt:
            commands.append(_SUBMIT_COMMAND)
        steps_done = prompt.rpartition(TASK)[2].count("<tool_response>")
        if steps_done >= len(commands):
            return "done"

        # Call the first tool that can do the step.
        candidates = list(_SHELL_TOOLS)
        if steps_done < len(_FILE_TOOLS):
            candidates += _FILE_TOOLS[steps_done]
        for name in candidates:
            if name in tools:
                arguments = fill_arguments(
                    tools[name], commands[steps_done], find_work_folder(prompt)
                )
                return self.write_call(name, arguments)
        return "No tool that I know."

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A turn that calls a tool, as Qwen3 writes it."""
        call = format_call(name, json.dumps(arguments, ensure_ascii=False))
        return "<think>\nI use a tool.\n</think>\n\n" + call


def find_work_folder(prompt: str) -> str:
    """The work folder that the task in a prompt names; where it names none, a confined command's."""
    named = re.search(r"\(work folder: `(.+?)`\)", prompt)
    return named[1] if named else _CONFINED_WORK_FOLDER


def fill_arguments(
    tool: Mapping[str, Any], command: str, work_folder: str = _CONFINED_WORK_FOLDER
) -> dict[str, Any]:
    """Arguments for a tool that runs commands, or reads or writes files."""
    schema = tool.get("parameters") or {}
    required = schema.get("required") or ()
    arguments = {}
    # Optional parameters are filled only where they say what the step does.
    for name, parameter in (schema.get("properties") or {}).items():
        value = _argument_value(name, parameter, command, work_folder, name in required)
        if value is not None:
            arguments[name] = value
    return arguments


def _argument_value(
    name: str, parameter: Mapping[str, Any], command: str, work_folder: str, is_required: bool
) -> Any:
    """A value for a parameter of a tool; `None` leaves it out."""
    parameter_type = parameter.get("type", "")
    # The subject of the step: a command, a path or a content.
    if name in ("command", "cmd", "input"):
        return ["bash", "-lc", command] if parameter_type == "array" else command
    if name.lower().replace("_", "") in ("path", "filepath", "absolutepath"):
        return f"{work_folder}/hello.txt"
    if name in ("content", "contents", "text"):
        return "hi\n"

    # Any valid value for other parameters that the tool insists on.
    if not is_required:
        return None
    if parameter.get("enum"):
        return parameter["enum"][0]
    return _EXAMPLES.get(parameter_type, "hello")


def format_call(name: str, arguments: str) -> str:
    """A call of a tool in Qwen3's tags; `arguments` is JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def find_tools(prompt: str) -> Sequence[dict[str, Any]]:
    """The tools that a prompt of Qwen3's template offers."""
    block = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    if block is None:
        return []
    return [json.loads(line)["function"] for line in block[1].splitlines()]


def byte_format() -> ChatFormat:
    """Bytes as tokens, and a template with tools: no model is needed to see what a harness asks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A tokenizer of bytes with the special tokens of ChatML.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )

    # Qwen3's template, as TRL has it.
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    template = Path(spec.submodule_search_locations[0], "chat_templates", "qwen3.jinja")
    fast_tokenizer.chat_template = template.read_text(encoding="utf-8")
    return ChatFormat(fast_tokenizer, FreeText())
