"""The environment of Prompt-R1: a large LLM that answers the agent's requests (eq 1-2).

The large LLM sees the interaction history H_{t-1} (the agent's earlier requests and its own
replies) and the new request. It sees neither the agent's thoughts, nor the question's template, nor
the accepted answers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from ..llm import (
    Budget,
    ChatModel,
    LLMError,
    Message,
    OpenAIChat,
    Reply,
    RoutedChat,
    as_chat,
    charge,
    with_system,
    without_thoughts,
)
from ..rollout import PROMPT_R1_TEMPLATE, Environment, Observation, Rollout, rollout_seed
from .shared_replies import SharedReplies

Sharing = Literal["never", "group", "step"]
History = Literal["full", "last"] | int | Callable[[Sequence[Message]], Sequence[Message]]

# Appended to a reply that was cut, so that the agent can tell it from a short reply.
CUT_MARK = " [...]"


class LLMEnvironment(Environment):
    """A large LLM as the environment.

    Args:
        chat ([`ChatModel`] or `Callable`): The large LLM, or a function of the messages; see
            [`as_chat`].
        system_prompt (`str`, *optional*): The first message of every call.
        history (`str`, `int` or `Callable`, *optional*, defaults to `"full"`): How much of the
            earlier conversation the large LLM sees: `"full"` (the paper), `"last"` (only the new
            request), a number of earlier request-reply pairs, or a function that maps the earlier
            messages to those to send (a summary, for example; it must not block).
        max_reply_chars (`int`, *optional*, defaults to `2048`): Longer replies are cut to this many
            characters, including a mark at the end (the released code's value).
        share_replies (`str`, *optional*): Whether identical requests of a training step are sent,
            and paid, only once: `"never"`; `"group"`, among the rollouts of one question; `"step"`,
            among all rollouts of a step on the same process. Defaults to `"step"` for a large LLM
            at temperature 0, whose replies are the same each time, and to `"never"` for others,
            whose replies are samples. A failed reply is not shared: the next rollout sends its own
            request. Rollouts outside of a training batch (evaluation, `agent.answer`) share
            nothing.
        **sampling: `temperature`, `max_tokens`, ...: sent with every call.

    Raises:
        `TypeError`: `chat` is neither a chat model nor a function.
        `ValueError`: `history`, `max_reply_chars` or `share_replies` has an invalid value.
    """

    prompt_template = PROMPT_R1_TEMPLATE

    def __init__(
        self,
        chat: ChatModel,
        system_prompt: str | None = None,
        history: History = "full",
        max_reply_chars: int = 2048,
        share_replies: Sharing | None = None,
        **sampling: Any,
    ):
        # Refuse invalid options.
        is_number = isinstance(history, int) and history >= 0
        if not callable(history) and history not in ("full", "last") and not is_number:
            raise ValueError(
                f"history must be 'full', 'last', a number of turns or a function, got {history!r}"
            )
        if max_reply_chars <= len(CUT_MARK):
            raise ValueError(
                f"max_reply_chars must be more than {len(CUT_MARK)}, got {max_reply_chars}"
            )
        if share_replies not in (None, "never", "group", "step"):
            raise ValueError(
                f"share_replies must be 'never', 'group' or 'step', got {share_replies!r}"
            )
        # Raises for an unsuitable model now rather than in the first episode.
        as_chat(chat)

        self.chat = chat
        self.system_prompt = system_prompt
        self.history = history
        self.max_reply_chars = max_reply_chars
        self.sampling = sampling
        self.share_replies: Sharing = share_replies or _default_sharing(chat, sampling)
        # A call of such a model may wait long for its turn, and ends by its own limits.
        self.step_timeout = math.inf if _has_call_limits(chat) else None
        self._shared_replies = SharedReplies()

    async def step(self, rollout: Rollout) -> Observation:
        """Send the request of the rollout's last turn. An error is returned in the observation."""
        # One rollout is one session: a router keeps to the model it chose for it.
        messages = self.messages(rollout)
        session = str(rollout.seed)

        # The question chooses the model of the session, ρ(m | q).
        model_name = None
        if isinstance(self.chat, RoutedChat):
            try:
                model_name = self.chat.choose(messages, session, rollout.row.get("question"))
            except LLMError as error:
                return Observation(error=error.with_traceback(None))

        def ask(repeat: int) -> Awaitable[Reply]:
            chat = as_chat(self.chat)
            return chat(messages, repeat=repeat, session=session, **self.sampling)

        sharing_key = self._sharing_key(rollout)
        if sharing_key is None:
            # The seed identifies the rollout: a replayed run finds its replies again, and N
            # rollouts of one question with the same request get N different replies.
            reply = await ask(rollout.seed)
        else:
            conversation = [(message["role"], message["content"]) for message in messages]
            request = (sharing_key, model_name, *conversation)
            reply = await self._shared_replies.ask(
                rollout.batch, request, lambda: ask(rollout_seed(*sharing_key))
            )

        # Some servers leave the thoughts in the text; the agent gets what follows them.
        shown_reply = without_thoughts(reply)
        text = shown_reply.text
        # Cut long replies, and mark where.
        if len(text) > self.max_reply_chars:
            text = text[: self.max_reply_chars - len(CUT_MARK)] + CUT_MARK
        return Observation(
            text=text, error=shown_reply.error, replies=(reply,), seconds=reply.seconds
        )

    def messages(self, rollout: Rollout) -> list[Message]:
        """Return the messages to send for the rollout's last turn."""
        # The agent plays the user, the large LLM the assistant.
        earlier: list[Message] = []
        for turn, observation in zip(rollout.turns, rollout.observations, strict=False):
            earlier.append({"role": "user", "content": turn.request or ""})
            earlier.append({"role": "assistant", "content": observation.text})
        request: Message = {"role": "user", "content": rollout.turns[-1].request or ""}
        return with_system(self.system_prompt, [*self._select_history(earlier), request])

    def _select_history(self, earlier: list[Message]) -> Sequence[Message]:
        if callable(self.history):
            return self.history(earlier)
        if self.history == "full":
            return earlier
        turns = 0 if self.history == "last" else int(self.history)
        # A turn is a request and its reply.
        return earlier[max(0, len(earlier) - 2 * turns) :]

    def _sharing_key(self, rollout: Rollout) -> tuple[str] | tuple[str, int] | None:
        """Return what the rollouts that share replies with this one have in common, or `None`."""
        if self.share_replies == "never" or not rollout.batch:
            return None
        # All rollouts of the step share, or only those of the same group.
        if self.share_replies == "step":
            return (rollout.batch,)
        if rollout.group is None:
            return None
        return (rollout.batch, rollout.group)

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, if the model can be checked."""
        check = getattr(self.chat, "check", None)
        if check is not None:
            check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book the spending of the model, if it has a `charge_to`."""
        charge(budget, **{account: self.chat})


def _default_sharing(chat: ChatModel, sampling: Mapping[str, Any]) -> Sharing:
    # The sampling arguments of the environment override those of the model.
    model_sampling = getattr(chat, "sampling", None)
    if not isinstance(model_sampling, Mapping):
        model_sampling = {}
    temperature = {**model_sampling, **sampling}.get("temperature")
    return "step" if temperature == 0 else "never"


def _has_call_limits(chat: ChatModel) -> bool:
    """Whether no call of a model can take forever: the package's own clients have time limits."""
    # A router may choose any of its models.
    if isinstance(chat, RoutedChat):
        return all(_has_call_limits(model) for model in chat.models.values())
    return isinstance(chat, OpenAIChat)
