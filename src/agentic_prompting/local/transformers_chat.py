"""A transformers model in this process as a greedy [`ChatModel`], with lossless drafting.

Conversations of one `session` follow each other: the output of one is the draft of the next (`drafting.py`). If only
`max_tokens` has grown, decoding resumes from the cached keys and values. The replies are those of plain greedy
decoding. Many conversations are decoded together, and none waits for the longest ([`TransformersEngine`]).
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..llm import BadRequest, Closed, LLMError, Message, Reply, ServerFailed, Usage, with_system
from ..llm.spans import traced_chat
from ..rollout import PlainText, Sample, SampleRequest
from .sampling import Sampling, context_length, end_of_turn_tokens
from .slab import can_slab
from .transformers_engine import local_policy

# With more conversations at once, no drafts are read on a CPU. There the time of a pass grows with its tokens: in a
# batch that keeps the processor busy, reading a draft takes as long as sampling it.
_DRAFTING_ON_CPU = 8
_SESSIONS = 4096  # kept at most; the oldest is dropped first
_IGNORED = {
    "temperature",
    "seed",
    "top_p",
    "top_k",
    "min_p",
}  # they do not change the likeliest token


@dataclass(frozen=True)
class _Session:
    """The last conversation of a session, and a count of drafts that saved too little.

    A draft that gives less than a tenth of the output takes more time than it saves: the model has to read it, and
    rows of unequal speed make batches smaller. After f such drafts in a row, the next 2^(f-1) - 1 replies use none.
    """

    number: int | None
    context: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    failed: int = 0
    wait: int = 0

    def followed_by(
        self, context: list[int], ids: list[int], finished: bool, drafted: int | None
    ) -> _Session:
        """The session after one more reply, with `drafted` tokens from its draft; `None` if it had no draft."""
        if drafted is None:
            return _Session(self.number, context, ids, finished, self.failed, max(self.wait - 1, 0))
        failed = self.failed + 1 if 10 * drafted < len(ids) else 0
        return _Session(
            self.number, context, ids, finished, failed, 2 ** (failed - 1) - 1 if failed else 0
        )


class TransformersChat:
    """A local model as a [`ChatModel`] with greedy decoding. Calls with a `temperature` other than 0 are refused.

    Args:
        model (`PreTrainedModel`): The model. Not to be trained meanwhile: it runs on a thread of its own,
            outside of any autocast of the caller.
        tokenizer (`PreTrainedTokenizerBase`): Needs a chat template.
        max_tokens (`int`, *optional*, defaults to `512`): The limit of a reply, for calls that set none.
        draft (`bool`, *optional*): Use earlier replies of a session as drafts. By default on for float32 models whose
            state is keys and values: their replies are the same with drafts as without. In lower precision a pass over
            several tokens and a pass over one may round a near-tie differently, as may two batch sizes; `True` accepts
            that. `False` decodes every reply from its beginning. On a CPU drafts are read while at most eight
            conversations are decoded at once; cached keys and values are used at any number.
        max_batch_size (`int`, *optional*, defaults to `64`): Conversations decoded at once.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for cached keys and values, in MB;
            0 caches none. See [`TransformersEngine`].
        system_prompt (`str`, *optional*): The system message of conversations that have none.
        chat_template_kwargs (`dict`, *optional*): Passed to the chat template.

    Attributes:
        passes (`int`): Decoding passes so far, each over a whole batch; 0 for recurrent models.
        row_passes (`int`): The sum over replies of the passes that each took part in.

    Raises:
        `ValueError`: If the tokenizer has no chat template, or `draft=True` and the model's state cannot be cut back.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_tokens: int = 512,
        draft: bool | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat template; "
                "use an instruct model, or set tokenizer.chat_template"
            )
        if draft and not can_slab(model):
            raise ValueError(
                "draft=True needs a model whose cache can be cut back; recurrent layers cannot"
            )
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        self.draft = can_slab(model) and model.dtype == torch.float32 if draft is None else draft
        self.system_prompt, self.chat_template_kwargs = system_prompt, chat_template_kwargs or {}
        self._text = PlainText(tokenizer, keep_ordinary=True)
        self.context_length = context_length(model)
        self.policy = local_policy(
            model,
            tokenizer,
            Sampling(temperature=0),
            end_of_turn_ids=end_of_turn_tokens(model, tokenizer),
            max_batch_size=max_batch_size,
            prefix_cache_mb=prefix_cache_mb,
        )
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._numbers = itertools.count()
        self._talking = 0
        self._closed = False

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
        """See [`ChatModel`]. `max_tokens` is exact; `finish_reason` is `"length"` where it cut the reply off."""
        started = time.perf_counter()
        self._talking += 1
        try:
            if self._closed:
                raise Closed("the model is closed", self._where)
            context, limit = self._read(messages, sampling)
            ids, finished = await self._written(context, limit, session)
        except LLMError as error:
            return Reply(error=error)
        except (
            Exception
        ) as error:  # out of memory, for example: these conversations fail, later ones may succeed
            what = f"the local model raised {type(error).__name__}: {error}"
            return Reply(error=ServerFailed(what[:300], self._where))
        finally:
            self._talking -= 1
        return Reply(
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if finished else "length",
            usage=Usage(len(context), len(ids)),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """End the calls in flight at the next token, and all later calls, with the error [`Closed`]."""
        self._closed = True
        self.policy.close(Closed("the model was closed", self._where))

    def __enter__(self) -> TransformersChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return getattr(self.model.config, "name_or_path", "") or type(self.model).__name__

    async def _written(
        self, context: list[int], limit: int, session: str | None
    ) -> tuple[list[int], bool]:
        """The reply's tokens, and whether the model ended it. Tokens that the session has are not sampled again."""
        if session is None or not self.draft:
            sample = await self._sampled(context, limit)
            return sample.ids, sample.finished
        last = self._sessions.get(session) or _Session(next(self._numbers))
        known = last.ids if last.context == context else []
        if known and (last.finished or len(known) >= limit):
            return known[:limit], last.finished and len(known) <= limit
        crowded = self.model.device.type == "cpu" and self._talking > _DRAFTING_ON_CPU
        draft = [] if known or crowded or last.wait else last.ids
        sample = await self._sampled([*context, *known], limit - len(known), last.number, draft)
        ids = known + sample.ids
        now = self._sessions.pop(
            session, last
        )  # another call of the session may have ended meanwhile
        if now.context != context or len(now.ids) <= len(ids):
            now = now.followed_by(context, ids, sample.finished, sample.drafted if draft else None)
        self._sessions[session] = now
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return ids, sample.finished

    async def _sampled(
        self, context: list[int], limit: int, number: int | None = None, draft: Sequence[int] = ()
    ) -> Sample:
        return await self.policy(SampleRequest(context, limit, 0, number, draft=draft))

    def _read(self, messages: Sequence[Message], sampling: dict[str, Any]) -> tuple[list[int], int]:
        """The conversation's tokens, and the limit of the reply."""
        limit = sampling.pop("max_tokens", None) or self.max_tokens
        if sampling.get("temperature"):
            raise BadRequest(
                f"greedy only: temperature must be 0, not {sampling['temperature']}", self._where
            )
        unknown = set(sampling) - _IGNORED
        if unknown:
            raise BadRequest(
                f"not supported by a local model: {', '.join(sorted(unknown))}", self._where
            )
        if limit < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {limit}", self._where)
        try:
            conversation = with_system(self.system_prompt, messages)
            context = self._text.conversation_ids(conversation, **self.chat_template_kwargs)
        except (
            Exception
        ) as error:  # templates raise errors of any kind, for example for an unknown role
            raise BadRequest(
                f"the chat template cannot render this conversation: {error}", self._where
            ) from None
        room = limit if self.context_length is None else self.context_length - len(context)
        if room < 1:
            raise BadRequest(
                f"the conversation has {len(context)} tokens, the model reads {self.context_length}",
                self._where,
            )
        return list(context), min(limit, room)
