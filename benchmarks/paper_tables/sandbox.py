"""The stand-ins for models and data sets when a table runs with `--sandbox`: real code, small
world.

There are three tasks: sorting words, counting things, and questions about countries that take two
or three facts. One stand-in model answers all of them and follows its system prompt; another one
writes prompts, and some of its advice is bad. They show that every system runs and that its figures
are right. They say nothing about real models.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_prompting.evaluation import EvaluationTask
from agentic_prompting.llm import ChatModel, Message, Reply, ScriptedChat
from agentic_prompting.sandbox.puzzles import (
    BE_CAREFUL,
    COUNTING,
    FAULTS,
    KEEP_SHORT,
    SORTING,
    PuzzleCritic,
    PuzzleOptimizer,
    PuzzleSolver,
    PuzzleVerifier,
    make_puzzles,
    read_puzzle,
)
from agentic_prompting.sandbox.world import Oracle, as_rows, make_split, value_of

from .config import KINDS, SystemConfig, TableConfig

SANDBOX_TASKS = ("sandbox_sorting", "sandbox_counting", "sandbox_countries")
_STANDS_FOR = {  # the part of a data set's name that chooses its stand-in; all others become countries
    "sandbox_counting": re.compile("gsm8k|dapo|math|count|svamp", re.IGNORECASE),
    "sandbox_sorting": re.compile("sorting|book|writing|xsum|aqua", re.IGNORECASE),
}
_METRICS = {
    "sandbox_sorting": "word_sorting_match",
    "sandbox_counting": "integer_match",
    "sandbox_countries": "exact_match",
}
_ROLES = {"model": "model", "editor": "editor", "critic": "editor"}
_ADVICE = (*(fault.advice for fault in FAULTS.values()), KEEP_SHORT, BE_CAREFUL)


def sandbox_task(name: str, n: int, seed: int = 0, split: str = "test") -> EvaluationTask:
    """One of the three tasks.

    Args:
        name (`str`): One of [`SANDBOX_TASKS`].
        n (`int`): The number of rows.
        seed (`int`, *optional*, defaults to `0`): The seed of the questions.
        split (`str`, *optional*, defaults to `"test"`): `train` and `test` share no question.

    Raises:
        `ValueError`: There is no such task.
    """
    if name not in _METRICS:
        raise ValueError(f"unknown sandbox task {name!r}; known: {', '.join(SANDBOX_TASKS)}")
    if name == "sandbox_countries":
        train, test = make_split(seed, n_test=256)
        rows = as_rows((test if split == "test" else train)[:n])
    else:
        puzzle_kind = SORTING if name == "sandbox_sorting" else COUNTING
        # One list of different puzzles, dealt in turn whatever `n` is: no question on both sides.
        puzzles = make_puzzles(512, seed, [puzzle_kind])
        start = 0 if split == "test" else 1
        rows = puzzles[start::2][:n]
    return EvaluationTask(name, list(rows), (_METRICS[name],))


def sandbox_task_for(name: str) -> str:
    """The task that stands in for a data set."""
    for task, pattern in _STANDS_FOR.items():
        if pattern.search(name):
            return task
    return "sandbox_countries"


def stand_in_tasks(config: TableConfig) -> list[EvaluationTask]:
    """For each data set of a table different questions of its stand-in, under both names.

    The metrics are the task's own, which optimisers maximise, and the table's, except those with a
    sentence encoder.
    """
    n = config.n or 32
    tasks = []
    unused_rows = {name: sandbox_task(name, 256, config.seed).rows for name in SANDBOX_TASKS}
    for name in config.tasks:
        stand_in_name = sandbox_task_for(name)
        rows = unused_rows[stand_in_name][:n]
        unused_rows[stand_in_name] = unused_rows[stand_in_name][n:]

        metrics = config.sandbox.get("metrics")
        if not metrics:
            table_metrics = list(config.metrics_of(name) or ())
            names = [_METRICS[stand_in_name], *table_metrics]
            if "judged" in table_metrics:  # a table shows its verdicts first
                names.insert(0, "judged")
            names = [metric for metric in names if metric != "semantic_similarity"]
            metrics = dict.fromkeys(names)  # each once
        tasks.append(EvaluationTask(f"{name} ({stand_in_name})", rows, tuple(metrics)))
    return tasks


class SandboxModel:
    """The stand-in for a large LLM: it solves puzzles as its system prompt says, knows facts, and
    guesses combinations.

    It finds no mistake when it is asked to check its answer, and answers the same when it is asked
    again: it is no better at finding its own mistakes than at avoiding them.

    Args:
        seed (`int`, *optional*, defaults to `0`): The seed of its slips and guesses.
    """

    def __init__(self, seed: int = 0):
        self.solver = PuzzleSolver(seed)
        self.oracle = Oracle(seed=seed)
        self.model = f"sandbox model {seed}"

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]."""
        system = [message for message in messages if message["role"] == "system"]
        first = next(message for message in messages if message["role"] == "user")
        if read_puzzle(first["content"]):
            return await self.solver([*system, first], **sampling)
        reply = await self.oracle([first], repeat=repeat, session=session)
        return _with_answer_line(reply, sampling.get("max_tokens"))


class SandboxEditor(ScriptedChat):
    """The stand-in for a model that criticises, judges and writes prompts.

    It recognises the requests of OPRO, GEPA, TextGrad and E-SPL by their form and returns the
    prompt with one more piece of advice, chosen at random. ProRefine's three roles are those of its
    own sandbox. To any other request it replies that the prompt is not specific enough.

    Args:
        seed (`int`, *optional*, defaults to `0`): The seed of its choices and its mistakes.
    """

    def __init__(self, seed: int = 0):
        super().__init__(self.reply)
        self.seed = seed
        self.model = f"sandbox editor {seed}"
        # ProRefine's roles, by a heading of their requests.
        self.roles: dict[str, PuzzleCritic | PuzzleOptimizer | PuzzleVerifier] = {
            "\n\nOutput:\n": PuzzleCritic(seed),
            "\n\nFeedback:\n": PuzzleOptimizer(seed),
            "\n\nPrediction:\n": PuzzleVerifier(seed),
        }

    def reply(self, messages: Sequence[Message]) -> str:
        request = messages[-1]["content"]
        if request.startswith(("Question:\n", "Prompt:\n")):
            for heading, role in self.roles.items():
                if heading in request:
                    return role.reply(messages)
        return _edit(request, self.seed)


def sandbox_models(seed: int = 0) -> dict[str, ChatModel]:
    """All stand-ins, under the names that a table's systems use."""
    return {"model": SandboxModel(seed), "editor": SandboxEditor(seed), "oracle": Oracle(seed=seed)}


def no_way_to_answer(system: SystemConfig, task: EvaluationTask) -> str:
    """The reason not to ask a stand-in, where a score of zero would mean nothing; `""` if it is
    asked.
    """
    is_trained = bool({"base", "folder"} & KINDS[system.kind])
    if is_trained and "sandbox_countries" not in task.name:
        return "not asked: its policy reads countries' words alone"
    return ""


def stand_in(system: SystemConfig, folder: Path, seed: int = 0) -> SystemConfig:
    """A system of a table with the sandbox's models and policies in place of real ones.

    Args:
        system ([`SystemConfig`]): The table's system.
        folder (`Path`): The table's folder; policies are trained into it, once for each seed.
        seed (`int`, *optional*, defaults to `0`): The seed of the training.
    """
    settings = dict(system.settings)
    settings |= {role: name for role, name in _ROLES.items() if role in KINDS[system.kind]}
    if "environment" in KINDS[system.kind] and settings.get("environment"):
        settings["environment"] = "oracle"
    if "base" in KINDS[system.kind] or "folder" in KINDS[system.kind]:
        from .sandbox_policies import policy_for

        policies = folder / (f"policies-{seed}" if seed else "policies")
        policy = policy_for(system.kind, policies, seed)
        settings |= {name: str(policy) for name in ("base", "folder") if name in KINDS[system.kind]}
    return replace(system, settings=settings)


def _with_answer_line(reply: Reply, max_tokens: int | None) -> Reply:
    """The oracle's fact in the form in which answers of prompted systems are read."""
    value = value_of(reply.text)
    text = reply.text if value is None else f"Answer: {value}"
    words = text.split(" ")
    if max_tokens is not None and len(words) > max_tokens:
        text = " ".join(words[:max_tokens])
        return Reply(text=text, finish_reason="length", usage=reply.usage)
    return Reply(text=text, finish_reason="stop", usage=reply.usage)


# How each optimiser shows the prompt, and the marks between which it expects the new one.
_FORMS = (
    (re.compile(r"<INS>(.*?)</INS>\nscore: \d+\n\nHere are examples", re.DOTALL), "<INS>{}</INS>"),
    (
        re.compile(r"instructions to perform a task for me:\n```\n(.*?)\n```", re.DOTALL),
        "```\n{}\n```",
    ),
    # TextGrad quotes only the first and last words of the variable; the context has all of it.
    (
        re.compile(r"<LM_SYSTEM_PROMPT> (.*?) </LM_SYSTEM_PROMPT>.*<IMPROVED_VARIABLE>", re.DOTALL),
        "<IMPROVED_VARIABLE>{}</IMPROVED_VARIABLE>",
    ),
)
_REVISION = re.compile(
    r"Task: (draw lessons|turn many|let one set)"
)  # E-SPL's requests that want edits


def _edit(request: str, seed: int) -> str:
    rng = random.Random(f"{seed} {request}")

    # E-SPL takes edits.
    if _REVISION.match(request):
        instructions = request.partition("</instructions>")[0]
        missing = [advice for advice in _ADVICE if advice not in instructions]
        edits = [{"op": "add", "text": advice} for advice in missing[: rng.randint(1, 2)]]
        return f"```json\n{json.dumps(edits)}\n```"

    # The others take a whole prompt.
    for request_pattern, reply_form in _FORMS:
        match = request_pattern.search(request)
        if match:
            prompt = match[1].rpartition("<INS>")[2]
            missing = [advice for advice in _ADVICE if advice not in prompt]
            if missing:
                prompt += f"\n{rng.choice(missing)}"
            return reply_form.replace("{}", prompt)
    return "The answer goes wrong because the prompt says too little about how to work."
