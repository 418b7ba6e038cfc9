"""From prompts to token ids and back, without ever re-tokenising a sampled token.

[`ChatFormat`] is for conversations. Rendering a conversation again at each turn would not reproduce
the tokens that the model sampled: tokenisers merge across the seam, and templates rewrite history
(Qwen3's drops earlier thoughts). The transcript is therefore append-only: the prompt is rendered
once, sampled ids are kept, and between two turns come the ids of everything that the template puts
there, around the observation. That text is found once, by rendering a conversation of placeholders
and cutting it at them. The code depends on no particular template. A template is trusted as far as
transformers' sandbox goes: it cannot reach Python objects, but one that loops forever is not
stopped.

[`TextFormat`] is for prompts that are text. A row whose `prompt` is a string is in TRL's standard
format: the tokenizer turns it into ids unchanged, and no chat template is involved, so a base model
without a template trains too. Turns and observations follow as text, joined by the grammar's frame
and line breaks.

[`PlainText`] tokenises text from outside so that no special token comes out of it. A question, a
message of a client, or a document may contain the text of a special token (`<|im_end|>`). A
tokenizer turns that text into the token itself, and the model then reads a forged turn. Such places
are therefore cut in two, and the parts are tokenised one by one: same characters, other tokens. In
a conversation the chat template's own special tokens have to stay. So the cuts are marked in the
messages before the template is filled in, by characters that cannot be guessed, and the rendered
text is cut at the marks. A conversation without such places has no mark: it is tokenised whole, as
transformers does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from ..llm import Message
from ..llm.surrogates import replace_surrogates
from .grammar import Grammar, TagGrammar, Turn
from .tool_templates import find_tool_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The start of a thought in the chat templates of thinking models.
_THOUGHT_OPENING = "<think>"

# Words that no template rewrites: no spaces to trim, no tags to strip.
_SYSTEM_PLACEHOLDER = "QSYSTEMQ"
_USER_PLACEHOLDER = "QUSERQ"
_AGENT_PLACEHOLDER = "QAGENTQ"
_REPLY_PLACEHOLDER = "QREPLYQ"

# Characters that some normaliser may drop or change. Printable ASCII is safe: the patterns of added
# tokens ignore case.
_CHANGEABLE = re.compile(r"[^\t\n\r -~]")

_WHITE_SPACE = " \t\r\n\u2581"


class PlainText:
    """Tokenises text from outside without letting it forge an added token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template for
            [`PlainText.conversation_ids`]. Not changed.
        trusted_texts (`Iterable[str]`, *optional*): Texts of the run itself: its prompt template
            and system prompt. In them ordinary added tokens (`<think>` of some tokenizers) stay
            tokens, because they show the agent how to write. Special tokens do not.
        keep_ordinary (`bool`, *optional*, defaults to `False`): Ordinary added tokens stay tokens
            in all messages. For callers that do not know which texts are from outside.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        trusted_texts: Iterable[str] = (),
        keep_ordinary: bool = False,
    ):
        self.tokenizer = tokenizer
        self.keep_ordinary = keep_ordinary

        # The texts of all added tokens, and of the special ones among them.
        added = {str(text): token for text, token in tokenizer.get_added_vocab().items()}
        decoder = getattr(tokenizer, "added_tokens_decoder", {})
        ordinary = {str(token) for token in decoder.values() if not token.special}
        special = {text for text in added if text not in ordinary}
        special |= {text for text in tokenizer.all_special_tokens if text not in ordinary}
        self._any_token = _compile_occurrences({*added, *special})
        self._special_token = _compile_occurrences(special)

        # The ids that text could forge. The unknown word's id and runs of white space come out of
        # harmless text.
        forgeable = {
            text: token for text, token in added.items() if len(text.strip(_WHITE_SPACE)) > 1
        }
        self._forgeable = set(forgeable.values()) - {tokenizer.unk_token_id}
        forgeable_special = {token for text, token in forgeable.items() if text in special}
        self._forgeable_special = self._forgeable & forgeable_special

        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalises = backend is None or backend.normalizer is not None
        self.mark = f"\ue000{secrets.token_hex(8)}\ue001"
        self._trusted_texts: list[str] = []
        for text in trusted_texts:
            self.trust(text)

    def trust(self, text: str) -> None:
        """Add a text of the run's own, for example a system prompt that the run has evolved."""
        # A text without added tokens needs no exemption.
        if text not in self._trusted_texts and self._any_token.search(text):
            self._trusted_texts.append(text)

    def encode(self, text: str) -> list[int]:
        """Tokenise `text` as the tokenizer does, special tokens included.

        Half a surrogate pair, which a JSON text or a file name may contain, is read as a
        replacement character, because tokenizers accept only valid Unicode.
        """
        if not text:
            return []
        return self.tokenizer(replace_surrogates(text), add_special_tokens=False)["input_ids"]

    def plain_ids(self, text: str) -> list[int]:
        """Tokenise `text` such that no added token comes out, even where its text occurs."""
        # Cut each added token's text after its first character.
        cuts = [match.start() + 1 for match in self._any_token.finditer(text)]
        ids: list[int] = []
        for begin, end in pairwise([0, *cuts, len(text)]):
            piece = text[begin:end]
            piece_ids = self.encode(piece)
            if not self._forgeable.isdisjoint(piece_ids):
                # A normaliser that drops invisible characters or folds wide ones has produced an
                # added token. It cannot if each character is tokenised alone.
                piece_ids = list(chain.from_iterable(map(self.encode, piece)))
            ids += piece_ids
        return ids

    def conversation_ids(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Tokenise a conversation of text from outside, up to where the next turn begins.

        In a message of the role `assistant` only special tokens are cut: the template looks for the
        agent's own tags there (Qwen3's drops the thoughts of earlier turns).
        """
        return self.ids_of(self.render(self.marked(messages), **template_kwargs))

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the messages with `mark` wherever the rendered text has to be cut.

        For callers that use a part of a rendering.
        """
        return [
            self._mark_strings(message, keep_ordinary=message.get("role") == "assistant")
            for message in messages
        ]

    def ids_of(self, rendered: str) -> list[int]:
        """Tokenise a rendering of [`PlainText.marked`] messages, or a part of one."""
        ids: list[int] = []
        for piece in rendered.split(self.mark):
            ids += self.encode(piece)
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the chat template."""
        return self.tokenizer.apply_chat_template(  # type: ignore[return-value]
            list(messages),  # type: ignore[arg-type]
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **template_kwargs,
        )

    def _mark_strings(self, value: Any, keep_ordinary: bool) -> Any:
        """Return a message, or a part of one, with a mark wherever its text has to be cut."""
        # Cut a text, and join its pieces with the mark.
        if isinstance(value, str):
            cuts = self._find_cuts(value, keep_ordinary or self.keep_ordinary)
            pieces = [value[begin:end] for begin, end in pairwise([0, *cuts, len(value)])]
            return self.mark.join(pieces) if cuts else value

        # Messages and their parts are nested; values of other types are left unchanged.
        if isinstance(value, dict):
            return {name: self._mark_strings(part, keep_ordinary) for name, part in value.items()}
        if isinstance(value, list):
            return [self._mark_strings(part, keep_ordinary) for part in value]
        return value

    def _find_cuts(self, text: str, keep_ordinary: bool) -> list[int]:
        """Return the positions at which the text of a message is cut."""
        is_changeable = self._normalises and _CHANGEABLE.search(text) is not None
        # There is no added token in the text, and a normaliser cannot make one of it.
        if not is_changeable and not self._any_token.search(text):
            return []

        trusted_spans = list(self._find_trusted_spans(text))
        if keep_ordinary:
            trusted_spans = [(0, len(text))]
        cuts = self._cuts_at_tokens(text, trusted_spans)
        if is_changeable:
            cuts |= self._cuts_against_normaliser(text, cuts, trusted_spans)
        return sorted(cuts)

    def _cuts_at_tokens(self, text: str, trusted_spans: Sequence[tuple[int, int]]) -> set[int]:
        """Return a cut in every special token, and in every ordinary added token from outside.

        An ordinary added token stays whole if it lies within one of the run's own texts.
        """
        cuts = {match.start() + 1 for match in self._special_token.finditer(text)}
        for match in self._any_token.finditer(text):
            begin = match.start()
            end = begin + len(match[1])
            if not any(first <= begin and end <= last for first, last in trusted_spans):
                cuts.add(begin + 1)
        return cuts

    def _cuts_against_normaliser(
        self, text: str, cuts: Iterable[int], trusted_spans: Sequence[tuple[int, int]]
    ) -> set[int]:
        """Return cuts between all characters of a piece that the normaliser makes a token of.

        Pieces are what the other `cuts` leave. From a piece with a text of the run's own in it an
        ordinary added token may come, a special one may not.
        """
        further_cuts: set[int] = set()
        for begin, end in pairwise([0, *sorted(cuts), len(text)]):
            if not _CHANGEABLE.search(text, begin, end):
                continue
            overlaps_trusted = any(first < end and begin < last for first, last in trusted_spans)
            forgeable = self._forgeable_special if overlaps_trusted else self._forgeable
            if not forgeable.isdisjoint(self.encode(text[begin:end])):
                further_cuts |= set(range(begin + 1, end))
        return further_cuts

    def _find_trusted_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the span of each of the run's own texts in a message.

        Each text counts once, so that a question cannot gain by repeating it, preferably at the
        beginning or the end, because system prompt and template surround the question.
        """
        for trusted_text in self._trusted_texts:
            if text.startswith(trusted_text):
                begin = 0
            elif text.endswith(trusted_text):
                begin = len(text) - len(trusted_text)
            else:
                begin = text.find(trusted_text)
            if begin >= 0:
                yield begin, begin + len(trusted_text)


class TextFormat:
    """Tokenises text prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Not changed. It needs no chat template.
        grammar ([`Grammar`], *optional*): The form of turns. Defaults to Prompt-R1's tags.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults
            to the tokenizer's end-of-sequence token.
        trusted_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the
            agent ordinary added tokens such as `<think>`: [`AgentSpec.trusted_texts`]. In a
            conversation all other text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): Text in front of the agent's turn that is read as a part of it. Empty
            here.
        environments (`dict[str, TextFormat]`): In a run with several environments the format of
            each, by name; see [`TextFormat.for_row`].
    """

    turn_prefix = ""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        grammar: Grammar | None = None,
        end_of_turn_ids: Sequence[int] | None = None,
        trusted_texts: Iterable[str] = (),
    ):
        self.tokenizer = tokenizer
        self.grammar: Grammar = grammar or TagGrammar()
        # By default the end-of-sequence token ends a turn, if the tokenizer has one.
        if end_of_turn_ids is None:
            end_of_turn_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.environments: dict[str, TextFormat] = {}
        self._text = PlainText(tokenizer, trusted_texts)

        # The ids before each observation and after it.
        opening, closing = self.grammar.frame
        self._before_reply = self._text.encode(f"\n{opening}")
        self._after_reply = self._text.encode(f"{closing}\n")

        # A turn with a closing tag ends there; a turn without one ends with the end-of-sequence
        # token. `_closing` ends a turn in front of an observation, `_end` a whole turn.
        self._end_of_sequence = list(end_of_turn_ids[:1])
        self._closing = [] if self.grammar.stops else self._end_of_sequence
        self._end = self._closing

    def check_system(self, instead: str) -> None:
        """Raise an error if the format does not support system messages; any text does.

        Args:
            instead (`str`): Advice for the error message.
        """

    def check_tools(self) -> None:
        """Raise an error if prompts do not show their tools; text has no template that could.

        Raises:
            `ValueError`: The chat template never shows tools, or writes calls in a form that the
                grammar does not read.
        """

    def for_row(self, row: Mapping[str, Any]) -> TextFormat:
        """Return the format of a row: its environment's where a run has several."""
        return self.environments[row["environment"]] if self.environments else self

    def prompt(self, messages: Sequence[Message]) -> str | list[Any]:
        """Return the prompt of a row as TRL and reward functions get it.

        It is the messages' texts with a blank line between them.
        """
        return "\n\n".join(message["content"] for message in messages)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokenise a prompt as TRL does, with the tokenizer's own first token where it has one.

        Messages are joined as in [`TextFormat.prompt`].
        """
        text = prompt if isinstance(prompt, str) else str(self.prompt(prompt))
        return list(self.tokenizer(replace_surrogates(text))["input_ids"])

    def turn_ids(self, text: str) -> list[int]:
        """Tokenise a turn that was not sampled (a trace's), with the tokens that end a turn."""
        end = self._end
        ends_at_stop = text.rstrip().endswith(tuple(self.grammar.stops))
        # A turn that ends neither at a stop text nor with tokens gets the end-of-sequence token.
        if not ends_at_stop and not end:
            end = self._end_of_sequence
        # The prefix of the turn is in the prompt already.
        return [*self._text.encode(text.removeprefix(self.turn_prefix)), *end]

    def observation_ids(self, text: str, after: Sequence[int]) -> list[int]:
        """Tokenise everything between two turns.

        These are the end of the agent's turn, the observation in its tags, and the start of the
        next turn. The observation is plain text whatever it contains: neither special tokens nor
        the grammar's tags in it have an effect.

        Args:
            text (`str`): The observation.
            after (`Sequence[int]`): The ids of the turn before. If the agent ended it with an
                end-of-turn token, it is not ended twice; a turn that was stopped at its closing tag
                is ended here.
        """
        # End the agent's turn, unless the agent has ended it.
        is_ended = bool(after) and after[-1] in self.end_of_turn_ids
        ids = [] if is_ended else [*self._closing]
        ids += self._before_reply

        # A grammar may put its own separator between the parts of an observation.
        separator: str = getattr(self.grammar, "separator", "")
        parts = text.split(separator) if separator else [text]
        for number, part in enumerate(parts):
            if number > 0:
                ids += self._text.encode(separator)
            ids += self.plain_ids(self.grammar.escape(part))
        return ids + self._after_reply

    def plain_ids(self, text: str) -> list[int]:
        """Tokenise `text` such that no added token comes out; see [`PlainText`]."""
        return self._text.plain_ids(text)

    def trust(self, text: str) -> None:
        """Add to `trusted_texts`, for example a system prompt that the run has evolved."""
        self._text.trust(text)
        for chat_format in self.environments.values():
            chat_format.trust(text)

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read the sampled ids of one turn.

        Ending tokens are dropped; every other special token stays visible.
        """
        end = len(ids)
        while end and ids[end - 1] in self.end_of_turn_ids:
            end -= 1
        text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        return self.grammar.parse(self.turn_prefix + text)


class ChatFormat(TextFormat):
    """Renders prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template. Not changed.
        grammar ([`Grammar`], *optional*): The form of turns. Defaults to Prompt-R1's tags.
        chat_template_kwargs (`dict`, *optional*): Passed to the template, for example
            `{"enable_thinking": False}` for Qwen3: then the template itself writes an empty thought
            before each turn, and the agent's `<think>` is its own. With thinking on (the template's
            default) the agent opens the thought itself; the grammar is the same.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults
            to the tokenizer's end-of-sequence token.
        trusted_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the
            agent ordinary added tokens such as `<think>`: [`AgentSpec.trusted_texts`]. All other
            text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): The part of the agent's turn that the template has already written when
            sampling starts: `<think>` if it opens the thought for the agent (as Qwen3-Thinking's
            does), else empty.

    Raises:
        `ValueError`: If the tokenizer has no chat template, or one that cannot render a user, an
            assistant and a user message in this order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        grammar: Grammar | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        end_of_turn_ids: Sequence[int] | None = None,
        trusted_texts: Iterable[str] = (),
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat "
                "template; use an instruct model, set tokenizer.chat_template, or give each row a "
                "`prompt` that is a string"
            )
        super().__init__(tokenizer, grammar, end_of_turn_ids, trusted_texts)
        self.chat_template_kwargs = chat_template_kwargs or {}

        # Find the text around a reply, and the text in front of the agent's turn, by rendering a
        # conversation of placeholders.
        user: Message = {"role": "user", "content": _USER_PLACEHOLDER}
        agent: Message = {"role": "assistant", "content": _AGENT_PLACEHOLDER}
        reply: Message = {"role": "user", "content": _REPLY_PLACEHOLDER}
        try:
            _, rest = self._render([user, agent, reply]).split(_AGENT_PLACEHOLDER)
            before_reply, after_reply = rest.split(_REPLY_PLACEHOLDER)
            without_generation_prompt = self._render([user], generation_prompt=False)
            generation_prompt = self._render([user]).removeprefix(without_generation_prompt)
        except Exception as error:
            raise ValueError(
                "the chat template cannot render user, assistant, user in this order, each once "
                f"and unchanged, which a conversation of several turns needs: {error}"
            ) from error
        # The same texts as ids, with the grammar's frame around the reply.
        opening, closing = self.grammar.frame
        before_ids = self._text.encode(before_reply + opening)
        self._after_reply = self._text.encode(closing + after_reply)

        # A thought that the template leaves open belongs to the agent's text when a turn is read.
        # If the grammar has no thoughts, the model may still have them.
        thought_opening = self.grammar.thought_opening or _THOUGHT_OPENING
        if generation_prompt.rstrip().endswith(thought_opening):
            self.turn_prefix = thought_opening

        # The end of the agent's turn is everything up to and including the end-of-turn token.
        ends = [i + 1 for i, token in enumerate(before_ids) if token in self.end_of_turn_ids]
        if ends:
            # The turn ends with the first such token. What follows belongs to the reply.
            closing_length = ends[0]
            self._end = before_ids[:closing_length]
        elif self._ends_every_message(before_reply, after_reply):
            # Harmony ends the last turn with another token (<|return|>) than every message of the
            # history (<|end|>).
            closing_length = 1
            self._end = sorted(self.end_of_turn_ids & {tokenizer.eos_token_id})
        else:
            # The template ends a turn with none of the end-of-turn tokens.
            closing_length = 0
            self._end = []
        self._closing = before_ids[:closing_length]
        self._before_reply = before_ids[closing_length:]

    def check_system(self, instead: str) -> None:
        """Raise an error if the chat template does not support system messages.

        Args:
            instead (`str`): Advice for the error message.

        Raises:
            `ValueError`: The template refuses system messages, or drops them silently.
        """
        # Render a system message, and look for its text in the prompt.
        messages: list[Message] = [
            {"role": "system", "content": _SYSTEM_PLACEHOLDER},
            {"role": "user", "content": _USER_PLACEHOLDER},
        ]
        problem = ""
        try:
            if _SYSTEM_PLACEHOLDER not in self._render(messages):
                problem = "it leaves them out"
        except Exception as error:  # a template raises errors of its own
            problem = str(error)
        if problem:
            raise ValueError(
                f"the model's chat template does not support system messages ({problem}): {instead}"
            )

    def check_tools(self) -> None:
        """Raise an error if prompts do not show the `tools` of `chat_template_kwargs`.

        Raises:
            `ValueError`: The chat template never shows tools, or writes calls in a form that the
                grammar does not read.
        """
        if not self.chat_template_kwargs.get("tools"):
            return

        # Probe the template with a conversation that calls a tool.
        def render(messages: Sequence[Any], tools: Sequence[Any]) -> str:
            template_kwargs = {**self.chat_template_kwargs, "tools": list(tools)}
            return self._text.render(messages, **template_kwargs)

        problem = find_tool_problem(render, getattr(self.grammar, "read_calls", None))
        if problem:
            raise ValueError(
                f"{problem}: use another model, set tokenizer.chat_template, or, if your own "
                "prompts show the tools and how to call them, set "
                "chat_template_kwargs={'tools': None}"
            )

    def prompt(self, messages: Sequence[Message]) -> list[Any]:
        """Return the prompt of a row as TRL and reward functions get it: the messages."""
        return [dict(message) for message in messages]

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokenise a conversation, up to where the agent's first turn begins.

        A string is one user message. The messages are text from outside: no special token comes out
        of them, and ordinary added tokens (`<think>` of some tokenizers) come only out of
        `trusted_texts`. The chat template's own tokens stay.
        """
        messages: Sequence[Message]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._text.conversation_ids(messages, **self.chat_template_kwargs)

    def _render(self, messages: list[Message], generation_prompt: bool = True) -> str:
        return self._text.render(messages, generation_prompt, **self.chat_template_kwargs)

    def _ends_every_message(self, before_reply: str, after_reply: str) -> bool:
        """Return whether the same added token ends the agent's and the user's message."""
        # The first token after each of the two messages.
        agent_end = self._text.encode(before_reply)[:1]
        user_end = self._text.encode(after_reply)[:1]
        added = set(self.tokenizer.get_added_vocab().values())
        return agent_end == user_end and not added.isdisjoint(agent_end)


def _compile_occurrences(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches in front of each of the texts; its group holds the text.

    A lookahead finds all overlapping occurrences, the longest first. Case is ignored, because an
    added token may be matched after normalisation; a needless cut does no harm.
    """
    # A text of one character cannot be cut in two.
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    # `(?!)` matches nowhere, for a tokenizer without added tokens.
    alternatives = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(f"(?=({alternatives}))", re.I)
