"""A transformers model in this process as a greedy [`ChatModel`], with lossless drafting.

Conversations join its batch as they come and leave it as they are done ([`Engine`]), so that many queries advance
together and none waits for the longest.

Conversations of one `session` follow each other: the output of the last one is the draft of the next (`greedy.py`), and
where only `max_tokens` has grown, decoding goes on from the kept cache. The replies are those of plain greedy decoding.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..llm import BadRequest, Closed, LLMError, Message, Reply, ServerFailed, Usage, with_system
from ..rollout import Engine, Job, SampleRequest
from .greedy import GreedyBatch, GreedyRow, can_draft
from .sampling import Sampling, context_length, end_of_turn_tokens
from .transformers_sampler import TransformersSampler

# Conversations at once up to which drafts are read on a CPU. There a pass takes time by its tokens: in a batch that
# keeps the processor busy, reading a draft costs what writing it costs.
_DRAFTING_ON_CPU = 8
_IGNORED = {"temperature", "seed", "top_p", "top_k", "min_p"}  # without effect on the likeliest token


@dataclass(frozen=True)
class _Ask:
    """One conversation as the engine is asked for it."""

    row: GreedyRow
    session: str | None


@dataclass(frozen=True)
class _Session:
    """What is known of a session: its latest row, and whether drafts are worth their while in it.

    A draft that gives less than a tenth of the output costs more than it saves: it has to be read, and rows that go at
    different paces leave a batch. After f of these in a row the next 2^(f-1) - 1 replies do without.
    """

    row: GreedyRow
    failed: int = 0
    wait: int = 0

    def followed_by(self, row: GreedyRow) -> _Session:
        """The session after one more reply."""
        if not row.draft:
            return _Session(row, self.failed, max(self.wait - 1, 0))
        failed = self.failed + 1 if 10 * row.drafted < len(row.ids) else 0
        return _Session(row, failed, 2 ** (failed - 1) - 1 if failed else 0)


class TransformersChat:
    """A local model as a [`ChatModel`]; greedy, whatever `temperature` a call asks for is refused unless it is 0.

    Args:
        model (`PreTrainedModel`):
            The model. Not shared with a trainer: it runs on a thread of its own.
        tokenizer (`PreTrainedTokenizerBase`):
            Needs a chat template.
        max_tokens (`int`, *optional*, defaults to `512`):
            Of a reply, where the call does not say.
        draft (`bool`, *optional*):
            Use earlier replies of a session as drafts. By default where the result is provably the same: models with
            ordinary attention, in float32. In lower precision a pass over several tokens and a pass over one may round
            a near-tie differently, as may two batch sizes without any drafting; `True` accepts that. `False` decodes
            every reply from its beginning. On a CPU drafts are read while at most eight conversations are decoded at
            once; what is kept of an unchanged prompt is used at any number.
        look_up (`bool`, *optional*, defaults to `True`):
            Use a draft beyond its first disagreement.
        max_batch_size (`int`, *optional*, defaults to `64`):
            Conversations decoded at once.
        keep_caches (`int`, *optional*, defaults to `64`):
            Sessions whose keys and values are kept to go on from. 0 keeps none.
        system_prompt (`str`, *optional*):
            Put in front of conversations that have none.
        chat_template_kwargs (`dict`, *optional*):
            Passed to the chat template.

    Attributes:
        passes (`int`): Forward passes so far, each of a whole batch.
        row_passes (`int`): The same counted for each reply alone: what its passes would have been in a batch of one.

    Raises:
        `ValueError`: If the tokenizer has no chat template, or `draft=True` and the model's state cannot be cut back.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_tokens: int = 512,
        draft: bool | None = None,
        look_up: bool = True,
        max_batch_size: int = 64,
        keep_caches: int = 64,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat template; "
                "use an instruct model, or set tokenizer.chat_template"
            )
        self._cuttable = can_draft(model)
        if draft and not self._cuttable:
            raise ValueError("draft=True needs a model whose cache can be cut back; recurrent layers cannot")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_tokens, self.max_batch_size, self.keep_caches = max_tokens, max_batch_size, keep_caches
        self.draft = self._cuttable and model.dtype == torch.float32 if draft is None else draft
        self.system_prompt, self.chat_template_kwargs = system_prompt, chat_template_kwargs or {}
        self.end_ids = end_of_turn_tokens(model, tokenizer)
        self.context_length = context_length(model)
        self._engine = _GreedyEngine(self, look_up)
        self._closed = False

    @property
    def passes(self) -> int:
        return self._engine.passes

    @property
    def row_passes(self) -> int:
        return self._engine.row_passes

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """See [`ChatModel`]. `max_tokens` is exact; `finish_reason` is `"length"` where it cut the reply off."""
        started = time.perf_counter()
        try:
            if self._closed:
                raise Closed("the model is closed", self._where)
            row = await self._engine(_Ask(self._row(messages, sampling), session))
        except LLMError as error:
            return Reply(error=error)
        except Exception as error:  # out of memory, say: these conversations fail, the next ones may not
            what = f"the local model raised {type(error).__name__}: {error}"
            return Reply(error=ServerFailed(what[:300], self._where))
        return Reply(
            text=self.tokenizer.decode(row.ids, skip_special_tokens=True),
            finish_reason="stop" if row.finished else "length",
            usage=Usage(len(row.context), len(row.ids)),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Later calls get [`Closed`], and so do those on their way, at the next token."""
        self._closed = True
        self._engine.close(Closed("the model was closed", self._where))

    def __enter__(self) -> TransformersChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return getattr(self.model.config, "name_or_path", "") or type(self.model).__name__

    def _row(self, messages: Sequence[Message], sampling: dict[str, Any]) -> GreedyRow:
        limit = sampling.pop("max_tokens", None) or self.max_tokens
        if sampling.get("temperature"):
            raise BadRequest(f"greedy only: temperature must be 0, not {sampling['temperature']}", self._where)
        unknown = set(sampling) - _IGNORED
        if unknown:
            raise BadRequest(f"not supported by a local model: {', '.join(sorted(unknown))}", self._where)
        if limit < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {limit}", self._where)
        try:
            context = self.tokenizer.apply_chat_template(
                with_system(self.system_prompt, messages),
                add_generation_prompt=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )["input_ids"]
        except Exception as error:  # templates raise what they like, for a role they do not know, say
            raise BadRequest(f"the chat template cannot render this conversation: {error}", self._where) from None
        room = limit if self.context_length is None else self.context_length - len(context)
        if room < 1:
            raise BadRequest(
                f"the conversation has {len(context)} tokens, the model reads {self.context_length}", self._where
            )
        return GreedyRow(list(context), min(limit, room))


class _GreedyEngine(Engine[_Ask, GreedyRow]):
    """Decodes for a [`TransformersChat`], and remembers sessions."""

    def __init__(self, chat: TransformersChat, look_up: bool):
        super().__init__()
        self.chat, self.look_up = chat, look_up
        self.batch = GreedyBatch(chat.model, chat.end_ids, look_up)
        self.jobs: dict[int, Job[_Ask, GreedyRow]] = {}  # at work, by id(row)
        self.sessions: OrderedDict[str, _Session] = OrderedDict()
        self.earlier_passes = self.row_passes = 0
        self.closed: Closed | None = None

    @property
    def passes(self) -> int:
        return self.batch.passes + self.earlier_passes

    @property
    def at_work(self) -> int:
        return len(self.jobs)

    def close(self, reason: Closed) -> None:
        self.closed = reason

    def drop(self) -> list[Job[_Ask, GreedyRow]]:
        dropped, self.jobs = list(self.jobs.values()), {}
        self.earlier_passes += self.batch.passes
        self.batch = GreedyBatch(self.chat.model, self.chat.end_ids, self.look_up)
        return dropped

    def joins(self, waiting: list[Job[_Ask, GreedyRow]]) -> list[Job[_Ask, GreedyRow]]:
        return waiting[: self.chat.max_batch_size - len(self.jobs)]

    def step(self, arrived: list[Job[_Ask, GreedyRow]]) -> None:
        """Let new rows join, then one pass for everybody."""
        if self.closed is not None:
            raise self.closed
        self.jobs.update({id(job.asked.row): job for job in arrived})
        done = self._advance([job.asked for job in arrived])
        for row in done:
            self.row_passes += row.passes
            self._remember(self.jobs[id(row)].asked)
        self.finish((self.jobs.pop(id(row)), row) for row in done)

    def _advance(self, arrived: list[_Ask]) -> list[GreedyRow]:
        chat, rows = self.chat, [asked.row for asked in arrived]
        if not chat._cuttable:
            return self._decode_plainly(rows)
        crowded = chat.model.device.type == "cpu" and len(self.jobs) > _DRAFTING_ON_CPU
        for asked in arrived:
            self._look_back(asked, read_draft=not crowded)
        done = [row for row in rows if row.done]
        reading = [row for row in rows if not row.done and row.cache is None]
        for row in rows:
            if not row.done and row.cache is not None:
                self.batch.resume(row)
        if reading:
            done += self.batch.add(reading)
        if self.batch.rows:
            done += self.batch.step()
        return done

    def _look_back(self, asked: _Ask, read_draft: bool) -> None:
        """Give a row what its session already has: the output itself under the same context, else a draft."""
        if not self.chat.draft or asked.session is None:
            return
        row, session = asked.row, self.sessions.get(asked.session)
        row.keep_cache = self.chat.keep_caches > 0
        if session is None:
            return
        last = session.row
        enough = last.finished or len(last.ids) >= row.limit
        if last.context == row.context and (enough or last.cache is not None):
            row.ids, row.cache = last.ids[: row.limit], last.cache
            row.finished = last.finished and len(last.ids) <= row.limit
        elif read_draft and session.wait == 0:
            row.draft = last.ids

    def _remember(self, asked: _Ask) -> None:
        if not self.chat.draft or asked.session is None:
            return
        row, sessions, keep = asked.row, self.sessions, self.chat.keep_caches
        previous = sessions.pop(asked.session, None)
        if previous is not None and previous.row.context == row.context and len(previous.row.ids) > len(row.ids):
            sessions[asked.session] = previous  # the same conversation, asked for less of it
        else:
            sessions[asked.session] = _Session(row) if previous is None else previous.followed_by(row)
        with_cache = [name for name, session in sessions.items() if session.row.cache is not None]
        for name in with_cache[: max(len(with_cache) - keep, 0)]:
            sessions[name].row.cache = None
        while len(sessions) > 16 * max(keep, 64):  # outputs are small, but not for ever
            sessions.popitem(last=False)

    def _decode_plainly(self, rows: list[GreedyRow]) -> list[GreedyRow]:
        if not rows:
            return []
        chat = self.chat
        sampler = TransformersSampler(chat.model, chat.tokenizer, Sampling(temperature=0), end_of_turn_ids=chat.end_ids)
        samples = sampler([SampleRequest(row.context, row.limit, seed=0) for row in rows])
        for row, sample in zip(rows, samples, strict=True):
            row.ids, row.finished, row.passes = sample.ids, sample.finished, len(sample.ids)
        self.earlier_passes += max(len(row.ids) for row in rows)
        return rows
