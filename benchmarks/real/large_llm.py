"""A real model of 135 million parameters learns to ask a real large LLM, and to answer with its
help (Prompt-R1).

    python -m benchmarks.real.large_llm --base-url http://localhost:8080/v1 --llm qwen2.5-coder-1.5b  # the LLM alone
    python -m benchmarks.real.large_llm --base-url ... --llm NAME --json  # one seed on two cores, about half an hour
    python -m benchmarks.real.large_llm --base-url ... --llm NAME --json --tuning  # the seed that is not reported
    python -m benchmarks.real.large_llm  # the tables, from the records

Appends a record for each seed to `--records`; what is recorded is not run again. The large LLM is
Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) in llama.cpp with one thread, at temperature 0.

Protocol, written before the run of the reported seed.

1. Task. Symbols and numbers of the chemical elements, four questions for each; 128 questions about
   32 elements of which training has none. Measured first: the large LLM asked the questions as they
   are, with the request for a short answer.
2. Agent. SmolLM2-135M-Instruct, out of a package, in the form, the template and the settings of
   `examples/configs/real.yaml`, which were chosen on countries. It first imitates 64 uneven
   demonstrations (8 steps of 8) about elements on which the large LLM is right. Two in five of them
   guess without asking; the others ask, and then half repeat the LLM's whole reply and half give
   the fact alone. Then 12 steps of `PromptR1Trainer` with LoRA, 4 questions of 8 rollouts each; the
   reward is the mean of exact match and token F1.

   What the tuning seeds said, by what the demonstrations show:
   - Guesses in half of them, as in the other runs: the agent asked in .02 of the questions after
     the warm start. Guesses in a quarter: in all of them.
   - The table's sentences as replies, .7 of which are repeated: no answer exact after the warm
     start, and no gain by 23 steps of rewards (.25 on average, first and last).
   - The LLM's own replies, .7 of which are repeated: .36 exact, or 0 with other draws.
   - The LLM's own replies, half of which are repeated (the setting): on seed 1 exact .09 after the
     warm start and .58 after 12 steps (with other draws of the demonstrations), on seed 2 .28 and
     .58, where the large LLM alone reaches .63. Both ask in all questions then.
3. Compared, on the same questions: the published model, the model after its warm start, the trained
   one; the same model trained as long in a single turn, without the large LLM, after a warm start
   of its own on right answers; the large LLM alone.
4. Seed 955; tuning seeds 1 and 2. Seeds 961 and 962 were added after the run of 955, before any
   run of theirs and with nothing changed.
5. Expected: the trained agent asks in at least .9 of the questions; its exact match is above the
   warm start and above training in a single turn, both with an interval above 0 over questions; no
   rollout fails. Against us: any of these is missed. The figures are printed whatever they are.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_prompting import LLMEnvironment, OpenAIChat, PromptAgent
from agentic_prompting.llm import Message, gather, run
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import AgentSpec, FreeText, Limits, Rollout
from agentic_prompting.sandbox.library import (
    Fact,
    Library,
    brief_answer_reward,
    split_by_subject,
    uneven_demonstrations,
)
from benchmarks.lab import correct, log, markdown, model_folder, quiet, share
from benchmarks.real.elements import draw_questions, element_facts
from benchmarks.real.run_options import open_records, protocol_parser
from benchmarks.real.small_agent import connect, imitate, load_published, score_cells, train_adapter

SEEDS = (955, 961, 962)
TUNING_SEEDS = (1, 2)
HELD_OUT_ELEMENTS = 32
TUNING_QUESTIONS = 64
DEMONSTRATIONS = 64
ASKED_FOR_DEMONSTRATIONS = 160  # of which the large LLM knows more than half
GUESSES = 0.4
REPEATS = 0.5
WARM_START_STEPS = 8
STEPS = 12
LLM_SETTINGS = {"temperature": 0, "max_tokens": 40}
SHORT = "Answer in as few words as possible."
SINGLE_TURN_TEMPLATE = "{question} Write only the answer, in as few words as possible."
STAGES = {
    "before": "published",
    "warm": "after the warm start",
    "after": "trained to ask",
    "single": "trained in a single turn",
}


def make_environment(chat: OpenAIChat) -> LLMEnvironment:
    """The large LLM, in the form and with the template that were chosen on countries."""
    environment = LLMEnvironment(chat, temperature=0)
    environment.grammar = Library.grammar
    environment.prompt_template = Library.prompt_template
    return environment


def ask_alone(chat: OpenAIChat, facts: Sequence[Fact]) -> dict[str, str]:
    """The large LLM's own answers: whether each is right, and whether it contains the right one."""
    messages = [[Message(role="user", content=f"{fact.question} {SHORT}")] for fact in facts]
    replies = run(gather([chat(conversation) for conversation in messages]))
    results = {"right": "", "contained": ""}
    for fact, reply in zip(facts, replies, strict=True):
        results["right"] += str(int(exact_match(reply.text, [fact.value])))
        words = reply.text.lower().replace(".", " ").split()
        results["contained"] += str(int(fact.value.lower() in words))
    return results


def make_demonstrations(chat: OpenAIChat, facts: Sequence[Fact], seed: int) -> list[dict[str, Any]]:
    """Uneven demonstrations with the large LLM's own replies, about facts on which it is right."""
    drawn_facts = random.Random(seed).sample(list(facts), ASKED_FOR_DEMONSTRATIONS)
    environment = make_environment(chat)
    conversations = [[Message(role="user", content=fact.question)] for fact in drawn_facts]
    replies = run(
        gather([chat(conversation, **environment.sampling) for conversation in conversations])
    )
    # The reply takes the place of the table's sentence.
    known_facts = []
    for fact, reply in zip(drawn_facts, replies, strict=True):
        if fact.value in re.findall(r"\w+", reply.text):
            known_facts.append(replace(fact, document=reply.text))
    return uneven_demonstrations(known_facts, DEMONSTRATIONS, seed, GUESSES, REPEATS)


# --- a run ----------------------------------------------------------------------------------------


def train(
    model: Path, environment: Any, spec: AgentSpec, facts: Sequence[Fact], folder: Path, seed: int
) -> dict[str, Any]:
    """Train on facts; the result is that of [`train_adapter`]."""
    from agentic_prompting import PromptR1Config, PromptR1Trainer

    rows = [fact.as_row() for fact in facts]
    return train_adapter(
        PromptR1Trainer,
        PromptR1Config,
        model,
        environment,
        brief_answer_reward,
        rows,
        spec,
        folder,
        seed,
        STEPS,
    )


def measure(seed: int, chat: OpenAIChat, folder: Path, questions: int | None) -> dict[str, Any]:
    """The record of a seed: both trainings, and every system on the held-out questions."""
    started = time.monotonic()
    train_facts, test_facts = split_by_subject(element_facts(), HELD_OUT_ELEMENTS, seed)
    if questions is not None:
        test_facts = draw_questions(test_facts, questions, seed)
    alone = ask_alone(chat, test_facts)
    log(f"seed {seed}, the LLM alone: {alone['right'].count('1')} of {len(test_facts)}")
    rows = [fact.as_row() for fact in test_facts]

    # With the large LLM.
    environment = make_environment(chat)
    limits = Limits(max_turns=2, max_turn_tokens=24, max_tokens=200)
    sampling = {"temperature": 0.7}
    spec = AgentSpec(
        Library.prompt_template, grammar=Library.grammar, limits=limits, sampling=sampling
    )
    traces = make_demonstrations(chat, train_facts, seed)
    warm = imitate(
        *load_published(), spec, traces, folder / "asks", seed, max_steps=WARM_START_STEPS
    )
    stages = {
        "before": ask(Path(model_folder("smollm2")), environment, spec, rows, seed),
        "warm": ask(warm, environment, spec, rows, seed),
    }
    log(f"seed {seed}: {figures_of(stages)}")
    asking = train(warm, environment, spec, train_facts, folder / "asks", seed)
    log(f"seed {seed}: rewards {asking['rewards']}")
    stages["after"] = ask(folder / "asks" / "trained", environment, spec, rows, seed)

    # The same without it, in a single turn, after a warm start on right answers.
    alone_spec = AgentSpec(
        SINGLE_TURN_TEMPLATE,
        limits=Limits(max_turns=1, max_turn_tokens=24, max_tokens=24),
        grammar=FreeText(),
        sampling=sampling,
    )
    right_answers = [
        {**fact.as_row(), "turns": [fact.value], "observations": []}
        for fact in draw_questions(train_facts, DEMONSTRATIONS, seed)
    ]
    warm_alone = imitate(
        *load_published(),
        alone_spec,
        right_answers,
        folder / "alone",
        seed,
        max_steps=WARM_START_STEPS,
    )
    single = train(warm_alone, None, alone_spec, train_facts, folder / "alone", seed)
    stages["single"] = ask(folder / "alone" / "trained", None, alone_spec, rows, seed)
    log(f"seed {seed}: {figures_of(stages)}")
    return {
        "seed": seed,
        "llm": chat.model,
        "steps": STEPS,
        "seconds": round(time.monotonic() - started),
        "rewards": asking["rewards"],
        "rewards_single": single["rewards"],
        "failed_in_training": asking["failed"] + single["failed"],
        "relations": [fact.relation for fact in test_facts],
        "llm_alone": alone,
        **stages,
    }


def ask(
    model: Path, environment: Any, spec: AgentSpec, rows: Sequence[Any], seed: int
) -> dict[str, Any]:
    """A character for each held-out question: whether the agent asked, and whether its answer is
    right.
    """
    import torch

    agent = PromptAgent.from_pretrained(
        model, environment, spec, max_batch_size=32, dtype=torch.float32
    )
    rollouts: list[Rollout] = agent.answer_all(list(rows), seed=seed, progress=False)
    example = rollouts[0]
    return {
        "asked": "".join(str(int(bool(rollout.observations))) for rollout in rollouts),
        "correct": correct(rollouts),
        "failed": sum(rollout.error is not None for rollout in rollouts),
        "example": [turn.text for turn in example.turns]
        + [observation.text for observation in example.observations],
    }


# --- figures --------------------------------------------------------------------------------------


def figures_of(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The shares of questions that each stage asked about and answered rightly."""
    return {
        name: (share(stage["asked"]), share(stage["correct"])) for name, stage in stages.items()
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Asked and exact match of every system, and what the trained agent has more, paired by
    question.
    """
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        systems = [(STAGES[stage], record[stage]) for stage in STAGES]
        systems.append(("the large LLM alone", {"correct": record["llm_alone"]["right"]}))
        for title, measured in systems:
            trained = None if title == STAGES["after"] else record["after"]["correct"]
            score, gained = score_cells(measured["correct"], trained)
            asked_share = f"{share(measured['asked']):.3f}" if "asked" in measured else ""
            rows.append((record["seed"], title, asked_share, score, gained))
    return markdown(("seed", "system", "asked", "exact match", "trained to ask minus it"), rows)


def main() -> None:
    parser = protocol_parser(__doc__, "runs/large-llm", "large_llm.jsonl.gz")
    parser.add_argument("--base-url", help="the address of the large LLM")
    parser.add_argument("--llm", default="large LLM", help="its name")
    options = parser.parse_args()
    records = open_records(options)
    if not options.base_url:
        print(table(records.read()))
        return
    quiet()
    options.folder.mkdir(parents=True, exist_ok=True)
    with connect(options.base_url, options.llm, options.folder, **LLM_SETTINGS) as chat:
        if not options.json:
            facts = draw_questions(element_facts(), TUNING_QUESTIONS, TUNING_SEEDS[0])
            alone = ask_alone(chat, facts)
            print(json.dumps({name: share(results) for name, results in alone.items()}))
            return
        seeds = TUNING_SEEDS if options.tuning else SEEDS
        questions = TUNING_QUESTIONS if options.tuning else None
        for (seed,) in records.missing(("seed",), [(seed,) for seed in seeds]):
            records.add(measure(seed, chat, options.folder / str(seed), questions))
    print(json.dumps(records.read()))
    print(table(records.read()))


if __name__ == "__main__":
    main()
