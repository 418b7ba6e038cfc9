"""Tokenises text from outside so that no special token comes out of it.

A question, a message of a client, or a document may contain the text of a special token (`<|im_end|>`). A tokenizer
turns that text into the token itself, and the model then reads a forged turn. Such places are therefore cut
in two, and the parts are tokenised one by one: same characters, other tokens.

In a conversation the chat template's own special tokens have to stay. So the cuts are marked in the messages before the
template is filled in, by characters that cannot be guessed, and the rendered text is cut at the marks. A conversation
without such places has no mark: it is tokenised whole, as transformers does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ..llm import Message
from .time_limit import limited
from .turn_reader import replace_surrogates

# Characters that some normaliser may drop or change. Printable ASCII is safe: the patterns below ignore case.
_ODD = re.compile(r"[^\t\n\r -~]")


class PlainText:
    """The tokens of one tokenizer, with none that text from outside could forge.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template for [`PlainText.conversation_ids`]. Not changed.
        own_texts (`Iterable[str]`, *optional*): Texts of the run itself: its prompt template and system prompt. In
            them ordinary added tokens (`<think>` of some tokenizers) stay tokens, because they show the agent how to
            write. Special tokens do not.
        keep_ordinary (`bool`, *optional*, defaults to `False`): Ordinary added tokens stay tokens in all messages. For
            callers that do not know which texts are from outside.
    """

    def __init__(self, tokenizer: Any, own_texts: Iterable[str] = (), keep_ordinary: bool = False):
        self.tokenizer, self.keep_ordinary = tokenizer, keep_ordinary
        added = {str(text): token for text, token in tokenizer.get_added_vocab().items()}
        ordinary = {
            str(one)
            for one in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if not one.special
        }
        special = {text for text in (*added, *tokenizer.all_special_tokens) if text not in ordinary}
        self._every, self._special = _occurrences({*added, *special}), _occurrences(special)
        # The ids that text could pose as: not the one for unknown words, nor runs of white space, which come out of
        # harmless text.
        posing = {
            text: token for text, token in added.items() if len(text.strip(" \t\r\n\u2581")) > 1
        }
        self._posing = {*posing.values()} - {tokenizer.unk_token_id}
        self._posing_special = self._posing & {posing[text] for text in special & posing.keys()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalises = backend is None or backend.normalizer is not None
        self.mark = f"\ue000{secrets.token_hex(8)}\ue001"
        self._own: list[str] = []
        for text in own_texts:
            self.trust(text)

    def trust(self, text: str) -> None:
        """Add a text of the run's own, for example a system prompt that it has evolved."""
        if text not in self._own and self._every.search(
            text
        ):  # only these are looked for in a message
            self._own.append(text)

    def encode(self, text: str) -> list[int]:
        """Tokenise `text` as the tokenizer does, special tokens included.

        Half a surrogate pair, which a JSON text or a file name may hold, is read as a replacement character:
        tokenizers take no other text that is not valid Unicode.
        """
        return (
            self.tokenizer(replace_surrogates(text), add_special_tokens=False)["input_ids"]
            if text
            else []
        )

    def plain_ids(self, text: str) -> list[int]:
        """Tokenise `text` such that no added token comes out, even where its text occurs."""
        cuts = [match.start() + 1 for match in self._every.finditer(text)]
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return [token for piece in pieces for token in self._plain_piece(piece)]

    def conversation_ids(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Tokenise a conversation, up to where the next turn begins; its messages are text from outside.

        In a message of the role `assistant` only special tokens are cut: the template looks for the agent's own marks
        there (Qwen3's drops thoughts of earlier turns).

        Raises:
            `ValueError`: The template did not end within the time limit.
        """
        return self.ids_of(self.render(self.marked(messages), **template_kwargs))

    def marked(self, messages: Sequence[Any]) -> list[Any]:
        """The messages with `mark` wherever the rendered text has to be cut, for callers that use a part of a
        rendering."""
        return [self._marked(message, message.get("role") == "assistant") for message in messages]

    def ids_of(self, rendered: str) -> list[int]:
        """The ids of a rendering of [`PlainText.marked`] messages, or of a part of one."""
        return [token for piece in rendered.split(self.mark) for token in self.encode(piece)]

    def render(
        self, messages: Sequence[Any], generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The conversation as the chat template writes it.

        Raises:
            `ValueError`: The template did not end within the time limit.
        """
        return limited(
            lambda: self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **template_kwargs,
            ),
            f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r}",
        )

    def _plain_piece(self, text: str) -> list[int]:
        ids = self.encode(text)
        if self._posing.isdisjoint(ids):
            return ids
        # A normaliser that drops invisible characters or folds wide ones has produced an added token. It cannot if each
        # character is tokenised alone.
        return [token for character in text for token in self.encode(character)]

    def _marked(self, value: Any, by_agent: bool) -> Any:
        """A message, or a part of one, with a mark wherever its text has to be cut."""
        if isinstance(value, str):
            cuts = self._cuts(value, by_agent or self.keep_ordinary)
            return (
                self.mark.join(value[i:j] for i, j in pairwise([0, *cuts, len(value)]))
                if cuts
                else value
            )
        if isinstance(value, dict):
            return {name: self._marked(part, by_agent) for name, part in value.items()}
        return (
            [self._marked(part, by_agent) for part in value] if isinstance(value, list) else value
        )

    def _cuts(self, text: str, keep_ordinary: bool) -> list[int]:
        """The positions at which the text of a message is cut."""
        odd = self._normalises and _ODD.search(text)
        if not odd and not self._every.search(text):
            return []
        own = [(0, len(text))] if keep_ordinary else sorted(self._own_parts(text))
        cuts = {match.start() + 1 for match in self._special.finditer(text)}
        for match in self._every.finditer(text):
            begin, end = match.start(), match.start() + len(match[1])
            if not any(first <= begin and end <= last for first, last in own):
                cuts.add(begin + 1)
        if odd:
            for begin, end in list(pairwise([0, *sorted(cuts), len(text)])):
                ids = (
                    self._posing_special
                    if any(i < end and begin < j for i, j in own)
                    else self._posing
                )
                if _ODD.search(text, begin, end) and not ids.isdisjoint(
                    self.encode(text[begin:end])
                ):
                    cuts |= set(range(begin + 1, end))  # see `_plain_piece`
        return sorted(cuts)

    def _own_parts(self, text: str) -> Iterator[tuple[int, int]]:
        """The spans of the run's own texts in a message: each once, so that a question cannot gain by repeating one.

        Preferably at the beginning or the end, because system prompt and template surround the question.
        """
        for own in self._own:
            begin = (
                0
                if text.startswith(own)
                else len(text) - len(own)
                if text.endswith(own)
                else text.find(own)
            )
            if begin >= 0:
                yield begin, begin + len(own)


def _occurrences(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches in front of each of the texts; the group holds it.

    A lookahead finds all overlapping occurrences, the longest first. Case is ignored, because an added token may be
    matched after normalisation; a needless cut does no harm.
    """
    longest = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, longest)) or '(?!)'}))", re.I)
