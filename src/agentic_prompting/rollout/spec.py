"""The form of an agent: its prompt template, its grammar, its limits; and Prompt-R1's template.

One object for training and for use. It is saved beside the weights as `agentic_prompting.json`, so
that a trained agent gets its prompts in exactly the form of training, without options to remember.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm import Message, fill, with_system
from ..records import atomic_write
from .chat_format import ChatFormat, TextFormat
from .environment import Environment, as_environment
from .grammar import Grammar, QuestionGrammar, TagGrammar, TurnKind
from .grammars import find_grammar_class
from .types import Limits, Observation, Rollout, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SPEC_FILE = "agentic_prompting.json"
_FORMAT = 1  # of the file; increased when older readers would misread it
_STATUS_AFTER: dict[TurnKind, Status] = {
    "answer": "answered",
    "act": "out_of_turns",
    "malformed": "malformed",
}

# The role of Table 1 in the paper; the wording is ours. `{question}` comes last so that prompts
# share a prefix; the other variables are the grammar's tag names.
PROMPT_R1_TEMPLATE = """\
You answer a question together with a large language model that knows more than you do. You talk to it by writing \
requests; it sees your requests and its own replies, but not your thoughts and not this text.

Write exactly one of these two things each time it is your turn.
To ask: <{think}>a short thought</{think}> and then <{act}>your request</{act}>
To finish: <{think}>why you are done</{think}> and then <{answer}>the answer, as short as it can be</{answer}>
What you ask is answered in <{observation}>...</{observation}>.

How to work:
- At first, say in under 50 words of thought what the question is after, without trying to solve it; then put the \
question and this explanation into your first request.
- Read each reply critically. Then ask for what is still missing, for more detail, for a correction or for a check. \
Build every request on what you have learned, and never send the same one twice.
- Finish as soon as the replies support an answer.

Question: {question}"""


def prompt_r1_template(grammar: Grammar = TagGrammar()) -> str:
    """Return the default agent template with the grammar's tags and `{question}` left open.

    It is the bare question if the grammar has no tags.
    """
    if not isinstance(grammar, TagGrammar):
        return "{question}"
    return fill(PROMPT_R1_TEMPLATE, **asdict(grammar))


ENVIRONMENT_TEMPLATE = """\
You answer a question with the help of {environment}
It sees your requests and its own replies, but not your thoughts and not this text.

Write exactly one of these two things each time it is your turn.
To ask: <{think}>a short thought</{think}> and then <{act}>your request</{act}>
To finish: <{think}>why you are done</{think}> and then <{answer}>the answer, as short as it can be</{answer}>
What you ask is answered in <{observation}>...</{observation}>.

Question: {question}"""


# For models of 100 million parameters: an instruction about asking only. Longer ones are copied
# instead of followed.
QUESTION_TEMPLATE = """\
Write one question for {environment}, ending with a question mark, that helps with this task: {question}"""


def template_for(
    environment: Environment | Callable[[Rollout], Any] | None, grammar: Grammar
) -> str:
    """Return the agent's user message if none is passed.

    Returns:
        `str`: The environment's `prompt_template`, with the grammar's tags filled in. Without one,
            our template for the grammar, with the environment's name and the first paragraph of its
            docstring. The bare question if there is no environment, or the grammar is neither
            [`TagGrammar`] nor [`QuestionGrammar`].

    Raises:
        `ValueError`: If the environment's template shows tags, and turns of the grammar have none.
    """
    environment = as_environment(environment)
    if environment is None:
        return "{question}"
    template = environment.prompt_template
    described_by = environment.described_by

    # A question grammar has its own template: one that shows tags is of no use.
    if isinstance(grammar, QuestionGrammar):
        has_tags = any(f"{{{tag.name}}}" in (template or "") for tag in fields(TagGrammar))
        if template and not has_tags:
            return template
        return fill(QUESTION_TEMPLATE, environment=_short_name(environment))

    # Other grammars have no tags: a template that shows tags would describe a form that is not
    # read.
    if not isinstance(grammar, TagGrammar):
        for tag in fields(TagGrammar):
            if f"<{{{tag.name}}}>" in (template or ""):
                raise ValueError(
                    f"the prompt_template of {described_by.__name__} shows the tag "
                    f"<{{{tag.name}}}>, but turns in the form {type(grammar).__name__} have no "
                    "tags: pass a prompt_template= that says how to ask in this form"
                )
        return template or "{question}"

    # The environment's own template takes precedence over ours.
    if template:
        return fill(template, **asdict(grammar))
    paragraph = _first_paragraph(environment)
    name = described_by.__name__
    description = f"{name}: {paragraph}" if paragraph else f"{name}."
    return fill(ENVIRONMENT_TEMPLATE, environment=description, **asdict(grammar))


def _first_paragraph(environment: Environment) -> str:
    """Return the first paragraph of the environment's docstring.

    Empty if there is none or only an inherited one.
    """
    doc = inspect.getdoc(environment.described_by) or ""
    # `getdoc` returns inherited docstrings, too.
    if doc == inspect.getdoc(Environment):
        return ""
    return " ".join(doc.split("\n\n")[0].split())


def _short_name(environment: Environment) -> str:
    """Return a short template's name for the environment.

    It is a first sentence that begins with an article, without its period; else "an expert".
    """
    sentence = re.split(r"[.:;]", _first_paragraph(environment), maxsplit=1)[0].strip()
    # Only a noun phrase fits into the sentence of the template.
    first_word = sentence.split(" ", 1)[0].lower()
    if first_word not in ("a", "an", "the"):
        return "an expert"
    return sentence[0].lower() + sentence[1:]


def fill_template(template: str, question: str) -> str:
    """Put the question into a template. Braces in either are left alone.

    Raises:
        `ValueError`: If the template has no `{question}`.
    """
    check_template(template)
    return fill(template, question=question)


def check_template(template: str) -> None:
    """Raise `ValueError` if the template does not show the question."""
    if "{question}" not in template:
        raise ValueError(
            "the prompt template has no {question} in it, so the agent would never see it: "
            f"{template[:80]!r}"
        )


@dataclass(frozen=True)
class AgentSpec:
    """The form of an agent.

    Args:
        prompt_template (`str`, *optional*, defaults to `"{question}"`): The user message;
            `{question}` is filled in.
        system_prompt (`str`, *optional*): The agent's own system message.
        grammar ([`Grammar`], *optional*): The form of its turns. Defaults to Prompt-R1's tags.
        limits ([`Limits`], *optional*): Turns and tokens.
        chat_template_kwargs (`dict`, *optional*): Passed to the chat template.
        stop_at_tags (`bool`, *optional*, defaults to `True`): End a turn right after a closing
            request or answer tag.
        join_system_prompt (`bool`, *optional*, defaults to `False`): Put the system prompt in front
            of a row's own system message, as E-SPL trains, instead of leaving it out there.
        sampling (`dict`, *optional*): Temperature and the like, as in [`Sampling`].
        prompt_format (`str`, *optional*, defaults to `"chat"`): The form of prompts: `"chat"`,
            messages for the chat template, or `"text"`, text that is tokenised as it is (TRL's
            standard format; see [`TextFormat`]). A trainer sets it by its data: `"text"` if each
            row has a `prompt` that is a string.
        environments (`dict[str, dict]`, *optional*): In a run with several environments, the own
            values of `prompt_template`, `grammar` and `chat_template_kwargs` of each, by name; see
            [`AgentSpec.for_row`].
        columns (`dict[str, str]`, *optional*): The columns of the rows it was trained on, as
            `--columns` named them: our name -> that of the user's data; see
            [`AgentSpec.with_both_names`].

    Raises:
        `ValueError`: If a template has no `{question}`, or `prompt_format` is neither of the two.
    """

    prompt_template: str = "{question}"
    system_prompt: str | None = None
    grammar: Grammar = TagGrammar()
    limits: Limits = Limits()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    stop_at_tags: bool = True
    join_system_prompt: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_format: str = "chat"
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        # Check the template of each environment as well.
        for spec in [self, *self.environment_specs()]:
            check_template(spec.prompt_template)
        if self.prompt_format not in ("chat", "text"):
            raise ValueError(f"prompt_format must be chat or text, got {self.prompt_format!r}")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end a turn.

        With several environments these are the texts of all, because the engine does not know which
        one a turn is for.
        """
        if not self.stop_at_tags:
            return ()
        grammars = [spec.grammar for spec in self.environment_specs() or [self]]
        # A question mark would also end a turn of another form, so it stops turns only where no
        # other form is in use.
        other_grammars = [
            grammar for grammar in grammars if not isinstance(grammar, QuestionGrammar)
        ]
        stops = chain.from_iterable(grammar.stops for grammar in other_grammars or grammars)
        return tuple(dict.fromkeys(stops))

    @property
    def trusted_texts(self) -> tuple[str, ...]:
        """The parts of a prompt that are the agent's own: tags in them are examples, not forged."""
        texts = [self.system_prompt, *self.prompt_template.split("{question}")]
        return tuple(text for text in texts if text)

    def for_row(self, row: Mapping[str, Any]) -> AgentSpec:
        """Return the form for a row: its environment's, if the agent has several.

        Raises:
            `ValueError`: The row's `environment` is none of them.
        """
        if not self.environments:
            return self
        name = row.get("environment")
        if name not in self.environments:
            raise ValueError(
                f"a row names the environment {name!r}; there are: {', '.join(self.environments)}"
            )
        # The environment's own values replace those of the agent.
        return replace(self, environments={}, **self.environments[name])

    def with_both_names(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row that has each of `columns` under both of its names, as rows of training do.

        A program or an environment may read either of them. A value that the row has under one name
        only is copied to the other.
        """
        completed = dict(row)
        for name, own_name in self.columns.items():
            if name in row:
                completed.setdefault(own_name, row[name])
            elif own_name in row:
                completed[name] = row[own_name]
        return completed

    def environment_specs(self) -> list[AgentSpec]:
        """Return the form in each of several environments, in order; empty if there is only one."""
        return [self.for_row({"environment": name}) for name in self.environments]

    def create_format(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_of_turn_ids: Sequence[int] | None = None,
    ) -> TextFormat:
        """Return the format of this agent's prompts, turns and observations as tokens.

        Returns:
            [`TextFormat`]: A [`ChatFormat`] unless `prompt_format` is `"text"`.

        Raises:
            `ValueError`: If prompts are conversations and the tokenizer's chat template cannot
                render them, or does not support the tools of `chat_template_kwargs`.
        """
        chat_format: TextFormat
        if self.prompt_format == "text":
            chat_format = TextFormat(tokenizer, self.grammar, end_of_turn_ids, self.trusted_texts)
            # Without a chat template nothing shows the tools to the agent.
            if self.chat_template_kwargs.get("tools"):
                logger.warning(
                    "prompts that are text go through no chat template: the prompts themselves "
                    "must show the agent its tools and how to call them"
                )
        else:
            chat_format = ChatFormat(
                tokenizer,
                self.grammar,
                self.chat_template_kwargs,
                end_of_turn_ids,
                self.trusted_texts,
            )
        # Chat templates may refuse system messages, or drop them.
        if self.system_prompt:
            chat_format.check_system(
                "leave the system prompt out, and put its text into the prompt template"
            )

        # Each of several environments is checked with its own tools.
        if not self.environments:
            chat_format.check_tools()
        for name, spec in zip(self.environments, self.environment_specs(), strict=True):
            chat_format.environments[name] = spec.create_format(tokenizer, end_of_turn_ids)
        return chat_format

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt messages of a row.

        They are its own `prompt` if it has one, else the filled-in template. A text is one user
        message; [`TextFormat.prompt`] makes text of it again.
        """
        prompt: str | Sequence[Message] | None = row.get("prompt")
        template = self.for_row(row).prompt_template
        if not prompt:
            prompt = fill_template(template, row["question"])
        messages: Sequence[Message]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_system(self.system_prompt, messages, join=self.join_system_prompt)

    def save(self, folder: str | Path) -> None:
        """Write `agentic_prompting.json` into `folder`, all or nothing."""
        # A grammar is saved with its name, by which `load` finds the class.
        saved = {"format": _FORMAT, **asdict(self), "grammar": _grammar_to_json(self.grammar)}
        saved["environments"] = {}
        for name, values in self.environments.items():
            grammar = _grammar_to_json(values.get("grammar", self.grammar))
            saved["environments"][name] = {**values, "grammar": grammar}
        text = json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
        atomic_write(Path(folder) / SPEC_FILE, text)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        grammar: Grammar | Mapping[str, Grammar | None] | None = None,
        name: str | None = None,
    ) -> AgentSpec:
        """Read the file that [`AgentSpec.save`] wrote.

        Args:
            folder (`str` or `Path`): The folder of the file.
            grammar ([`Grammar`] or `Mapping`, *optional*): The grammar, if the file can only name
                it, because it belongs to an environment or is the user's own. With several
                environments a mapping by name.
            name (`str`, *optional*): Read the form of this environment alone, if the agent has
                several.

        Raises:
            `FileNotFoundError`: If there is none: the folder does not hold an agent trained with
                this library.
            `ValueError`: If it was written by a newer version, or is damaged, or lacks the
                environment; the message names the file.
        """
        path = Path(folder) / SPEC_FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{path} not found: {folder} was not saved by a trainer of this library. "
                "Pass an AgentSpec to use another model."
            )
        # Reading a damaged file can fail anywhere.
        try:
            return cls._read(json.loads(path.read_text(encoding="utf-8")), path, grammar, name)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            # The errors of `_read` name the file already.
            if str(error).startswith(str(path)):
                raise
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); save the agent again"
            ) from None

    @classmethod
    def _read(
        cls,
        saved: dict[str, Any],
        path: Path,
        grammar: Grammar | Mapping[str, Grammar | None] | None,
        name: str | None,
    ) -> AgentSpec:
        if saved.pop("format") > _FORMAT:
            raise ValueError(f"{path} was written by a newer agentic-prompting; upgrade to read it")

        # Read one of several environments as the only one.
        environments = saved.pop("environments", {})
        if environments and name is not None:
            if name not in environments:
                raise ValueError(f"{path}: the agent was trained without the environment {name!r}")
            saved = saved | environments[name]
            environments = {}

        # Restore the grammars. The outer one is the first environment's.
        if environments:
            grammars = grammar if isinstance(grammar, Mapping) else {}
            for environment, values in environments.items():
                own_grammar = grammars.get(environment)
                values["grammar"] = _grammar_from_json(values["grammar"], own_grammar, path)
            first_environment = next(iter(environments.values()))
            saved["grammar"] = first_environment["grammar"]
        else:
            saved["grammar"] = _grammar_from_json(saved["grammar"], grammar, path)

        # Create the spec, and check the types of its values.
        saved["limits"] = Limits(**saved["limits"])
        spec = cls(**saved, environments=environments)
        for field_name in ("prompt_template", "system_prompt"):
            if not isinstance(getattr(spec, field_name) or "", str):
                raise TypeError(f"{field_name} is not a string")
        for field_name in ("chat_template_kwargs", "sampling", "columns"):
            if not isinstance(getattr(spec, field_name), dict):
                raise TypeError(f"{field_name} is not an object")
        return spec


def _grammar_to_json(grammar: Grammar) -> dict[str, Any]:
    """Return a grammar as JSON; the user's own grammar by its name only."""
    class_name = type(grammar).__name__
    saved = {"kind": class_name}
    # The library's own grammars are saved with their arguments.
    grammar_class = find_grammar_class(class_name)
    is_ours = grammar_class is type(grammar)
    if grammar_class is not None and is_ours:
        for argument in fields(grammar_class):
            if argument.init:
                saved[argument.name] = getattr(grammar, argument.name)
    return saved


def _grammar_from_json(
    saved: dict[str, Any], users_grammar: Grammar | Mapping[str, Grammar | None] | None, path: Path
) -> Grammar:
    """Return the grammar of a [`_grammar_to_json`]; the user's own has to be passed."""
    class_name = saved.pop("kind")
    grammar_class = find_grammar_class(class_name)
    if grammar_class is not None:
        # JSON has lists only; a grammar's fields are tuples.
        arguments: dict[str, Any] = {}
        for name, value in saved.items():
            arguments[name] = tuple(value) if isinstance(value, list) else value
        return grammar_class(**arguments)
    # A grammar of the user cannot be restored from its name.
    if type(users_grammar).__name__ != class_name:
        raise ValueError(
            f"{path}: the agent was trained with the grammar {class_name!r}; pass it as grammar=, "
            "or pass the environment that has it, environment= (--environment)"
        )
    return users_grammar  # type: ignore[return-value]


def rollout_from_trace(
    trace: Mapping[str, Any], spec: AgentSpec, chat_format: TextFormat
) -> Rollout:
    """Return the rollout of an agent that writes this trace.

    It is for a warm start, in the token form of training.

    Args:
        trace (`Mapping`): `turns` (`list[str]`), the agent's, and `observations` (`list[str]`), one
            after each turn but the last; beside them the columns of a dataset row (`question`,
            ...).
        spec ([`AgentSpec`]): The form of the agent.
        chat_format ([`ChatFormat`]): Its tokenizer and template.

    Raises:
        `ValueError`: If there is not exactly one observation fewer than turns.
    """
    turns = trace["turns"]
    observations = trace["observations"]
    if len(turns) != len(observations) + 1:
        raise ValueError(
            f"a trace needs one observation fewer than turns, got {len(observations)} and "
            f"{len(turns)}"
        )
    # Begin with the prompt, in the format of the trace's environment.
    chat_format = chat_format.for_row(trace)
    rollout = Rollout(chat_format.prompt_ids(spec.messages(trace)), row=dict(trace))

    # Add the turns and observations as `play` does.
    for text, observation in zip_longest(turns, observations):
        sample = Sample(chat_format.turn_ids(text))
        rollout.add_turn(sample, chat_format.parse(sample.ids))
        if observation is not None:
            ids = chat_format.observation_ids(observation, after=rollout.ids)
            rollout.add_observation(Observation(observation), ids)
    # The last turn decides how the episode ended.
    rollout.status = _STATUS_AFTER[rollout.turns[-1].kind]
    return rollout
