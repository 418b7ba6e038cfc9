"""From prompts to token ids and back, without ever re-tokenising what was sampled.

[`ChatFormat`] is for conversations. To render a conversation again at each turn would not reproduce the tokens that the
model sampled: tokenisers merge across the seam, and templates rewrite history (Qwen3's drops earlier thoughts). So the
transcript is append-only: the prompt is rendered once, sampled ids are kept as they are, and between two turns come the
ids of everything the template puts there, around the observation. That text is found once, by rendering a conversation
of placeholders and cutting it at them. The code depends on no particular template.

[`TextFormat`] is for prompts that are text. A row whose `prompt` is a string is in TRL's standard format: the tokenizer
turns it into ids as it is, and no chat template is involved, so a base model without one trains too. Turns and
observations follow as text, joined by the grammar's frame and line breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..llm import Message
from .grammar import Grammar, TagGrammar, Turn
from .plain_text import PlainText
from .tool_templates import find_tool_problem
from .turn_reader import replace_surrogates

_THOUGHT_OPENING = "<think>"  # as chat templates of thinking models write it

# Words that no template rewrites: no spaces to trim, no tags to strip.
_USER, _AGENT, _REPLY, _SYSTEM = "QUSERQ", "QAGENTQ", "QREPLYQ", "QSYSTEMQ"


class TextFormat:
    """Tokenises text prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Not changed. It needs no chat template.
        grammar ([`Grammar`], *optional*): The form of turns. Defaults to Prompt-R1's tags.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults to the tokenizer's
            end-of-sequence token.
        own_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the agent ordinary added tokens
            such as `<think>`: [`AgentSpec.own_texts`]. In a conversation all other text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): Text in front of the agent's turn that is read as a part of it. Empty here.
        environments (`dict[str, TextFormat]`): In a run with several environments the format of each, by name; see
            [`TextFormat.of`].
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
        self.environments: dict[str, TextFormat] = {}
        self._text = PlainText(tokenizer, own_texts)
        opening, closing = self.grammar.frame
        self._before_reply, self._after_reply = (
            self._encode(f"\n{opening}"),
            self._encode(f"{closing}\n"),
        )
        # A turn that has a closing tag ends there. One that has none ends with the end-of-sequence token.
        self._end_of_sequence = list(end_of_turn_ids[:1])
        self._closing = [] if self.grammar.stops else self._end_of_sequence
        self._end = self._closing  # of a whole turn

    def check_system(self, instead: str) -> None:
        """Raise an error if the format has no place for a system message; any text has one.

        Args:
            instead (`str`): Advice for the error message.
        """

    def check_tools(self) -> None:
        """Raise an error if prompts do not show the tools that they should show; text has no template that could.

        Raises:
            `ValueError`: The chat template never shows tools, or writes calls in a form that the grammar does not read.
        """

    def of(self, row: Mapping[str, Any]) -> TextFormat:
        """The format of a row: that of its environment where a run has several."""
        return self.environments[row["environment"]] if self.environments else self

    def prompt(self, messages: Sequence[Message]) -> str | list[Any]:
        """The prompt of a row as TRL and reward functions get it: the messages' texts, a blank line between them."""
        return "\n\n".join(message["content"] for message in messages)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a prompt as TRL's tokenisation gives them, with the tokenizer's own first token where it has one.

        Messages are joined as in [`TextFormat.prompt`].
        """
        text = prompt if isinstance(prompt, str) else str(self.prompt(prompt))
        return list(self.tokenizer(replace_surrogates(text))["input_ids"])

    def turn_ids(self, text: str) -> list[int]:
        """The ids of a turn that was not sampled (a trace's), with the tokens that end a turn."""
        ends_at_stop = text.rstrip().endswith(tuple(self.grammar.stops))
        end = self._end if ends_at_stop else self._end or self._end_of_sequence
        return [*self._encode(text.removeprefix(self.turn_prefix)), *end]

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
        for one in self.environments.values():
            one.trust(text)

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read the sampled ids of one turn. Ending tokens are dropped, every other special token stays visible."""
        end = len(ids)
        while end and ids[end - 1] in self.end_of_turn_ids:
            end -= 1
        text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        return self.grammar.parse(self.turn_prefix + text)

    def _encode(self, text: str) -> list[int]:
        return self._text.encode(text)


class ChatFormat(TextFormat):
    """Renders prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template. Not changed.
        grammar ([`Grammar`], *optional*): The form of turns. Defaults to Prompt-R1's tags.
        chat_template_kwargs (`dict`, *optional*): Passed to the template, for example `{"enable_thinking": False}` for
            Qwen3: then the template itself writes an empty thought before each turn, and the agent's `<think>` is its
            own. With thinking on (the template's default) the agent opens the thought itself; the grammar is the same.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults to the tokenizer's
            end-of-sequence token.
        own_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the agent ordinary added tokens
            such as `<think>`: [`AgentSpec.own_texts`]. All other text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): The part of the agent's turn that the template has already written when sampling starts:
            `<think>` if it opens the thought for the agent (as Qwen3-Thinking's does), else empty.

    Raises:
        `ValueError`: If the tokenizer has no chat template, or one that cannot hold user, assistant and user again.
    """

    def __init__(
        self,
        tokenizer: Any,
        grammar: Grammar | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        end_of_turn_ids: Sequence[int] | None = None,
        own_texts: Iterable[str] = (),
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat template; use an "
                "instruct model, set tokenizer.chat_template, or give each row a `prompt` that is a string"
            )
        super().__init__(tokenizer, grammar, end_of_turn_ids, own_texts)
        self.chat_template_kwargs = chat_template_kwargs or {}
        before, self._after_reply, self.turn_prefix, ends_all = self._seams()
        # The ids that end the agent's turn, up to and including the end-of-turn token, and those after them.
        ends = [i + 1 for i, token in enumerate(before) if token in self.end_of_turn_ids][:1]
        # Harmony ends the last turn with another token (<|return|>) than every message of the history (<|end|>).
        has_own_end = ends_all and not ends
        ends = [1] if has_own_end else ends
        self._closing, self._before_reply = before[: sum(ends)], before[sum(ends) :]
        self._end = (
            sorted(self.end_of_turn_ids & {tokenizer.eos_token_id})
            if has_own_end
            else self._closing
        )

    def check_system(self, instead: str) -> None:
        """As [`TextFormat.check_system`].

        Raises:
            `ValueError`: The template refuses system messages, or drops them silently.
        """
        messages: list[Message] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
        ]
        try:
            why = "" if _SYSTEM in self._render(messages) else "it leaves them out"
        except Exception as error:  # a template raises errors of its own
            why = str(error)
        if why:
            raise ValueError(
                f"the model's chat template takes no system messages ({why}): {instead}"
            )

    def check_tools(self) -> None:
        """As [`TextFormat.check_tools`], for the `tools` of `chat_template_kwargs`."""
        if not self.chat_template_kwargs.get("tools"):
            return

        def render(messages: Sequence[Any], tools: Sequence[Any]) -> str:
            return self._text.render(
                messages, **{**self.chat_template_kwargs, "tools": list(tools)}
            )

        problem = find_tool_problem(render, getattr(self.grammar, "read_calls", None))
        if problem:
            raise ValueError(
                f"{problem}: use another model, set tokenizer.chat_template, or, if your own prompts show the tools "
                "and how to call them, set chat_template_kwargs={'tools': None}"
            )

    def prompt(self, messages: Sequence[Message]) -> list[Any]:
        """The prompt of a row as TRL and reward functions get it: the messages."""
        return [dict(message) for message in messages]

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the agent's first turn begins. A string is one user message.

        The messages are text from outside: no special token comes out of them, and no ordinary added token (`<think>`
        of some tokenizers) but in `own_texts`. The chat template's own tokens stay.
        """
        messages: Sequence[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        return self._text.conversation_ids(messages, **self.chat_template_kwargs)

    def _render(self, messages: list[Message], generation_prompt: bool = True) -> str:
        return self._text.render(messages, generation_prompt, **self.chat_template_kwargs)

    def _seams(self) -> tuple[list[int], list[int], str, bool]:
        """Ids before and after a reply; the part of the agent's turn that the template writes; and whether the first id
        before the reply is an added token that ends every message."""
        user: Message = {"role": "user", "content": _USER}
        agent: Message = {"role": "assistant", "content": _AGENT}
        reply: Message = {"role": "user", "content": _REPLY}
        try:
            rendered = self._render([user, agent, reply])
            _, rest = rendered.split(_AGENT)
            before, after = rest.split(_REPLY)
            generation_prompt = self._render([user]).removeprefix(
                self._render([user], generation_prompt=False)
            )
        except Exception as error:
            raise ValueError(
                "the chat template cannot render user, assistant, user in this order, each once and unchanged, "
                f"which a conversation of several turns needs: {error}"
            ) from error
        opening, closing = self.grammar.frame
        # Whether the template leaves a thought open: it then belongs to the agent's text when a turn is read. A grammar
        # without thoughts reads that of a thinking model.
        thought = self.grammar.thought_opening or _THOUGHT_OPENING
        opened = generation_prompt.rstrip().endswith(thought)
        first, other = self._encode(before)[:1], self._encode(after)[:1]
        ends_all = first == other and bool(
            set(first) & set(self.tokenizer.get_added_vocab().values())
        )
        return (
            self._encode(before + opening),
            self._encode(closing + after),
            thought if opened else "",
            ends_all,
        )
