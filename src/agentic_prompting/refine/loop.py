"""Algorithm 1 of the ProRefine paper (arXiv 2506.05305) for one query: [`refine`].

A failed call is recorded and leaves the prompt as it is; every query ends with a result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..llm import (
    BadReply,
    ChatModel,
    LLMError,
    Message,
    Reply,
    as_chat,
    fill,
    spans,
    strip_thoughts,
)
from ..llm.guard import Escaped, text_of
from ..rewards import read_verdict
from .templates import RolePrompts, Unit, first_units, read_improved_prompt
from .types import (
    Failure,
    Query,
    RefinementResult,
    RefinementStep,
    Role,
    RoleUsage,
    StopReason,
    Verdict,
    check_prompt,
    read_query,
)
from .verifiers import Verifier, call_verifier

# The paper decodes greedily; 2,048 tokens is the released code's limit for the other replies.
GREEDY: dict[str, dict[str, Any]] = {
    "task": {"temperature": 0},
    "feedback": {"temperature": 0, "max_tokens": 2048},
    "optimizer": {"temperature": 0, "max_tokens": 2048},
    "verifier": {"temperature": 0, "max_tokens": 2048},
}

History = Literal[True, False, "task", "all"]
# The roles that see their own earlier steps.
_ROLES_WITH_HISTORY: dict[History, tuple[Role, ...]] = {
    False: (),
    True: ("feedback", "optimizer"),
    "task": ("task",),
    "all": ("task", "feedback", "optimizer"),
}

# The answers of a query from worst to best: a better one replaces the one before it.
_CUT_OFF_ANSWER = 0
_INITIAL_ANSWER = 1
_COMPLETE_ANSWER = 2
_FINAL_ANSWER = 3


@dataclass(frozen=True, kw_only=True)
class RefineSettings:
    """The settings of a refinement.

    Args:
        tokens_per_step (`int`, *optional*, defaults to `10`): k (section "Experimental Setup").
        max_steps (`int`, *optional*, defaults to `25`): n (section "Experimental Setup").
        unit (`str`, *optional*, defaults to `"tokens"`):
            The unit of a step: `"tokens"` for k tokens, or one `"sentence"` or `"paragraph"`
            (section "Implementation Details"; `tokens_per_step` has no effect). With the latter two
            the task model writes up to `final_max_tokens` whenever the prompt has changed, and the
            critic sees the beginning.
        history (`bool` or `str`, *optional*, defaults to `False`): Which roles see their own
            earlier steps for the query. `True`: critic and optimizer; `"task"`: the task model, as
            in the released code; `"all"`: all three, the full chat history of the paper, which
            found no consistent gain in it. The final answer is always written without history.
        final_max_tokens (`int`, *optional*, defaults to `512`): The token limit of the final and
            the first answer.
        prompts ([`RolePrompts`], *optional*): The messages of the roles.
        max_failures (`int`, *optional*, defaults to `3`): The number of failed calls after which a
            query ends with its best answer so far and `error`. A fatal failure ends it at once.
        sampling (`dict[str, dict]`, *optional*): Sampling arguments by role (`task`, `feedback`,
            `optimizer`, `verifier`). They override the defaults: temperature 0, and 2,048 tokens
            for all but the task model; `None` removes a default. If the task model's temperature is
            not 0, no call is skipped.

    Raises:
        `ValueError`: A number is below 1, or a name is not known.
    """

    tokens_per_step: int = 10
    max_steps: int = 25
    unit: Unit = "tokens"
    history: History = False
    final_max_tokens: int = 512
    prompts: RolePrompts = RolePrompts()
    max_failures: int = 3
    sampling: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self):
        # `True` is an `int` as well, and no number of steps.
        for name in ("tokens_per_step", "max_steps", "final_max_tokens", "max_failures"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.history not in _ROLES_WITH_HISTORY:
            raise ValueError(
                f"history must be one of True, False, 'task', 'all', got {self.history!r}"
            )
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        # Sampling arguments are given by role; a misspelled role would have no effect.
        sampling = self.sampling or {}
        unknown_roles = sorted(set(sampling) - set(GREEDY))
        if unknown_roles:
            raise ValueError(
                f"sampling is given by role ({', '.join(GREEDY)}); unknown: "
                f"{', '.join(unknown_roles)}"
            )
        if "max_tokens" in sampling.get("task", {}):
            raise ValueError(
                "the task model's max_tokens follow from tokens_per_step and final_max_tokens"
            )

    def role_sampling(self, role: Role) -> dict[str, Any]:
        """Return the sampling arguments of a role.

        `None` removes a default, because some models refuse it.
        """
        # The user's arguments override the defaults of the role.
        sampling = self.sampling or {}
        merged = {**GREEDY[role], **sampling.get(role, {})}
        return {name: value for name, value in merged.items() if value is not None}


async def refine(
    query: Query | str | Mapping[str, Any],
    prompt: str,
    *,
    task: ChatModel,
    feedback: ChatModel,
    optimizer: ChatModel,
    verifier: Verifier | None = None,
    settings: RefineSettings = RefineSettings(),
) -> RefinementResult:
    """Algorithm 1: refine `prompt` for `query`, and answer.

    In step i the task model starts its answer again under the current prompt, with at most i·k
    tokens and greedy decoding. The critic reads question and output, the optimizer prompt and
    feedback. The loop ends when the task model reaches its end of sequence (`finish_reason` is not
    `length`) or after n steps. The answer is then written anew under the last prompt. A call whose
    reply is known is skipped: the same prompt with the same limit, or with a higher one if the
    output was complete.

    Args:
        query ([`Query`], `str` or `dict`): q, or a row with `question` and, for verifiers that need
            them, `answers`.
        prompt (`str`): p, the first system message of the task model.
        task ([`ChatModel`]): LLM_task.
        feedback ([`ChatModel`]): LLM_feedback.
        optimizer ([`ChatModel`]): LLM_optimizer.
        verifier ([`ChatModel`] or [`VerifierFunction`], *optional*): Judges the first answer.
        settings ([`RefineSettings`], *optional*): k, n, the messages of the roles, ...

    Returns:
        [`RefinementResult`]: The result, even if calls failed; see its `error`.

    Raises:
        `ValueError`: The prompt or the question is empty.
    """
    check_prompt(prompt)
    # One object holds the state of this query alone, so many can run at the same time.
    models: dict[Role, ChatModel] = {"task": task, "feedback": feedback, "optimizer": optimizer}
    refinement = _Refinement(
        query=read_query(query),
        prompt=prompt,
        models=models,
        verifier=verifier,
        settings=settings,
    )
    with spans.workflow("refinement") as span:
        result = await refinement.run()
        span.set(
            {
                f"{spans.OWN}.stop_reason": result.stop_reason,
                f"{spans.OWN}.steps": len(result.steps),
            }
        )
        if result.error is not None:
            span.fail(result.error.kind)
    return result


class _CallFailed(Exception):
    """A call failed; the failure is recorded in the result."""

    def __init__(self, role: Role):
        super().__init__(role)
        self.role = role


class _Refinement:
    """The refinement of one query: sends the messages of each role and records the replies.

    Args:
        query ([`Query`]): q.
        prompt (`str`): p.
        models (`dict[Role, ChatModel]`): The models of `task`, `feedback` and `optimizer`.
        verifier ([`Verifier`], *optional*): Judges the first answer.
        settings ([`RefineSettings`]): The settings.
    """

    def __init__(
        self,
        query: Query,
        prompt: str,
        models: Mapping[Role, ChatModel],
        verifier: Verifier | None,
        settings: RefineSettings,
    ):
        # A verifier that is a model is called like the other roles.
        self.query = query
        self.models = dict(models)
        self.verifier = verifier
        if isinstance(verifier, ChatModel):
            self.models["verifier"] = verifier
        self.settings = settings
        self.result = RefinementResult(
            id=query.id,
            query=query.text,
            answer="",
            initial_prompt=prompt,
            prompt=prompt,
            stop_reason="max_steps",
        )
        self.session = query.digest(prompt)[:32]
        # As in `Failure`: 0 before the loop, -1 for the final answer.
        self.step_number = 0
        # The task model's longest output for each prompt, with its token limit.
        self.outputs: dict[str, tuple[int, Reply]] = {}
        self.history: dict[Role, list[Message]] = {
            role: [] for role in _ROLES_WITH_HISTORY[settings.history]
        }
        self.answer_rank = -1

    async def run(self) -> RefinementResult:
        """Verify the first answer, refine the prompt step by step, and write the final answer."""
        start = time.perf_counter()
        result = self.result
        # If the first answer is right, nothing is refined.
        if self.verifier is not None:
            await self.verify_initial_answer()
        # The loop of Algorithm 1: answer in part, comment, rewrite.
        for number in range(1, self.settings.max_steps + 1):
            if self.find_stop_reason() is not None:
                break
            with self.record_step(number) as step:
                await self.write_output(step)
                await self.write_feedback(step)
                await self.rewrite_prompt(step)
        # A verified answer is final. Otherwise answer under the last prompt.
        result.stop_reason = self.find_stop_reason() or "max_steps"
        if result.stop_reason != "verified":
            await self.write_final_answer()
        result.seconds = time.perf_counter() - start
        return result

    def find_stop_reason(self) -> StopReason | None:
        """Return why no further step is made, or `None` if the loop goes on."""
        result = self.result
        if result.verdict == "right":
            return "verified"
        # A fatal failure would occur again in every step.
        failures = result.failures
        has_fatal_failure = bool(failures) and failures[-1].fatal
        if has_fatal_failure or len(failures) >= self.settings.max_failures:
            return "failed"
        if result.steps and result.steps[-1].complete:
            return "finished"
        return None

    @contextmanager
    def record_step(self, number: int) -> Iterator[RefinementStep]:
        """Record one pass of the loop. If a call in it fails, the prompt stays as it is."""
        start = time.perf_counter()
        result = self.result
        # Add the step first: a failed one is part of the result.
        step = RefinementStep(prompt=result.prompt, new_prompt=result.prompt)
        self.step_number = number
        result.steps = (*result.steps, step)
        try:
            with spans.workflow("refinement step", number=number):
                yield step
        except _CallFailed as failed:
            step.problem = f"{failed.role} failed"
        result.prompt = step.new_prompt
        step.seconds = time.perf_counter() - start

    @property
    def is_in_loop(self) -> bool:
        """Whether a step of the loop is being made, and not the first or the final answer."""
        return self.step_number > 0

    # ---- the roles ----

    async def verify_initial_answer(self) -> None:
        """Write an answer under the initial prompt, and have it judged."""
        result = self.result
        result.verdict = "none"
        with suppress(_CallFailed):
            reply = await self.call_task_model(result.prompt, self.settings.final_max_tokens)
            self.keep_answer(_INITIAL_ANSWER, reply.text, reply.finish_reason)
            result.initial_answer = reply.text
            result.verdict = await self.judge(reply.text)

    async def judge(self, answer: str) -> Verdict:
        """Return the verdict on an answer. If the verifier fails, there is none."""
        try:
            # A model reads the question and the answer; a function may also get the accepted ones.
            if isinstance(self.verifier, ChatModel):
                reply = await self.call_role(
                    "verifier", query=self.query.conversation, output=answer
                )
                is_right = read_verdict(reply)
            else:
                assert self.verifier is not None
                is_right = await call_verifier(self.verifier, self.query, answer)
        except _CallFailed:
            return "none"
        except Exception as error:  # the verifier is the user's code
            original = error.original if isinstance(error, Escaped) else error
            self.record_failure("verifier", type(original).__name__, text_of(original, 300))
            return "none"

        # A verifier may be undecided.
        if is_right is None:
            return "none"
        return "right" if is_right else "wrong"

    async def write_output(self, step: RefinementStep) -> None:
        """Write o_i, the task model's output of at most i·k tokens, or i sentences or paragraphs."""
        settings = self.settings
        # Sentences and paragraphs are cut out of a whole answer.
        max_tokens = settings.final_max_tokens
        if settings.unit == "tokens":
            max_tokens = self.step_number * settings.tokens_per_step
        # The output begins anew under the current prompt, and ends after i·k tokens or i units.
        reply = await self.call_task_model(step.prompt, max_tokens)
        output = first_units(reply.text, self.step_number, settings.unit)
        is_complete = _has_ended(reply) and len(output) == len(reply.text)

        # A complete output may become the answer if a later call fails.
        step.output = output
        step.complete = is_complete
        step.tokens = reply.usage.completion_tokens
        if is_complete:
            self.keep_answer(_COMPLETE_ANSWER, output, reply.finish_reason)
        else:
            self.keep_answer(_CUT_OFF_ANSWER, output, "")

    async def write_feedback(self, step: RefinementStep) -> None:
        """Write f_i, the critic's remarks on the output, without its thoughts."""
        prompts = self.settings.prompts
        # The critic must know whether the output is complete: a cut is not a fault.
        state = prompts.complete if step.complete else prompts.cut_off
        reply = await self.call_role(
            "feedback", query=self.query.conversation, output=step.output or "", state=state
        )
        # The optimizer gets the remarks, not what the critic thought before it made them.
        remarks = strip_thoughts(reply)
        if not remarks and reply.strip():
            message = "the reply ended inside of its thought"
            self.record_failure("feedback", BadReply.__name__, message)
            raise _CallFailed("feedback")
        step.feedback = remarks

    async def rewrite_prompt(self, step: RefinementStep) -> None:
        """Replace the prompt by p*, the optimizer's new one, if its reply has one."""
        # The optimizer reads the prompt and the feedback, neither the question nor the output.
        reply = await self.call_role("optimizer", prompt=step.prompt, feedback=step.feedback or "")
        improved_prompt, step.problem = read_improved_prompt(reply)
        # Blanks around a prompt do not count as a change.
        if improved_prompt is not None and improved_prompt != step.prompt.strip():
            step.new_prompt = improved_prompt

    async def write_final_answer(self) -> None:
        """Write the answer anew under the last prompt."""
        result = self.result
        self.step_number = -1
        # Without the task model there is no final answer.
        if result.stop_reason == "failed":
            result.error = result.failures[-1]
            if result.error.role == "task":
                return

        # Without history, and with the whole token limit.
        try:
            reply = await self.call_task_model(result.prompt, self.settings.final_max_tokens)
        except _CallFailed:
            result.stop_reason = "failed"
            result.error = result.failures[-1]
            return
        self.keep_answer(_FINAL_ANSWER, reply.text, reply.finish_reason)

    # ---- the calls ----

    async def call_task_model(self, prompt: str, max_tokens: int) -> Reply:
        """Return the task model's output under a prompt.

        A call that greedy decoding would only repeat is skipped: the limit is the same as before,
        or the output ended below a lower limit.
        """
        history = self.history.get("task", []) if self.is_in_loop else []
        # Skip the call if its reply is known.
        previous_limit, previous_reply = self.outputs.get(prompt, (0, Reply()))
        is_greedy = self.settings.role_sampling("task").get("temperature") == 0
        is_same_call = previous_limit == max_tokens
        is_complete = 0 < previous_limit < max_tokens and _has_ended(previous_reply)
        if is_greedy and not history and (is_same_call or is_complete):
            return previous_reply

        # The prompt is the system message.
        content = fill(self.settings.prompts.task, query=self.query.text)
        messages: list[Message] = [
            {"role": "system", "content": prompt},
            *self.query.context,
            *history,
            {"role": "user", "content": content},
        ]
        reply = await self.call("task", messages, max_tokens=max_tokens)
        # Keep the longest output for each prompt.
        if max_tokens > previous_limit and not history:
            self.outputs[prompt] = (max_tokens, reply)
        return reply

    async def call_role(self, role: Role, **variables: str) -> str:
        """Return the reply of another role to its template, filled with the variables."""
        prompts = self.settings.prompts
        content = fill(getattr(prompts, role), **variables)
        # System message, the role's own earlier steps, and this step.
        messages: list[Message] = [
            {"role": "system", "content": prompts.role(role)},
            *self.history.get(role, []),
            {"role": "user", "content": content},
        ]
        reply = await self.call(role, messages)
        return reply.text

    async def call(self, role: Role, messages: Sequence[Message], **limit: int) -> Reply:
        """Call the model of a role, and record usage, failure and history.

        Raises:
            `_CallFailed`: The call failed.
        """
        # Send the messages.
        sampling = {**self.settings.role_sampling(role), **limit}
        chat = as_chat(self.models[role])
        reply = await chat(
            messages,
            repeat=self.query.repeat,
            session=f"{self.session}:{role}",
            **sampling,
        )

        # Failed calls cost something, too.
        usage = self.result.usage
        usage[role] = usage.get(role, RoleUsage()) + RoleUsage.from_reply(reply)
        error = reply.error
        if error is not None:
            # The address is recorded apart from the message.
            message = str(LLMError(error.message, "", error.attempts, error.status))
            self.record_failure(role, error.kind, message, error.fatal, error.where)
            raise _CallFailed(role)
        # The next step shows the role this one, if it has a history.
        if role in self.history and self.is_in_loop:
            self.history[role] += [messages[-1], {"role": "assistant", "content": reply.text}]
        return reply

    def keep_answer(self, rank: int, text: str, finish_reason: str) -> None:
        """Make an answer the result's, unless it has a better one."""
        # Among answers of equal rank, the later one counts.
        if rank >= self.answer_rank:
            self.answer_rank = rank
            self.result.answer = text
            self.result.finish_reason = finish_reason

    def record_failure(
        self, role: Role, kind: str, message: str, fatal: bool = False, where: str = ""
    ) -> None:
        """Add a failure to the result."""
        failure = Failure(
            role=role,
            step=self.step_number,
            kind=kind,
            message=message,
            fatal=fatal,
            where=where,
        )
        self.result.failures = (*self.result.failures, failure)


def _has_ended(reply: Reply) -> bool:
    """Return whether the model reached its end of sequence, and not the token limit."""
    return reply.finish_reason != "length"
