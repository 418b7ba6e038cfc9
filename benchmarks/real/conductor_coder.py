"""A real model of 135 million parameters learns to lead a real large LLM, an archive and a
calculator.

    python -m benchmarks.real.conductor_coder --base-url http://localhost:8080/v1 --llm qwen2.5-coder-1.5b --world
    python -m benchmarks.real.conductor_coder --base-url ... --llm NAME --json  # one seed, about an hour on two cores
    python -m benchmarks.real.conductor_coder --base-url ... --llm NAME --json --tuning  # the seed that is not reported
    python -m benchmarks.real.conductor_coder  # the tables, from the records

Appends a record for each seed to `--records`; what is recorded is not run again.

Protocol, written before the run of the reported seed.

1. World. As in `conductor.py`, with a large LLM, Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) in llama.cpp
   with one thread at temperature 0, in the place of the speller: it knows the symbols of the
   chemical elements. Which element was discovered in which invented town only the archive knows, so
   that "What is the chemical symbol of the element that was discovered in Dalgate?" needs both, and
   the LLM reads the archive's reply as a quotation. Held out are towns and 28 elements. In training
   every kind of question is equally frequent. Measured first (seed 1): the LLM alone .219, the
   oracle router of whole questions .516, the right plan .927, because the LLM does not know every
   symbol.
2. Model, warm start, training and comparison are those of the second protocol of `conductor.py`. On
   seed 1 the world, the warm start (exact match .396) and two steps of training were tried here,
   and nothing was changed.
3. Seed 953; tuning seed 1.
4. Expected: the trained model is above the warm start and above the oracle router, both with an
   interval above 0 over questions; at least .9 of its turns are well formed; no rollout fails.
   Against us: any of these is missed. The figures are printed whatever they are. One seed says
   nothing about other seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from agentic_prompting import OpenAIChat, Worker
from agentic_prompting.sandbox.library import Fact, split_by_subject, town_facts
from benchmarks.lab import quiet
from benchmarks.real.conductor import (
    HELD_OUT,
    Archive,
    World,
    calculate,
    draw_question as draw_question_of_functions,
    draw_rows,
    measure,
    print_tables,
    print_world,
)
from benchmarks.real.elements import element_facts
from benchmarks.real.run_options import open_records, protocol_parser
from benchmarks.real.small_agent import connect

SEEDS = (953,)
TUNING_SEEDS = (1,)
TRAIN_ROWS = 256
HELD_OUT_ELEMENTS = 28
LLM_SETTINGS = {
    "system_prompt": "Answer with one word or number, and nothing else.",
    "temperature": 0,
    "max_tokens": 24,
}
SHARES = {"fact": 0.25, "sum": 0.13, "symbol": 0.12, "fact, sum": 0.25, "fact, symbol": 0.25}
"""How often each kind of question is drawn for the test.

In training, every kind is equally frequent.
"""


def make_pool(facts: Sequence[Fact], chat: OpenAIChat) -> dict[str, Worker]:
    return {
        "archive": Worker(Archive(facts), "knows facts about towns", usd=0.002, takes="text"),
        "calculator": Worker(calculate, "works out sums such as 12 + 30", usd=0.001, takes="text"),
        "coder": Worker(chat, "knows chemistry and programming", usd=0.004),
    }


def discoveries(
    towns: Sequence[Fact], elements: Sequence[Fact], generator: random.Random
) -> list[Fact]:
    """Which element was discovered in each town; no model can know it."""
    facts = []
    for town in dict.fromkeys(fact.subject for fact in towns):
        element = generator.choice(elements).subject
        facts.append(
            Fact(
                town,
                "element",
                f"Which element was discovered in {town}?",
                f"The element that was discovered in {town} is {element}.",
                element,
            )
        )
    return facts


def draw_question(
    kind: str, facts: Sequence[Fact], generator: random.Random
) -> tuple[str, str, list[tuple[str, str]]]:
    """A question of a kind of `SHARES`, its answer, and its plan: the worker and the request of
    each call.
    """
    if "symbol" not in kind:
        return draw_question_of_functions(kind, facts, generator)
    symbols = {fact.subject: fact for fact in element_facts() if fact.relation == "symbol"}
    discovery = generator.choice([fact for fact in facts if fact.relation == "element"])
    symbol = symbols[discovery.value]
    if kind == "symbol":
        return symbol.question, symbol.value, [("coder", symbol.question)]
    question = (
        f"What is the chemical symbol of the element that was discovered in {discovery.subject}?"
    )
    plan = [("archive", discovery.question), ("coder", "What is the chemical symbol of #1?")]
    return question, symbol.value, plan


def make_world(seed: int, chat: OpenAIChat) -> World:
    """The world of a seed. The elements of the held-out questions are not those of training."""
    generator = random.Random(f"questions {seed}")
    train_elements, test_elements = split_by_subject(element_facts(), HELD_OUT_ELEMENTS, seed)
    train_facts, test_facts = split_by_subject(town_facts(seed), held_out=32, seed=seed)
    train_facts = train_facts + discoveries(train_facts, train_elements, generator)
    test_facts = test_facts + discoveries(test_facts, test_elements, generator)
    return World(
        pool=make_pool(train_facts + test_facts, chat),
        kinds=tuple(SHARES),
        train=draw_rows(
            train_facts, TRAIN_ROWS, generator, dict.fromkeys(SHARES, 1), draw_question
        ),
        test=draw_rows(test_facts, HELD_OUT, generator, SHARES, draw_question),
    )


def main() -> None:
    parser = protocol_parser(__doc__, "runs/real-conductor-coder", "conductor_coder.jsonl.gz")
    parser.add_argument("--base-url", help="the address of the large LLM")
    parser.add_argument("--llm", default="large LLM", help="its name")
    parser.add_argument("--world", action="store_true", help="measure the workers, train nothing")
    options = parser.parse_args()
    records = open_records(options)
    if options.base_url:
        quiet()
        seeds = TUNING_SEEDS if options.tuning else SEEDS
        with connect(options.base_url, options.llm, options.folder, **LLM_SETTINGS) as chat:
            if options.world:
                for seed in seeds:
                    print_world(seed, make_world(seed, chat))
                return
            for (seed,) in records.missing(("seed",), [(seed,) for seed in seeds]):
                records.add(measure(seed, make_world(seed, chat), options.folder / str(seed)))
    if options.json:
        print(json.dumps(records.read()))
    print_tables(records.read())


if __name__ == "__main__":
    main()
