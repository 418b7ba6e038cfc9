"""Episodes of programs with a scripted policy: a byte tokenizer with TRL's own Qwen3 template, no
model.
"""

from __future__ import annotations

import asyncio
from functools import cache

from agentic_prompting.harnesses import CommandProgram, Workspace
from agentic_prompting.llm.loop import gather, run
from agentic_prompting.programs import AgentProgram, Program
from agentic_prompting.rollout import ChatFormat, FreeText, Limits, Rollout, Sample
from support.isolation import ISOLATION
from support.tokenizers_for_tests import template

LIMITS = Limits(max_turns=5, max_turn_tokens=400, max_tokens=4000, max_context=8000)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {}},
    },
}


@cache
def byte_tokenizer(name: str = "qwen3"):
    """Bytes, the special tokens of ChatML, and a template of TRL's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    core.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
    )
    fast.chat_template = template(name)
    return fast


@cache
def byte_format(name: str = "qwen3") -> ChatFormat:
    return ChatFormat(byte_tokenizer(name), FreeText())


class Scripted:
    """A policy that writes `say(what it reads, request)`."""

    def __init__(self, say, form: ChatFormat, delay: float = 0.0):
        self.say = say
        self.form = form
        self.delay = delay
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        if self.delay:
            await asyncio.sleep(self.delay)
        text = self.say(self.form.tokenizer.decode(request.context), request)
        ids = self.form.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) + 1 > request.max_new_tokens:
            return Sample(
                ids[: request.max_new_tokens], [-0.5] * request.max_new_tokens, finished=False
            )
        return Sample([*ids, self.form.tokenizer.eos_token_id], [-0.5] * len(ids) + [-0.1])

    def contexts(self) -> list[str]:
        return [self.form.tokenizer.decode(request.context) for request in self.requests]


def play_program(
    agent,
    say=lambda text, request: "hello",
    limits=LIMITS,
    row=None,
    delay=0.0,
    n=1,
    name="qwen3",
    **options,
):
    """`n` rollouts of a program, and the policy that was asked."""
    if isinstance(agent, AgentProgram):
        program = agent
    elif callable(agent):
        program = Program(agent, **options)
    else:
        options.setdefault("workspace", Workspace(isolation=ISOLATION))
        program = CommandProgram(agent, **options)
    form = byte_format(name)
    policy = Scripted(say, form, delay)
    rollouts = [Rollout([1], row=dict(row or {"question": "q"}), seed=i) for i in range(n)]
    run(gather(program.play_episode(rollout, policy, form, limits) for rollout in rollouts))
    return (rollouts[0] if n == 1 else rollouts), policy


def called(name: str, arguments: str) -> str:
    """A turn with a tool call, as Qwen3 writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
