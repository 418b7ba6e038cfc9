"""Agents of real frameworks train as they are, as commands in interpreters of their own (`make
foreign`).

Each row has a style, in which a scripted policy writes its turns; in the row without one the tiny
policy samples.
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    Workspace,
    exact_match_reward,
)
from agentic_prompting.harnesses import CommandProgram
from agentic_prompting.rollout import Sample, read_rollouts
from support.programs import byte_tokenizer, called
from support.training import rows_learned, samples_in, vars_for

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("foreign")
KENYA = '{"country": "Kenya"}'
STYLES = {
    "plain": called("currency_of", KENYA),
    "think": "<think>\nI look it up.\n</think>\n\n" + called("currency_of", KENYA),
    "messy": (
        '  I look  it up.\n\n<tool_call>{"arguments":{ "country":"Kenya"},"name":"currency_of"}</tool_call> '
    ),
    "parallel": called("currency_of", '{"country": "Peru"}') + "\n" + called("currency_of", KENYA),
    "broken": called("currency_of", '{"country": Kenya}'),
    "sampled": None,
}
"""How the policy calls the tool, by the style of a row."""
ROWS = [
    {"question": "Which currency has Kenya?", "answers": ["shilling"], "style": style}
    for style in STYLES
]

# By framework: its environment, and what becomes of rollouts by style: status, calls, token
# sequences.
TOOL = ("answered", 2, 1)
TWICE = ("answered", 3, 1)
USUAL = {
    **dict.fromkeys(("plain", "think", "messy", "parallel"), TOOL),
    "broken": TWICE,
    "sampled": ("answered", 1, 1),
}
FRAMEWORKS = {
    # A call that cannot be read ends the graph without a text.
    "langgraph": ("langgraph", {**USUAL, "broken": ("malformed", 1, 1)}),
    # A reply that was cut at its limit ends the command with an exception.
    "agents_responses": ("openai-agents", {**USUAL, "sampled": ("failed", 1, 1)}),
    "agents_chat": ("openai-agents", USUAL),
    "pydantic_ai": ("pydantic-ai", USUAL),
    # It writes calls as Python's `repr` into a text of its own, so nothing of ours comes back as it
    # was. Four replies without a call stay in its history, and it then asks for an answer with
    # another system prompt.
    "smolagents": (
        "smolagents",
        {
            **{style: (status, calls, calls) for style, (status, calls, _) in USUAL.items()},
            "sampled": ("answered", 5, 2),
        },
    ),
}


class WatchedProgram(CommandProgram):
    """A program whose policy is scripted where its row has a style.

    Keeps the samples and the rollouts.
    """

    def __init__(self, command, answers_by_tool):
        super().__init__(command, timeout=300, workspace=Workspace(shows=[str(SCRIPTS)]))
        self.answers_by_tool = answers_by_tool
        self.samples = []
        self.played = []

    async def play_episode(self, rollout, policy, chat_format, limits):
        style = rollout.row["style"]
        is_right = not any(
            one.row["style"] == style for one in self.played
        )  # the first of each group
        self.played.append(rollout)
        decode = chat_format.tokenizer.decode
        encode = chat_format.tokenizer

        async def sample(request):
            if STYLES[style] is None:
                made = await policy(replace(request, max_new_tokens=8))
            else:
                text = self._turn(
                    style, is_right, decode(request.context).partition("has Kenya?")[2]
                )
                made = Sample([*encode(text)["input_ids"], encode.eos_token_id])
            self.samples.append((rollout.seed, tuple(request.context), tuple(made.ids)))
            return made

        return await super().play_episode(rollout, sample, chat_format, limits)

    def _turn(self, style, is_right, read):
        """The policy answers with what it has read, so the result of the tool must have come back."""
        if "Kenya uses the shilling" not in read:
            return STYLES["plain"] if style == "broken" and "rror" in read else STYLES[style]
        answer = "shilling" if is_right else "florin"
        thought = "<think>\nIt says so.\n</think>\n\n" if style == "think" else ""
        return thought + (
            called("final_answer", f'{{"answer": "{answer}"}}') if self.answers_by_tool else answer
        )


def byte_policy():
    """A tiny random model over bytes, for a template with tools and prompts of some thousand
    tokens.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_agent_of_a_framework_trains_three_steps(framework, tmp_path):
    name, expected = FRAMEWORKS[framework]
    python = Path(os.environ.get("FOREIGN", ROOT / ".venv-foreign")) / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {name} in an environment of its own: make foreign")
    model, tokenizer = byte_policy()
    command = [str(python), str(SCRIPTS / f"ask_{framework}.py"), "{question}"]
    program = WatchedProgram(command, answers_by_tool=framework == "smolagents")
    settings = {
        **vars_for(tmp_path),
        "max_turn_tokens": 400,
        "max_completion_length": 4000,
        "max_steps": 3,
    }
    args = MultiTurnGRPOConfig(**settings, learning_rate=1e-3, logging_steps=1)
    trainer = MultiTurnGRPOTrainer(
        model, exact_match_reward, args, ROWS, processing_class=tokenizer, environment=program
    )
    rows = rows_learned(trainer)
    program.close()

    # Each row was played twice, and ended as this framework ends it.
    seen = [
        (
            rollout.row["style"],
            (rollout.status, rollout.counts["program/calls"], rollout.counts["program/sequences"]),
        )
        for rollout in program.played
    ]
    assert Counter(seen) == Counter(list(expected.items()) * 2)
    records = list(read_rollouts(tmp_path / "rollouts"))
    answers = {record["seed"]: record["answer"] for record in records}
    assert len(answers) == 12
    assert all(
        (answers[one.seed] in ("shilling", "florin")) == (one.status == "answered")
        for one in program.played
        if one.row["style"] != "sampled"
    )

    # Every sample is in the loss, token for token and once; but those of failed rollouts, which are
    # counted.
    drawn = Counter((context, ids) for _, context, ids in program.samples)
    assert not (in_loss := Counter(samples_in(rows))) - drawn
    failed = [one.seed for one in program.played if one.status == "failed"]
    assert drawn - in_loss == Counter(
        (context, ids) for seed, context, ids in program.samples if seed in failed
    )
    assert {one["seed"] for one in records if one["error"] is not None} == set(failed)
    logged = [
        entry["rollout/failed"] for entry in trainer.state.log_history if "rollout/failed" in entry
    ]
    assert len(logged) == 3 and sum(logged) * 4 == pytest.approx(len(failed))
