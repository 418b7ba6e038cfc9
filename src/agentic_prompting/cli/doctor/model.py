"""Can the model in this folder hold a conversation of several turns?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .finding import Finding, Setup

_TURN = "<think> QTHOUGHTQ </think> QAGENTQ"


def folder(setup: Setup) -> Iterator[Finding]:
    """Whether there is a trained agent, or at least a model."""
    from ...rollout import SPEC_FILE, AgentSpec

    run = setup.run
    if run is None:
        return
    if not run.is_dir():
        yield Finding("problem", f"{run} does not exist", f"agentic-prompting demo --output-dir {run}")
        return
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not any((run / name).exists() for name in ("config.json", "adapter_config.json")):
        if checkpoints:
            says = f"{run} holds checkpoints but no trained agent: its training has not finished"
            yield Finding("warning", says, f"the command of that run with --resume_from_checkpoint {checkpoints[-1]}")
        else:
            yield Finding("problem", f"{run} holds no model (no config.json)", "--run FOLDER that a trainer has saved")
    elif (run / SPEC_FILE).exists():
        AgentSpec.load(run)
        yield Finding("ok", f"{run} holds a trained agent")
    else:
        says = f"{run} holds a model that was not trained here (no {SPEC_FILE}): to train from, not to ask or serve"
        yield Finding("warning", says, f"agentic-prompting train prompt-r1 --model_name_or_path {run} --config FILE")


def chat_template(setup: Setup) -> Iterator[Finding]:
    """Whether its template can render several turns, and whether it leaves earlier ones as they were."""
    from ...rollout import ChatFormat

    for path in _model_folders(setup):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        fix = f"an instruct model instead, or put its template into {path}/chat_template.jinja"
        try:
            ChatFormat(tokenizer)
        except ValueError as error:
            yield Finding("problem", f"{path}: {error}", fix)
            continue
        if prefix_preserving(tokenizer):
            yield Finding("ok", f"{path}: its chat template leaves earlier turns as they were")
        else:
            yield Finding(
                "warning",
                f"{path}: its chat template is not prefix-preserving, it rewrites earlier turns (drops their thoughts, "
                "say). Training and PromptAgent keep the sampled tokens; a server that renders the conversation anew "
                "shows the model another one",
                f"agentic-prompting serve {path}, rather than a chat server over the weights",
            )


def prefix_preserving(tokenizer: Any) -> bool:
    """Whether a conversation that goes on begins, rendered, with what it was before."""
    user, reply = {"role": "user", "content": "QUSERQ"}, {"role": "user", "content": "QREPLYQ"}
    agent = {"role": "assistant", "content": _TURN}

    def render(messages: list[dict[str, str]], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    before, after = render([user, agent]), render([user, agent, reply], prompt=True)
    return after.startswith(before.rstrip())


def _model_folders(setup: Setup) -> list[Path]:
    """Those with a tokenizer: of `--run`, and of the configuration where it names a folder."""
    named = [setup.run, setup.values.get("model_name_or_path")]
    folders = dict.fromkeys(Path(one) for one in named if one)
    return [path for path in folders if (path / "tokenizer_config.json").exists()]
