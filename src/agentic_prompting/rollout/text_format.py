"""Prompts that are text, and what they share with conversations: token ids that are never tokenised again.

A row whose `prompt` is a string is in TRL's standard format: the tokenizer turns it into ids as it is, and no chat
template is involved, so a base model without one trains too. Turns and observations follow as text, joined by the
grammar's frame and line breaks. The transcript is append-only, as in a conversation ([`ChatFormat`]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..llm import Message
from .grammar import Grammar, TagGrammar, Turn
from .plain_text import PlainText


class TextFormat:
    """Tokenises text prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Not changed. It needs no chat template.
        grammar ([`Grammar`], *optional*): What turns look like. Defaults to Prompt-R1's tags.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults to the tokenizer's
            end-of-sequence token.
        own_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the agent ordinary added tokens
            such as `<think>`: [`AgentSpec.own_texts`]. In a conversation all other text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): What stands in front of the agent's turn and is read as a part of it. Empty here.
    """

    turn_prefix = ""

    def __init__(
        self,
        tokenizer: Any,
        grammar: Grammar | None = None,
        end_of_turn_ids: Sequence[int] | None = None,
        own_texts: Iterable[str] = (),
    ):
        self.tokenizer = tokenizer
        self.grammar: Grammar = grammar or TagGrammar()
        if end_of_turn_ids is None:
            end_of_turn_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self._text = PlainText(tokenizer, own_texts)
        opening, closing = self.grammar.frame
        self._before_reply, self._after_reply = self._encode(f"\n{opening}"), self._encode(f"{closing}\n")
        # A turn that has a closing tag ends there. One that has none ends with the end-of-sequence token.
        self._closing = [] if self.grammar.stops else list(end_of_turn_ids[:1])

    def prompt(self, messages: Sequence[Message]) -> str | list[Any]:
        """The prompt of a row as TRL and reward functions get it: the messages' texts, a blank line between them."""
        return "\n\n".join(message["content"] for message in messages)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a prompt as TRL's tokenisation gives them, with the tokenizer's own first token where it has one.

        Messages are joined as in [`TextFormat.prompt`].
        """
        return list(self.tokenizer(prompt if isinstance(prompt, str) else self.prompt(prompt))["input_ids"])

    def turn_ids(self, text: str) -> list[int]:
        """The ids of a turn written by somebody else (a trace), with the tokens that end a turn."""
        return [*self._encode(text.removeprefix(self.turn_prefix)), *self._closing]

    def observation_ids(self, text: str, after: Sequence[int]) -> list[int]:
        """The ids between two turns: end of the agent's turn, the observation in its tags, start of the next turn.

        The observation is plain text whatever it contains: neither special tokens nor the grammar's tags in it have
        an effect.

        Args:
            text (`str`): The observation.
            after (`Sequence[int]`): The ids of the turn before. If the agent ended it with an end-of-turn token, it
                is not ended twice; a turn that was stopped at its closing tag is ended here.
        """
        ended = bool(after) and after[-1] in self.end_of_turn_ids
        separator: str = getattr(self.grammar, "separator", "")
        first, *others = text.split(separator) if separator else [text]
        ids = self.plain_ids(self.grammar.escape(first))
        for other in others:
            ids += [*self._encode(separator), *self.plain_ids(self.grammar.escape(other))]
        return [*([] if ended else self._closing), *self._before_reply, *ids, *self._after_reply]

    def plain_ids(self, text: str) -> list[int]:
        """Tokenise `text` such that no added token comes out, even where its text occurs; see [`PlainText`]."""
        return self._text.plain_ids(text)

    def trust(self, text: str) -> None:
        """Add to `own_texts`, for example a system prompt that the run has evolved."""
        self._text.trust(text)

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read the sampled ids of one turn. Ending tokens are dropped, every other special token stays visible."""
        end = len(ids)
        while end and ids[end - 1] in self.end_of_turn_ids:
            end -= 1
        text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        return self.grammar.parse(self.turn_prefix + text)

    def _encode(self, text: str) -> list[int]:
        return self._text.encode(text)
