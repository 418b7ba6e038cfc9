"""From chat template to token ids, without ever re-tokenising what was sampled.

A conversation that is rendered anew each turn does not reproduce the tokens the model sampled: tokenisers merge across
the seam, and templates rewrite history (Qwen3's drops earlier thoughts). So the transcript is append-only: the prompt
is rendered once, sampled ids are kept as they are, and between two turns come the ids of everything the template puts
there, around the observation. What the template puts there is found out once, by rendering a conversation of
placeholders and cutting it at them. Nothing is known of any particular template.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..llm import Message
from .grammar import Grammar
from .text_format import TextFormat

# Words that no template rewrites: no spaces to trim, no tags to strip.
_USER, _AGENT, _REPLY = "QUSERQ", "QAGENTQ", "QREPLYQ"


class ChatFormat(TextFormat):
    """Renders prompts and observations for one tokenizer, and reads turns back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template. Not changed.
        grammar ([`Grammar`], *optional*): What turns look like. Defaults to Prompt-R1's tags.
        chat_template_kwargs (`dict`, *optional*): Passed to the template, for example `{"enable_thinking": False}` for
            Qwen3: then the template itself writes an empty thought before each turn, and the agent's `<think>` is its
            own. With thinking on (the template's default) the agent opens the thought itself; the grammar is the same.
        end_of_turn_ids (`Sequence[int]`, *optional*): Tokens that end a turn when sampled. Defaults to the tokenizer's
            end-of-sequence token.
        own_texts (`Iterable[str]`, *optional*): Texts of the run itself, which may show the agent ordinary added tokens
            such as `<think>`: [`AgentSpec.own_texts`]. All other text of a prompt is plain.

    Attributes:
        turn_prefix (`str`): What the template has already written of the agent's turn when sampling starts: `<think>`
            where it opens the thought for the agent (as Qwen3-Thinking's does), else empty.

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
        before, self._after_reply, self.turn_prefix = self._seams()
        # What ends the agent's turn, up to and including the end-of-turn token, and what comes after that.
        ends = [i + 1 for i, token in enumerate(before) if token in self.end_of_turn_ids][:1]
        self._closing, self._before_reply = before[: sum(ends)], before[sum(ends) :]

    def prompt(self, messages: Sequence[Message]) -> list[Any]:
        """The prompt of a row as TRL and reward functions get it: the messages."""
        return [dict(message) for message in messages]

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the agent's first turn begins. A string is one user message.

        The messages are text from outside: no special token comes out of them, and no ordinary added token (`<think>`
        of some tokenizers) but in `own_texts`. The chat template's own tokens stay.
        """
        messages: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._text.conversation_ids(messages, **self.chat_template_kwargs)

    def _render(self, messages: list[Message], generation_prompt: bool = True) -> str:
        return self._text.render(messages, generation_prompt, **self.chat_template_kwargs)

    def _seams(self) -> tuple[list[int], list[int], str]:
        """Ids before and after a reply, and what the template writes of the agent's turn."""
        user: Message = {"role": "user", "content": _USER}
        agent: Message = {"role": "assistant", "content": _AGENT}
        reply: Message = {"role": "user", "content": _REPLY}
        try:
            rendered = self._render([user, agent, reply])
            _, rest = rendered.split(_AGENT)
            before, after = rest.split(_REPLY)
            generation_prompt = self._render([user]).removeprefix(self._render([user], generation_prompt=False))
        except Exception as error:
            raise ValueError(
                "the chat template cannot render user, assistant, user in this order, each once and unchanged, "
                f"which a conversation of several turns needs: {error}"
            ) from error
        opening, closing = self.grammar.frame
        # Whether the template leaves a thought open: it then belongs to the agent's text when a turn is read.
        thought = self.grammar.thought_opening
        opened = thought and generation_prompt.rstrip().endswith(thought)
        return self._encode(before + opening), self._encode(closing + after), thought if opened else ""
