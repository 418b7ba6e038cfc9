"""A trained agent in use: question in, rollout out, in exactly the form it was trained in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .environments import as_environment
from .llm import Message, run
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
    gather,
    play_all,
    rollout_seed,
)
from .rollout.progress import progress as progress_of


class GreedyAnswers:
    """A [`Policy`] whose answering turn is the likeliest one (eq 8 of the Prompt-R1 paper), its requests drawn.

    Args:
        policy ([`Policy`]): Draws, and decodes greedily where it is asked to.
        chat_format ([`TextFormat`]): Says which turn answers.
    """

    def __init__(self, policy: Policy, chat_format: TextFormat):
        self.policy, self.chat_format = policy, chat_format

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def __call__(self, request: SampleRequest) -> Sample:
        drawn = await self.policy(request)
        if self.chat_format.parse(drawn.ids).kind != "answer":
            return drawn
        likeliest = await self.policy(replace(request, greedy=True))
        return likeliest if self.chat_format.parse(likeliest.ids).kind == "answer" else drawn


class PromptAgent:
    """A small agent LLM together with the environment that helps it.

    Args:
        model (`PreTrainedModel`): The agent. In eval mode; moved nowhere.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        environment ([`Environment`] or `Callable`, *optional*): What it may ask: an object with a `step`, or a function
            of the rollout, as the trainers take it. Without one, an agent that asks ends as `out_of_turns`.
        spec ([`AgentSpec`], *optional*): Template, grammar and limits. Defaults to plain questions.
        sampling ([`Sampling`], *optional*): How it samples; defaults to the `spec`'s, that is as in training.
        max_batch_size (`int`, *optional*, defaults to `64`): Turns sampled at once; more wait.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values kept from one turn to
            the next, so that a conversation is not read again from its beginning; 0 keeps none.
        greedy_answer (`bool`, *optional*, defaults to `False`): Decode the answering turn greedily (eq 8 of the
            Prompt-R1 paper): where a sampled turn answers, the likeliest turn takes its place if it answers too.
            Requests stay sampled (eq 3, 7).

    Attributes:
        limits ([`Limits`]): The `spec`'s, with what the model can read as `max_context`, as in training.

    Raises:
        `TypeError`: If the environment has nothing to call.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        environment: Environment | Callable[[Rollout], Any] | None = None,
        spec: AgentSpec = AgentSpec(),
        sampling: Sampling | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        greedy_answer: bool = False,
    ):
        self.environment, self.spec = as_environment(environment), spec
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
        environment: Environment | Callable[[Rollout], Any] | None = None,
        spec: AgentSpec | None = None,
        sampling: Sampling | None = None,
        max_batch_size: int = 64,
        prefix_cache_mb: float = 1024.0,
        greedy_answer: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        **model_kwargs: Any,
    ) -> PromptAgent:
        """Load what a trainer saved: the model (or LoRA adapter), its tokenizer and `agentic_prompting.json`.

        Args:
            model (`str` or `Path`): The folder, or a hub id.
            environment ([`Environment`], *optional*): As in [`PromptAgent`], and so are the following four.
            sampling ([`Sampling`], *optional*): How it samples.
            max_batch_size (`int`, *optional*, defaults to `64`): Turns sampled at once.
            prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Memory for keys and values kept between turns.
            greedy_answer (`bool`, *optional*, defaults to `False`): The answering turn is the likeliest one (eq 8).
            spec ([`AgentSpec`], *optional*): Overrides the saved one; needed for a model that has none.
            revision (`str`, *optional*): Branch, tag or commit of a hub id.
            token (`str` or `bool`, *optional*): For a private one; by default the token that huggingface_hub knows of.
            cache_dir (`str` or `Path`, *optional*): Where downloads are kept; by default in huggingface_hub's cache.
            **model_kwargs: Passed to transformers' `from_pretrained` (`dtype`, `device_map`, ...).

        Raises:
            `FileNotFoundError`: If there is no such folder and no such model can be had from the hub, or it has no
                `agentic_prompting.json` and no `spec` is given.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(model) if Path(model).is_dir() else _downloaded(str(model), revision, token, cache_dir)
        if token is not None:
            model_kwargs["token"] = token  # an adapter's base model may be private as well
        spec = spec if spec is not None else AgentSpec.load(folder, getattr(environment, "grammar", None))
        kind: Any = AutoModelForCausalLM
        if (folder / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM

            kind = AutoPeftModelForCausalLM
        loaded, tokenizer = kind.from_pretrained(folder, **model_kwargs), AutoTokenizer.from_pretrained(folder)
        return cls(loaded, tokenizer, environment, spec, sampling, max_batch_size, prefix_cache_mb, greedy_answer)

    def answer(self, question: str, seed: int = 0, refiner: ProRefiner | None = None) -> Rollout:
        """Answer one question. See [`Rollout`] for what comes back: `.answer`, `.turns`, `.status`, `.error`, ...

        With a `refiner` the agent's system prompt is first refined for this question, and the agent then answers under
        the refined prompt, in its environment, as always. Partial answers are written by the refiner's own task model,
        which has no environment; give it the agent's weights (`TransformersChat(model, tokenizer)`) to see the
        agent's own mistakes. Where its verifier accepts the first answer, the prompt stays as it is.

        Args:
            question (`str`): The question.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollout.
            refiner ([`ProRefiner`], *optional*): Refines the system prompt of the `spec`, for an agent trained by
                [`ESPLTrainer`] the best of its population.

        Returns:
            [`Rollout`]: With a refiner, `row["refinement"]` is the [`RefinementResult`]. One that failed half-way still
                gives the best prompt it had.

        Raises:
            `ValueError`: If there is a refiner and the agent has no system prompt, or the verifier needs answers.
        """
        row: dict[str, Any] = {"question": question}
        if refiner is not None:
            if not self.spec.system_prompt:
                raise ValueError(
                    "the agent has no system prompt to refine: it was trained without one. "
                    "To give it one all the same, pass a spec with system_prompt"
                )
            row["refinement"] = refiner.refine(self.spec.system_prompt, question)
        return self.answer_all([row], seed=seed, progress=False)[0]

    def answer_all(
        self, questions: Sequence[str | Mapping[str, Any]], seed: int = 0, progress: bool = True
    ) -> list[Rollout]:
        """Answer many questions concurrently.

        Args:
            questions (`Sequence[str]` or rows): Questions, or dataset rows with `question` (or `prompt`). Where a row
                has a `refinement`, its prompt takes the place of the system prompt.
            seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollouts.
            progress (`bool`, *optional*, defaults to `True`): Show how far it is: a bar after two seconds, or in a
                file or a pipe a line a minute.

        Returns:
            `list[Rollout]`: In the order of the questions. One that failed has its `error` set; none raises.
        """
        rows = [{"question": question} if isinstance(question, str) else dict(question) for question in questions]
        if reset := getattr(self.environment, "reset", None):
            rows = run(gather(reset({**row, "prompt": self._messages(row)}) for row in rows))
        rollouts = [
            Rollout(self.chat_format.prompt_ids(self._messages(row)), row=row, seed=rollout_seed(seed, i))
            for i, row in enumerate(rows)
        ]
        with progress_of(len(rows), "answers", shown=progress) as bar:
            play_all(rollouts, self.policy, self.environment, self.chat_format, self.limits, lambda _: bar.update())
        return rollouts

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        refined = row.get("refinement")
        spec = self.spec if refined is None else replace(self.spec, system_prompt=refined.prompt)
        return spec.messages(row)


def _downloaded(name: str, revision: str | None, token: str | bool | None, cache_dir: str | Path | None) -> Path:
    """The folder of a hub id in the local cache, downloaded where it is not there yet; without checkpoints."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = ["checkpoint-*/*", "last-checkpoint/*"]
    try:
        return Path(
            snapshot_download(name, revision=revision, token=token, cache_dir=cache_dir, ignore_patterns=ignored)
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        where = name if revision is None else f"{name} (revision {revision})"
        raise FileNotFoundError(
            f"{where} is neither a folder here nor a model that the hub gives: {' '.join(str(error).split())}. "
            "A private model needs token=; offline, it has to be in the cache"
        ) from None
