"""[`PromptAgent`]: a trained agent that answers questions in exactly the format of its training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .llm import Message, run, start
from .local import Sampling, context_length, end_of_turn_tokens, loading_dtype, local_policy
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
from .rollout.progress import show_progress


class GreedyAnswers:
    """A [`Policy`] that samples requests and decodes the answering turn greedily (eq 8 of the
    Prompt-R1 paper).

    Args:
        policy ([`Policy`]): Policy that samples, and decodes greedily on request.
        chat_format ([`TextFormat`]): Parses turns to find the answering one.
    """

    def __init__(self, policy: Policy, chat_format: TextFormat):
        self.policy = policy
        self.chat_format = chat_format

    def __getattr__(self, name: str) -> Any:
        # Everything else is the wrapped policy's.
        return getattr(self.policy, name)

    async def __call__(self, request: SampleRequest) -> Sample:
        # Sample the turn first: only a sampled turn shows whether the agent answers now.
        sampled = await self.policy(request)
        if self.chat_format.parse(sampled.ids).kind != "answer":
            return sampled

        # The greedy turn replaces a sampled answer only if it answers too.
        greedy = await self.policy(replace(request, greedy=True))
        if self.chat_format.parse(greedy.ids).kind != "answer":
            return sampled
        return greedy


class PromptAgent:
    """A small agent LLM together with its environment.

    Args:
        model (`PreTrainedModel`): The model of the agent. It is set to eval mode and stays on its
            device.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        environment ([`Environment`], object with a `step`, `Callable` or `dict`, *optional*):
            Answers the agent's requests, as in training; see [`as_environment`]. Without one, an
            agent that asks ends as `out_of_turns`.
        spec ([`AgentSpec`], *optional*): Template, grammar and limits. Defaults to plain questions.
        sampling ([`Sampling`], *optional*): Sampling parameters. Default to those of the `spec`,
            that is of training.
        max_batch_size (`int`, *optional*, defaults to `64`): The largest number of turns sampled at
            once.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for the keys and values
            that are kept between the turns of a conversation. More memory avoids reading long
            conversations again; 0 keeps none.
        greedy_answer (`bool`, *optional*, defaults to `False`): Decode the answering turn greedily
            (eq 8 of the Prompt-R1 paper): if a sampled turn answers, the likeliest turn replaces
            it, provided that it answers too. Requests are always sampled (eq 3, 7).

    Attributes:
        limits ([`Limits`]): Those of the `spec`, with the model's own context length as
            `max_context`.

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
        is_program = self.environment is not None and self.environment.plays_whole_episodes
        if greedy_answer and (is_program or spec.environments):
            raise ValueError(
                "greedy_answer needs turns that are known to answer; a program's are not, and "
                "neither are those of several environments: leave it off"
            )

        # The context is limited by the spec and by the model, where they have a limit.
        context_limits = (spec.limits.max_context, context_length(model))
        max_context = min((limit for limit in context_limits if limit), default=None)
        self.limits = replace(spec.limits, max_context=max_context)

        # The format of the conversation, as in training.
        end_of_turn_ids = end_of_turn_tokens(model, tokenizer)
        self.chat_format = spec.create_format(tokenizer, end_of_turn_ids)
        # The policy samples with the parameters of training, unless the caller passes others.
        policy = local_policy(
            model.eval(),
            tokenizer,
            sampling if sampling is not None else Sampling(**spec.sampling),
            stop_texts=spec.stop_texts,
            end_of_turn_ids=end_of_turn_ids,
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
        """Load a trainer's output: the model (or LoRA adapter), its tokenizer and
        `agentic_prompting.json`.

        Args:
            model (`str` or `Path`): The folder, or a hub id.
            environment ([`Environment`], *optional*): As in [`PromptAgent`], like the four
                arguments that follow.
            sampling ([`Sampling`], *optional*): Sampling parameters.
            max_batch_size (`int`, *optional*, defaults to `64`): The largest number of turns
                sampled at once.
            prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values
                kept between turns.
            greedy_answer (`bool`, *optional*, defaults to `False`): Decode the answering turn
                greedily (eq 8).
            spec ([`AgentSpec`], *optional*): Overrides the saved one; required for a model without
                one.
            revision (`str`, *optional*): Branch, tag or commit of a hub id.
            token (`str` or `bool`, *optional*): For a private model; defaults to the token stored
                by huggingface_hub.
            cache_dir (`str` or `Path`, *optional*): The folder of downloads; defaults to
                huggingface_hub's cache.
            name (`str`, *optional*): The environment to use, if the agent was trained in several;
                `environment` is then that one. Without a name it is a dict of all of them.
            **model_kwargs: Passed to transformers' `from_pretrained` (`dtype`, `device_map`, ...).
                Without a `dtype` the model has that in which it was saved; on the CPU float32, if
                the processor has no instructions for bfloat16.

        Raises:
            `FileNotFoundError`: There is no such folder and no such model on the hub, or it has no
                `agentic_prompting.json` and no `spec` is given.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # A local folder, or a model that is downloaded from the Hub.
        folder = Path(model)
        if not folder.is_dir():
            folder = _download_model(str(model), revision, token, cache_dir)

        # The saved spec, unless the caller passes one. An environment may have its own grammar.
        environment = as_environment(environment)
        if spec is None:
            grammar = None if environment is None else environment.grammar
            spec = AgentSpec.load(folder, grammar, name)

        # A LoRA adapter is loaded with its base model, which may be private as well.
        if token is not None:
            model_kwargs["token"] = token
        # Without a device map the model stays on the CPU, which may compute in float32 alone.
        if model_kwargs.get("device_map") in (None, "cpu") and "torch_dtype" not in model_kwargs:
            model_kwargs.setdefault("dtype", loading_dtype())
        model_class: Any = AutoModelForCausalLM
        if (folder / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM

            model_class = AutoPeftModelForCausalLM
        loaded_model = model_class.from_pretrained(folder, **model_kwargs)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(
            loaded_model,
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
        """The agent's format. Assign another spec to change its template or system prompt.

        The texts of the assigned spec are then trusted like those of the first one. Grammar and
        limits remain those of the constructor.
        """
        return self._spec

    @spec.setter
    def spec(self, spec: AgentSpec) -> None:
        self._spec = spec
        # Tags in the agent's own texts are examples; anywhere else they count as forged.
        for text in spec.trusted_texts:
            self.chat_format.trust(text)

    @property
    def environment(self) -> Environment | None:
        """The agent's environment. An assigned object is converted by [`as_environment`]."""
        return self._environment

    @environment.setter
    def environment(self, environment: Any) -> None:
        self._environment = as_environment(environment)

    def answer(
        self,
        question: str,
        seed: int = 0,
        refiner: ProRefiner | None = None,
        environment: str | None = None,
    ) -> Rollout:
        """Answer one question, and wait for it; in `async` code: `await agent.aanswer(...)`.

        With a `refiner` the agent's system prompt is first refined for this question; the agent
        then answers under the refined prompt, in its environment. The refiner's own task model
        writes the partial answers and has no environment; give it the agent's weights
        (`TransformersChat(model, tokenizer)`) to refine the agent's own mistakes. If the verifier
        accepts the first answer, the prompt is not changed.

        Args:
            question (`str`): The question.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollout.
            refiner ([`ProRefiner`], *optional*): Refines the system prompt of the `spec`; for an
                agent trained by [`ESPLTrainer`] that is the best prompt of its population.
            environment (`str`, *optional*): The name of the environment to answer in, of an agent
                that has several.

        Returns:
            [`Rollout`]: With `.answer`, `.turns`, `.status`, `.error`, ... With a refiner,
                `row["refinement"]` is the [`RefinementResult`]. A refinement that failed half-way
                still has the best prompt so far.

        Raises:
            `TypeError`: The question is no text.
            `ValueError`: There is a refiner and the agent has no system prompt, or the verifier
                needs answers; or an environment is named and the agent does not have several.
        """
        # A single question is a batch of one.
        row = self._make_row(question, refiner, environment)
        (rollout,) = self.answer_all([row], seed=seed, progress=False)
        return rollout

    async def aanswer(
        self,
        question: str,
        seed: int = 0,
        refiner: ProRefiner | None = None,
        environment: str | None = None,
    ) -> Rollout:
        """[`PromptAgent.answer`] for `async` code. Answers that are awaited together share batches."""
        # In a thread, because refining makes calls and waits for them.
        row = await asyncio.to_thread(self._make_row, question, refiner, environment)

        # Everything else runs in the background loop, where answers share batches.
        rollout_seeds = [rollout_seed(seed, 0)]
        (rollout,) = await asyncio.wrap_future(start(self._begin_rollouts([row], rollout_seeds)))
        episode = play(rollout, self.policy, self.environment, self.chat_format, self.limits)
        await asyncio.wrap_future(start(episode))
        return rollout

    def _make_row(
        self, question: str, refiner: ProRefiner | None, environment: str | None
    ) -> dict[str, Any]:
        """The row of a question, with the refined prompt if there is a refiner."""
        if not isinstance(question, str):
            raise TypeError(
                f"a question is a text, got {type(question).__name__}: pass rows to answer_all, as "
                "in answer_all([row])"
            )
        row: dict[str, Any] = {"question": question}
        # The row names the environment, for an agent that has several.
        if environment is not None:
            if not self.spec.environments:
                raise ValueError(
                    f"environment={environment!r} would be ignored: the agent has no environments "
                    "by name, so leave it out"
                )
            row["environment"] = environment
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
            questions (`Sequence[str]` or rows): Questions, or dataset rows with `question` (or
                `prompt`), which may have the column names of the training data (`columns` of the
                spec). If a row has a `refinement`, the refined prompt replaces the system prompt.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollouts.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar after two
                seconds, or one line per minute if the output is a file or a pipe.

        Returns:
            `list[Rollout]`: Rollouts in the order of the questions. A failed rollout has its
                `error` set; no error is raised.
        """
        # A text is a row that has a question only.
        rows: list[dict[str, Any]] = []
        for question in questions:
            rows.append({"question": question} if isinstance(question, str) else dict(question))
        # A rollout's seed depends on its position, so equal questions get different rollouts.
        seeds = [rollout_seed(seed, number) for number in range(len(rows))]
        rollouts = run(self._begin_rollouts(rows, seeds))
        # Play all rollouts; each one that ends moves the bar.
        with show_progress(len(rows), "answers", shown=progress) as bar:
            play_all(
                rollouts,
                self.policy,
                self.environment,
                self.chat_format,
                self.limits,
                lambda _: bar.update(),
            )
        return rollouts

    async def _begin_rollouts(
        self, rows: list[dict[str, Any]], seeds: Sequence[int]
    ) -> list[Rollout]:
        """Start an episode of the environment for each row, and make the rollouts with their
        prompts.
        """
        # Programs and environments find the columns under the names that they had in training.
        rows = [self.spec.with_both_names(row) for row in rows]
        # Raises if the agent has several environments and a row does not name one of them.
        prompts = []
        for row in rows:
            messages = self._make_messages(row)
            prompts.append(self.chat_format.for_row(row).prompt(messages))

        # As in training, the environment gets the whole prompt in the row and may change it. The
        # changed prompt is complete: it includes the system prompt.
        environment = self.environment
        if environment is not None and (environment.has_reset or environment.plays_whole_episodes):
            rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
            rows = await reset_rows(environment, rows, self.limits, seeds=seeds)
            prompts = [row["prompt"] for row in rows]

        # Each rollout begins with the tokens of its prompt.
        rollouts = []
        for row, prompt, seed in zip(rows, prompts, seeds, strict=True):
            prompt_ids = self.chat_format.for_row(row).prompt_ids(prompt)
            rollouts.append(Rollout(prompt_ids, row=row, seed=seed))
        return rollouts

    def _make_messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row's prompt, under the refined system prompt if the row has one."""
        refinement = row.get("refinement")
        if refinement is None:
            return self.spec.messages(row)
        return replace(self.spec, system_prompt=refinement.prompt).messages(row)


def _download_model(
    name: str, revision: str | None, token: str | bool | None, cache_dir: str | Path | None
) -> Path:
    """Download a model to the local cache, without checkpoints, unless it is there.

    Returns its folder.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Checkpoints of the training are not needed, and may be many times as large as the model.
    ignored = ["checkpoint-*/*", "last-checkpoint/*"]
    try:
        return Path(
            snapshot_download(
                name, revision=revision, token=token, cache_dir=cache_dir, ignore_patterns=ignored
            )
        )
    # Whatever the client of the Hub raises, no such model is within reach.
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        described = name if revision is None else f"{name} (revision {revision})"
        raise FileNotFoundError(
            f"{described} is neither a local folder nor a model on the Hub. A private model needs "
            "token=; offline, the model must be in the cache. The Hub's client says: "
            f"{' '.join(str(error).split())}"
        ) from None
