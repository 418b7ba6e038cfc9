"""[`PromptAgent`]: a trained agent that answers questions in exactly the form in which it was trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .llm import Message, run, start
from .local import Sampling, context_length, end_of_turn_tokens, local_policy
from .refine import ProRefiner
from .rollout import (
    AgentSpec,
    Environment,
    Policy,
    Rollout,
    Sample,
    SampleRequest,
    TextFormat,
    as_environment,
    play,
    play_all,
    reset_rows,
    rollout_seed,
)
from .rollout.progress import progress as progress_of


class GreedyAnswers:
    """A [`Policy`] that samples requests and decodes the answering turn greedily (eq 8 of the Prompt-R1 paper).

    Args:
        policy ([`Policy`]): Samples, and decodes greedily on request.
        chat_format ([`TextFormat`]): Parses turns, to find the one that answers.
    """

    def __init__(self, policy: Policy, chat_format: TextFormat):
        self.policy, self.chat_format = policy, chat_format

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def __call__(self, request: SampleRequest) -> Sample:
        sampled = await self.policy(request)
        if self.chat_format.parse(sampled.ids).kind != "answer":
            return sampled
        likeliest = await self.policy(replace(request, greedy=True))
        return likeliest if self.chat_format.parse(likeliest.ids).kind == "answer" else sampled


class PromptAgent:
    """A small agent LLM together with its environment.

    Args:
        model (`PreTrainedModel`): The agent. It is set to eval mode and stays on its device.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        environment ([`Environment`], object with a `step`, `Callable` or `dict`, *optional*): Answers the agent's
            requests, as in training; see [`as_environment`]. Without one, an agent that asks ends as `out_of_turns`.
        spec ([`AgentSpec`], *optional*): Template, grammar and limits. Defaults to plain questions.
        sampling ([`Sampling`], *optional*): Sampling parameters. Default to those of the `spec`, that is of training.
        max_batch_size (`int`, *optional*, defaults to `64`): The largest number of turns sampled at once.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values that are kept between
            the turns of a conversation. More saves reading long conversations again; 0 keeps none.
        greedy_answer (`bool`, *optional*, defaults to `False`): Decode the answering turn greedily (eq 8 of the
            Prompt-R1 paper): if a sampled turn answers, the likeliest turn replaces it, provided that it answers too.
            Requests are always sampled (eq 3, 7).

    Attributes:
        limits ([`Limits`]): Those of the `spec`, with the model's own context length as `max_context`.

    Raises:
        `TypeError`: If the environment has no `step` to call.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        environment: Any = None,
        spec: AgentSpec = AgentSpec(),
        sampling: Sampling | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        greedy_answer: bool = False,
    ):
        self.environment = environment
        self._spec = spec
        if greedy_answer and (self._plays_itself or spec.environments):
            raise ValueError(
                "greedy_answer needs turns that are known to answer; a program's are not, and neither are those of "
                "several environments: leave it off"
            )
        readable = min(filter(None, (spec.limits.max_context, context_length(model))), default=None)
        self.limits = replace(spec.limits, max_context=readable)
        ends = end_of_turn_tokens(model, tokenizer)
        self.chat_format = spec.tokens(tokenizer, ends)
        policy = local_policy(
            model.eval(),
            tokenizer,
            sampling if sampling is not None else Sampling(**spec.sampling),
            stop_texts=spec.stop_texts,
            end_of_turn_ids=ends,
            max_batch_size=max_batch_size,
            prefix_cache_mb=prefix_cache_mb,
        )
        self.policy: Any = GreedyAnswers(policy, self.chat_format) if greedy_answer else policy

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        environment: Any = None,
        spec: AgentSpec | None = None,
        sampling: Sampling | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        greedy_answer: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        name: str | None = None,
        **model_kwargs: Any,
    ) -> PromptAgent:
        """Load a trainer's output: the model (or LoRA adapter), its tokenizer and `agentic_prompting.json`.

        Args:
            model (`str` or `Path`): The folder, or a hub id.
            environment ([`Environment`], *optional*): As in [`PromptAgent`], like the four arguments that follow.
            sampling ([`Sampling`], *optional*): Sampling parameters.
            max_batch_size (`int`, *optional*, defaults to `64`): The largest number of turns sampled at once.
            prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values kept between turns.
            greedy_answer (`bool`, *optional*, defaults to `False`): Decode the answering turn greedily (eq 8).
            spec ([`AgentSpec`], *optional*): Overrides the saved one; required for a model without one.
            revision (`str`, *optional*): Branch, tag or commit of a hub id.
            token (`str` or `bool`, *optional*): For a private model; defaults to the token stored by huggingface_hub.
            cache_dir (`str` or `Path`, *optional*): The folder of downloads; defaults to huggingface_hub's cache.
            name (`str`, *optional*): The environment to use, if the agent was trained in several; `environment` is
                then that one. Without a name it is a dict of all of them.
            **model_kwargs: Passed to transformers' `from_pretrained` (`dtype`, `device_map`, ...).

        Raises:
            `FileNotFoundError`: There is no such folder and no such model on the hub, or it has no
                `agentic_prompting.json` and no `spec` is given.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = (
            Path(model)
            if Path(model).is_dir()
            else _downloaded(str(model), revision, token, cache_dir)
        )
        if token is not None:
            model_kwargs["token"] = token  # an adapter's base model may be private as well
        environment = as_environment(environment)
        own_grammar = None if environment is None else environment.grammar
        spec = spec if spec is not None else AgentSpec.load(folder, own_grammar, name)
        kind: Any = AutoModelForCausalLM
        if (folder / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM

            kind = AutoPeftModelForCausalLM
        loaded, tokenizer = (
            kind.from_pretrained(folder, **model_kwargs),
            AutoTokenizer.from_pretrained(folder),
        )
        return cls(
            loaded,
            tokenizer,
            environment,
            spec,
            sampling,
            max_batch_size,
            prefix_cache_mb,
            greedy_answer,
        )

    @property
    def spec(self) -> AgentSpec:
        """The agent's form. Assign another one to ask it in another template or under another system prompt, whose
        texts then count as the agent's own; grammar and limits stay those it was made with."""
        return self._spec

    @spec.setter
    def spec(self, spec: AgentSpec) -> None:
        self._spec = spec
        for text in spec.own_texts:
            self.chat_format.trust(text)

    @property
    def environment(self) -> Environment | None:
        """The agent's environment; an assigned object is adapted by [`as_environment`]."""
        return self._environment

    @environment.setter
    def environment(self, environment: Any) -> None:
        self._environment = as_environment(environment)

    @property
    def _plays_itself(self) -> bool:
        return self._environment is not None and self._environment.play_episode is not None

    def answer(
        self,
        question: str,
        seed: int = 0,
        refiner: ProRefiner | None = None,
        environment: str | None = None,
    ) -> Rollout:
        """Answer one question, and wait for it; in `async` code: `await agent.aanswer(...)`.

        With a `refiner` the agent's system prompt is first refined for this question; the agent then answers under the
        refined prompt, in its environment. The refiner's own task model writes the partial answers and has no
        environment; give it the agent's weights (`TransformersChat(model, tokenizer)`) to refine the agent's own
        mistakes. If the verifier accepts the first answer, the prompt is not changed.

        Args:
            question (`str`): The question.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollout.
            refiner ([`ProRefiner`], *optional*): Refines the system prompt of the `spec`; for an agent trained by
                [`ESPLTrainer`] that is the best prompt of its population.
            environment (`str`, *optional*): The name of the environment to answer in, of an agent that has several.

        Returns:
            [`Rollout`]: With `.answer`, `.turns`, `.status`, `.error`, ... With a refiner, `row["refinement"]` is the
                [`RefinementResult`]. A refinement that failed half-way still has the best prompt so far.

        Raises:
            `ValueError`: There is a refiner and the agent has no system prompt, or the verifier needs answers.
        """
        return self.answer_all(
            [self._row(question, refiner, environment)], seed=seed, progress=False
        )[0]

    async def aanswer(
        self,
        question: str,
        seed: int = 0,
        refiner: ProRefiner | None = None,
        environment: str | None = None,
    ) -> Rollout:
        """[`PromptAgent.answer`] for `async` code. Answers that are awaited together share batches."""
        row = await asyncio.to_thread(self._row, question, refiner, environment)
        episode_seed = rollout_seed(seed, 0)
        ((row, prompt),) = await asyncio.wrap_future(start(self._reset([row], [episode_seed])))
        rollout = self._rollout(row, prompt, episode_seed)
        played = play(rollout, self.policy, self.environment, self.chat_format, self.limits)
        await asyncio.wrap_future(start(played))
        return rollout

    def _row(
        self, question: str, refiner: ProRefiner | None, environment: str | None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {
            "question": question,
            **({} if environment is None else {"environment": environment}),
        }
        if refiner is not None:
            if not self.spec.system_prompt:
                raise ValueError(
                    "the agent has no system prompt to refine: it was trained without one. "
                    "To give it one all the same, pass a spec with system_prompt"
                )
            row["refinement"] = refiner.refine(self.spec.system_prompt, question)
        return row

    def answer_all(
        self, questions: Sequence[str | Mapping[str, Any]], seed: int = 0, progress: bool = True
    ) -> list[Rollout]:
        """Answer many questions concurrently.

        Args:
            questions (`Sequence[str]` or rows): Questions, or dataset rows with `question` (or `prompt`). If a row has
                a `refinement`, its prompt replaces the system prompt.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollouts.
            progress (`bool`, *optional*, defaults to `True`): Show progress: a bar after two seconds, or in a file or a
                pipe a line a minute.

        Returns:
            `list[Rollout]`: In the order of the questions. A failed one has its `error` set; none raises.
        """
        rows = [
            {"question": question} if isinstance(question, str) else dict(question)
            for question in questions
        ]
        seeds = [rollout_seed(seed, number) for number in range(len(rows))]
        episodes = run(self._reset(rows, seeds))
        rollouts = [
            self._rollout(row, prompt, episode_seed)
            for (row, prompt), episode_seed in zip(episodes, seeds, strict=True)
        ]
        with progress_of(len(rows), "answers", shown=progress) as bar:
            play_all(
                rollouts,
                self.policy,
                self.environment,
                self.chat_format,
                self.limits,
                lambda _: bar.update(),
            )
        return rollouts

    async def _reset(
        self, rows: list[dict[str, Any]], seeds: Sequence[int]
    ) -> list[tuple[dict[str, Any], str | list[Any]]]:
        """The rows with their prompts, after the environment has started an episode for each."""
        prompts = []
        for row in rows:
            messages = self._messages(row)  # an error if the row names no environment of several
            prompts.append(self.chat_format.of(row).prompt(messages))
        if self.environment is not None and (self.environment.has_reset or self._plays_itself):
            # The environment finds the whole prompt in the row, as in training, and may change it: what it leaves
            # there is complete, the system prompt included.
            rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
            rows = await reset_rows(self.environment, rows, self.limits, seeds=seeds)
            prompts = [row["prompt"] for row in rows]
        return list(zip(rows, prompts, strict=True))

    def _rollout(self, row: dict[str, Any], prompt: str | list[Any], seed: int) -> Rollout:
        return Rollout(self.chat_format.of(row).prompt_ids(prompt), row=row, seed=seed)

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        refined = row.get("refinement")
        spec = self.spec if refined is None else replace(self.spec, system_prompt=refined.prompt)
        return spec.messages(row)


def _downloaded(
    name: str, revision: str | None, token: str | bool | None, cache_dir: str | Path | None
) -> Path:
    """The folder of a hub id in the local cache, downloaded if it is missing; without checkpoints."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = ["checkpoint-*/*", "last-checkpoint/*"]
    try:
        return Path(
            snapshot_download(
                name, revision=revision, token=token, cache_dir=cache_dir, ignore_patterns=ignored
            )
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        where = name if revision is None else f"{name} (revision {revision})"
        raise FileNotFoundError(
            f"{where} is neither a folder here nor a model on the hub: {' '.join(str(error).split())}. "
            "A private model needs token=; offline, the model must be in the cache"
        ) from None
