"""A transformers model in this process as a greedy [`ChatModel`], with lossless drafting.

Conversations of one `session` follow each other: the output of one is the draft of the next
(`drafting.py`). If only `max_tokens` has grown, decoding resumes from the cached keys and values.
The replies are those of plain greedy decoding. Many conversations are decoded together, and none
waits for the longest ([`TransformersEngine`]).
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..llm import BadRequest, Closed, LLMError, Message, Reply, ServerFailed, Usage, with_system
from ..llm.spans import traced_chat
from ..rollout import PlainText, SampleRequest
from .sampling import Sampling, context_length, end_of_turn_tokens
from .slab import can_slab
from .transformers_engine import local_policy

# With more conversations at once, no drafts are read on a CPU. There the time of a pass grows with
# its tokens: in a batch that keeps the processor busy, reading a draft takes as long as sampling
# it.
_MAX_DRAFTING_CALLS_ON_CPU = 8
_MAX_SESSIONS = 4096  # the oldest is dropped first
# Parameters that do not change the likeliest token.
_IGNORED_PARAMETERS = {"temperature", "seed", "top_p", "top_k", "min_p"}


@dataclass(frozen=True)
class _DraftSession:
    """The last conversation of a session, and a count of drafts that saved too little.

    A draft that yields less than a tenth of the output takes more time than it saves: the model has
    to read it, and rows of unequal speed make batches smaller. After f such drafts in a row, the
    next 2^(f-1) - 1 replies use none.

    Args:
        number (`int`): Identifies the conversation in the engine's cache.
        context (`list[int]`, *optional*): The tokens of the last conversation.
        ids (`list[int]`, *optional*): The tokens of its reply.
        finished (`bool`, *optional*, defaults to `False`): Whether the model ended the reply.
        failed_drafts (`int`, *optional*, defaults to `0`): Drafts in a row that saved too little.
        replies_to_skip (`int`, *optional*, defaults to `0`): How many of the next replies use no
            draft.
    """

    number: int
    context: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    failed_drafts: int = 0
    replies_to_skip: int = 0

    def after_reply(
        self, context: list[int], ids: list[int], finished: bool, drafted: int | None
    ) -> _DraftSession:
        """Return the session after one more reply.

        Args:
            context (`list[int]`): The tokens of the conversation.
            ids (`list[int]`): The tokens of the reply.
            finished (`bool`): Whether the model ended the reply.
            drafted (`int`, *optional*): How many tokens came from its draft; `None` if it had no
                draft.
        """
        failed_drafts = self.failed_drafts
        replies_to_skip = 0
        if drafted is None:
            replies_to_skip = max(self.replies_to_skip - 1, 0)
        elif 10 * drafted < len(ids):
            failed_drafts += 1
            replies_to_skip = 2 ** (failed_drafts - 1) - 1
        else:
            failed_drafts = 0
        return _DraftSession(self.number, context, ids, finished, failed_drafts, replies_to_skip)


class TransformersChat:
    """A local model as a [`ChatModel`] with greedy decoding.

    Calls with a `temperature` other than 0 are refused.

    Args:
        model (`PreTrainedModel`): The model. It must not be trained meanwhile: it runs on a thread
            of its own, outside of any autocast of the caller.
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template.
        max_tokens (`int`, *optional*, defaults to `512`): The limit of a reply, for calls that set
            none.
        draft (`bool`, *optional*): Use earlier replies of a session as drafts. By default on for
            float32 models whose state is keys and values: their replies are the same with drafts as
            without. In lower precision a pass over several tokens and a pass over one may round a
            near-tie differently, as may two batch sizes; `True` accepts that. `False` decodes every
            reply from its beginning. On a CPU drafts are read while at most eight conversations are
            decoded at once; cached keys and values are used at any number.
        max_batch_size (`int`, *optional*, defaults to `64`): Conversations decoded at once.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for cached keys and
            values, in MB; 0 caches none. See [`TransformersEngine`].
        system_prompt (`str`, *optional*): The system message of conversations that have none.
        chat_template_kwargs (`dict`, *optional*): Passed to the chat template.

    Attributes:
        passes (`int`): Decoding passes so far, each over a whole batch; 0 for recurrent models.
        row_passes (`int`): The sum over replies of the passes that each took part in.

    Raises:
        `ValueError`: The tokenizer has no chat template, or `draft=True` and the model's state
            cannot be cut back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 512,
        draft: bool | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat "
                "template; use an instruct model, or set tokenizer.chat_template"
            )
        if draft and not can_slab(model):
            raise ValueError(
                "draft=True needs a model whose cache can be cut back; recurrent layers cannot"
            )
        # By default drafts are on if they cannot change a reply.
        if draft is None:
            draft = can_slab(model) and model.dtype == torch.float32
        self.draft = draft

        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.system_prompt = system_prompt
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.context_length = context_length(model)
        self.policy = local_policy(
            model,
            tokenizer,
            Sampling(temperature=0),
            end_of_turn_ids=end_of_turn_tokens(model, tokenizer),
            max_batch_size=max_batch_size,
            prefix_cache_mb=prefix_cache_mb,
        )

        # The state of sessions and calls.
        self._plain_text = PlainText(tokenizer, keep_ordinary=True)
        self._sessions: OrderedDict[str, _DraftSession] = OrderedDict()
        self._session_numbers = itertools.count()
        self._calls_in_flight = 0
        self._closed = False

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> TransformersChat:
        """Load a model in float32, in which drafting is lossless, onto the GPU if there is one.

        Args:
            model (`str` or `Path`): A folder or a name on the Hub.
            options (`Any`): Arguments of [`TransformersChat`] after the tokenizer.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        return cls(loaded, AutoTokenizer.from_pretrained(model), **options)

    @property
    def passes(self) -> int:
        return getattr(self.policy, "stats", {}).get("steps", 0)

    @property
    def row_passes(self) -> int:
        return getattr(self.policy, "stats", {}).get("row_steps", 0)

    @traced_chat
    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`].

        `max_tokens` is exact; `finish_reason` is `"length"` if it cut the reply off.
        """
        start = time.perf_counter()
        self._calls_in_flight += 1
        try:
            if self._closed:
                raise Closed("the model is closed", self._where)
            limit = self._read_limit(sampling)
            context = self._encode(messages)
            if self.context_length is not None:
                limit = min(limit, self.context_length - len(context))
            ids, finished = await self._complete(context, limit, session)
        except LLMError as error:
            return Reply(error=error)
        except Exception as error:
            # Out of memory, for example: these conversations fail, later ones may succeed.
            message = f"the local model raised {type(error).__name__}: {error}"
            return Reply(error=ServerFailed(message[:300], self._where))
        finally:
            self._calls_in_flight -= 1
        return Reply(
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if finished else "length",
            usage=Usage(len(context), len(ids)),
            seconds=time.perf_counter() - start,
        )

    def close(self) -> None:
        """End all calls with the error [`Closed`], those in flight at the next token."""
        self._closed = True
        self.policy.close(Closed("the model was closed", self._where))

    def __enter__(self) -> TransformersChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return getattr(self.model.config, "name_or_path", "") or type(self.model).__name__

    async def _complete(
        self, context: list[int], limit: int, session_name: str | None
    ) -> tuple[list[int], bool]:
        """Return the reply's tokens, and whether the model ended it.

        Tokens that the session already has are not sampled again.
        """
        if session_name is None or not self.draft:
            sample = await self.policy(SampleRequest(context, limit, 0, None, draft=()))
            return sample.ids, sample.finished
        session = self._sessions.get(session_name)
        if session is None:
            session = _DraftSession(next(self._session_numbers))

        # The same conversation again: the reply is known, at least its beginning.
        reply_start = session.ids if session.context == context else []
        if reply_start and (session.finished or len(reply_start) >= limit):
            return reply_start[:limit], session.finished and len(reply_start) <= limit

        # Another conversation: its draft is the last reply.
        is_crowded = (
            self.model.device.type == "cpu" and self._calls_in_flight > _MAX_DRAFTING_CALLS_ON_CPU
        )
        draft: Sequence[int] = ()
        if not reply_start and not is_crowded and not session.replies_to_skip:
            draft = session.ids
        sample = await self.policy(
            SampleRequest(
                [*context, *reply_start], limit - len(reply_start), 0, session.number, draft=draft
            )
        )
        ids = reply_start + sample.ids

        # Another call of the session may have ended meanwhile.
        session = self._sessions.pop(session_name, session)
        if session.context != context or len(session.ids) <= len(ids):
            drafted = sample.drafted if draft else None
            session = session.after_reply(context, ids, sample.finished, drafted)
        self._sessions[session_name] = session
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return ids, sample.finished

    def _read_limit(self, sampling: dict[str, Any]) -> int:
        """Return the `max_tokens` of a call, and refuse unsupported parameters."""
        parameters = dict(sampling)
        limit = parameters.pop("max_tokens", None) or self.max_tokens
        if parameters.get("temperature"):
            raise BadRequest(
                f"greedy only: temperature must be 0, not {parameters['temperature']}", self._where
            )
        # Refuse a parameter that would change the reply rather than ignore it.
        unsupported = set(parameters) - _IGNORED_PARAMETERS
        if unsupported:
            raise BadRequest(
                f"not supported by a local model: {', '.join(sorted(unsupported))}", self._where
            )
        if limit < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {limit}", self._where)
        return limit

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, at least one less than the model can read."""
        try:
            conversation = with_system(self.system_prompt, messages)
            context = self._plain_text.conversation_ids(conversation, **self.chat_template_kwargs)
        except (
            Exception
        ) as error:  # templates raise errors of any class, for example for an unknown role
            raise BadRequest(
                f"the chat template cannot render this conversation: {error}", self._where
            ) from None
        if self.context_length is not None and len(context) >= self.context_length:
            raise BadRequest(
                f"the conversation has {len(context)} tokens, the model reads "
                f"{self.context_length}",
                self._where,
            )
        return list(context)
