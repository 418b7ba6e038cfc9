"""Prompts that are text, and what they share with conversations: token ids that are never tokenised again.

A row whose `prompt` is a string is in TRL's standard format: the tokenizer turns it into ids as it is, and no chat
template is involved, so a base model without one trains too. Turns and observations follow as text, joined by the
grammar's frame and line breaks. The transcript is append-only, as in a conversation ([`ChatFormat`]).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..llm import Message
from .grammar import Grammar, TagGrammar, Turn


class TextFormat:
    """Tokenises text prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Not changed. It needs no chat template.
        grammar ([`Grammar`], *optional*): What turns look like. Defaults to Prompt-R1's tags.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults to the tokenizer's
            end-of-sequence token.

    Attributes:
        turn_prefix (`str`): What stands in front of the agent's turn and is read as a part of it. Empty here.
    """

    turn_prefix = ""

    def __init__(self, tokenizer: Any, grammar: Grammar | None = None, end_of_turn_ids: Sequence[int] | None = None):
        self.tokenizer = tokenizer
        self.grammar: Grammar = grammar or TagGrammar()
        if end_of_turn_ids is None:
            end_of_turn_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        # The text of every added token (special or not). A lookahead, so that overlapping occurrences are all found.
        # Case-insensitive, because an added token may be matched after normalisation; a cut too many does no harm.
        added = {str(text): token for text, token in tokenizer.get_added_vocab().items()}
        texts = sorted({text for text in (*added, *tokenizer.all_special_tokens) if len(text) > 1}, key=len)
        self._added_tokens = re.compile(f"(?={'|'.join(map(re.escape, reversed(texts))) or '(?!)'})", re.I)
        # The ids that text could pose as: not the one for unknown words, nor runs of white space, which come out of
        # harmless text.
        posing = {token for text, token in added.items() if len(text.strip(" \t\r\n\u2581")) > 1}
        self._added_ids = posing - {tokenizer.unk_token_id}
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
        """Tokenise `text` such that no added token comes out, even where its text occurs.

        The text is cut inside each such place and the pieces are tokenised one by one: same characters, other tokens.
        """
        cuts = [match.start() + 1 for match in self._added_tokens.finditer(text)]
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return [token for piece in pieces for token in self._plain_piece(piece)]

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read the sampled ids of one turn. Ending tokens are dropped, every other special token stays visible."""
        end = len(ids)
        while end and ids[end - 1] in self.end_of_turn_ids:
            end -= 1
        text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        return self.grammar.parse(self.turn_prefix + text)

    def _plain_piece(self, text: str) -> list[int]:
        ids = self._encode(text)
        if self._added_ids.isdisjoint(ids):
            return ids
        # A normaliser that drops the invisible or folds wide characters has made an added token of what was none.
        # Character by character there is nothing for it to put together.
        return [token for character in text for token in self._encode(character)]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
