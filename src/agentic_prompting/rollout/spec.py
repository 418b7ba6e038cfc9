"""What an agent is besides its weights: how it is asked, how it writes, how far it may go.

One object for training and for use, saved beside the weights as `agentic_prompting.json`, so that a trained agent is
asked in exactly the form it was trained in and nobody has to remember flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..llm import Message, with_system
from ..records import atomic_write
from .grammar import FreeText, Grammar, TagGrammar
from .play import Limits
from .templates import check_template, fill_template

SPEC_FILE = "agentic_prompting.json"
_FORMAT = 1  # of the file; raised when a reader of the old one would go wrong
_GRAMMARS = {"TagGrammar": TagGrammar, "FreeText": FreeText}  # those that a file can name


@dataclass(frozen=True)
class AgentSpec:
    """The form of an agent.

    Args:
        prompt_template (`str`, *optional*, defaults to `"{question}"`): The user message; `{question}` is filled in.
        system_prompt (`str`, *optional*): The agent's own system message.
        grammar ([`Grammar`], *optional*): What its turns look like. Defaults to Prompt-R1's tags.
        limits ([`Limits`], *optional*): Turns and tokens.
        chat_template_kwargs (`dict`, *optional*): Passed to the chat template.
        stop_at_tags (`bool`, *optional*, defaults to `True`): End a turn right after a closing request or answer tag.
        join_system_prompt (`bool`, *optional*, defaults to `False`): Put the system prompt in front of a row's own
            system message, as E-SPL trains, instead of giving way to it.
        sampling (`dict`, *optional*): Temperature and the like, as in [`Sampling`].

    Raises:
        `ValueError`: If the template has no `{question}`.
    """

    prompt_template: str = "{question}"
    system_prompt: str | None = None
    grammar: Grammar = TagGrammar()
    limits: Limits = Limits()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    stop_at_tags: bool = True
    join_system_prompt: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        check_template(self.prompt_template)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self.grammar.stops if self.stop_at_tags else ()

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The conversation a row begins with: its own `prompt` where it has one, else the filled-in template."""
        if row.get("prompt"):
            prompt: str | Sequence[Message] = row["prompt"]
        else:
            prompt = fill_template(self.prompt_template, row["question"])
        messages: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_system(self.system_prompt, messages, join=self.join_system_prompt)

    def save(self, folder: str | Path) -> None:
        """Write `agentic_prompting.json` into `folder`, all or nothing."""
        saved = {"format": _FORMAT, **asdict(self), "grammar": _grammar_to_json(self.grammar)}
        atomic_write(Path(folder) / SPEC_FILE, json.dumps(saved, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: str | Path, grammar: Grammar | None = None) -> AgentSpec:
        """Read the file that [`AgentSpec.save`] wrote.

        Args:
            folder (`str` or `Path`): Where it is.
            grammar ([`Grammar`], *optional*): The grammar itself, where the file can only name it: one that belongs to
                an environment, or the user's own.

        Raises:
            `FileNotFoundError`: If there is none: the folder does not hold an agent trained with this library.
            `ValueError`: If it was written by a newer version.
        """
        path = Path(folder) / SPEC_FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{path} not found: {folder} was not saved by a trainer of this library. "
                "Pass an AgentSpec yourself to use a model that was not."
            )
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("format") > _FORMAT:
            raise ValueError(f"{path} was written by a newer agentic-prompting; upgrade to read it")
        kind = saved["grammar"].pop("kind")
        if kind in _GRAMMARS:
            # JSON has lists only; a grammar's fields are tuples.
            made_of = {
                key: tuple(value) if isinstance(value, list) else value for key, value in saved["grammar"].items()
            }
            grammar = _GRAMMARS[kind](**made_of)
        elif type(grammar).__name__ != kind:
            raise ValueError(f"{path}: the agent was trained with the grammar {kind!r}; pass it as grammar=")
        saved["grammar"], saved["limits"] = grammar, Limits(**saved["limits"])
        return cls(**saved)


def _grammar_to_json(grammar: Grammar) -> dict[str, Any]:
    """Its name and what it is made of; of a grammar of the user's own only the name can be kept."""
    return {"kind": type(grammar).__name__, **(asdict(grammar) if isinstance(grammar, TagGrammar | FreeText) else {})}
