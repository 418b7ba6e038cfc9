"""Prompt-R1 (arXiv 2511.01016), row by row; see `fidelity.py`."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from agentic_prompting.data import TASKS
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.evaluation import METRICS, semantic_similarity
from agentic_prompting.llm import RoutedChat, ScriptedChat
from agentic_prompting.rewards import (
    PromptR1Reward,
    exact_match,
    normalize_answer,
    token_f1,
)
from agentic_prompting.rollout import (
    Limits,
    Rollout,
    Sample,
    SampleRequest,
    TagGrammar,
    Turn,
    parse_turn,
    play,
    prompt_r1_template,
)
from benchmarks.fidelity.check import Part, Row

EXAMPLES = Path(__file__).parents[2] / "examples"

# --- eq 1-9: the conversation -----------------------------------------------------------------------------------------

THINK = "think"
ASK = "interaction_prompt"
REPLY = "interaction_response"
ANSWER = "answer"


def tagged(tag: str, text: str) -> str:
    return f"<{tag}>{text}</{tag}>"


def turn(thought: str | None, tag: str | None, text: str = "") -> str:
    """A turn as the agent writes it."""
    return ("" if thought is None else tagged(THINK, thought)) + (
        "" if tag is None else tagged(tag, text)
    )


class Letters:
    """A chat format whose tokens are characters, so that token ids can be read."""

    grammar = TagGrammar()

    def for_row(self, row: Mapping[str, Any]) -> Letters:
        return self

    def parse(self, ids: Sequence[int]) -> Turn:
        return parse_turn("".join(map(chr, ids)))

    def observation_ids(self, text: str, after: Sequence[int]) -> list[int]:
        return [ord(character) for character in tagged(REPLY, text)]


@dataclass
class Episode:
    """A scripted agent and a scripted large LLM in the real loop."""

    turns: list[str]
    limits: Limits = Limits()

    def __post_init__(self):
        self.contexts: list[str] = []
        self.asked: list[list[str]] = []
        self.logprobs: list[float] = []
        environment = LLMEnvironment(ScriptedChat(self._reply))
        start = Rollout([ord(character) for character in "q+template "])
        self.rollout: Rollout = asyncio.run(
            play(start, self._policy, environment, Letters(), self.limits)
        )

    async def _policy(self, request: SampleRequest) -> Sample:
        self.contexts.append("".join(map(chr, request.context)))
        ids = [ord(character) for character in self.turns[len(self.contexts) - 1]][
            : request.max_new_tokens
        ]
        logprobs = [-((7 * i) % 5 + 1) / 8 for i in range(len(ids))]
        self.logprobs += logprobs
        return Sample(ids, logprobs, finished=len(ids) == len(self.turns[len(self.contexts) - 1]))

    def _reply(self, messages: Sequence[Any]) -> str:
        self.asked.append([message["content"] for message in messages])
        return f"r{len(self.asked)}"


def interaction() -> Iterator[Row]:
    turns = [turn(f"a{t}", ASK, f"p{t}") for t in (1, 2, 3)] + [turn("end", ANSWER, "y")]
    episode = Episode(turns)
    histories = [["p1"], ["p1", "r1", "p2"], ["p1", "r1", "p2", "r2", "p3"]]
    yield Row(
        "eq 1", "the first request meets an empty history H_0", histories[0], episode.asked[0]
    )
    yield Row(
        "eq 2", "the history grows by the pair of request and reply", histories, episode.asked
    )
    leaked = [text for said in episode.asked for text in said if "a1" in text or "template" in text]
    yield Row("eq 1", "L sees neither thoughts nor the template", [], leaked)
    states = ["q+template "]
    for written, reply in zip(turns, ("r1", "r2", "r3"), strict=False):
        states.append(states[-1] + written + tagged(REPLY, reply))
    yield Row("eq 3", "S begins with the question and the template", states[0], episode.contexts[0])
    yield Row(
        "eq 4-6", "the state is all thoughts, requests and replies so far", states, episode.contexts
    )
    total = sum(episode.logprobs)
    yield Row(
        "eq 7",
        "log pi of a turn is a sum over its thought and its request",
        total,
        sum(episode.rollout.logprobs),
    )
    own = sum(len(written) for written in turns)
    yield Row(
        "eq 9",
        "only S's factors are the policy's: replies are masked",
        own,
        sum(episode.rollout.mask),
    )
    replies = len(tagged(REPLY, "r1")) * 3
    yield Row("eq 9", "... and are in the trajectory", replies, episode.rollout.mask.count(0))
    yield Row(
        "Figure 8",
        "three interactions and an answer",
        ("answered", 3),
        (episode.rollout.status, len(episode.asked)),
    )
    endless = Episode([turn("a", ASK, "p")] * 9)
    yield Row(
        "Table 6",
        "T = 5: four interactions, the fifth turn has to answer",
        (5, 4),
        (len(endless.contexts), len(endless.asked)),
    )
    long = Episode([turn("a" * 3000, ASK, "p")])
    yield Row("Table 6", "a turn ends at 1,024 tokens", 1024, len(long.rollout.ids))
    wordy = Episode([turn("a" * 900, ASK, "p")] * 9, Limits(max_turns=9, max_context=2000))
    yield Row(
        "Table 6",
        "prompt and response together stay within the context",
        True,
        len(wordy.rollout.context) <= 2000,
    )


def routing() -> Iterator[Row]:
    weights = {"m1": 0.7, "m2": 0.2, "m3": 0.1}
    models = {name: ScriptedChat([name]) for name in weights}
    routed = RoutedChat(models, weights)
    drawn = Counter(
        routed.choose([{"role": "user", "content": "q"}], session=str(n)) for n in range(20_000)
    )
    shares = {name: drawn[name] / 20_000 for name in weights}
    yield Row(
        "eq 17", "models are drawn as rho says (20,000 sessions)", weights, shares, within=0.015
    )
    again = {
        routed.choose([{"role": "user", "content": f"p{t}"}], session="one") for t in range(50)
    }
    yield Row("eq 17", "one model for a whole session", 1, len(again))
    asked: list[str] = []
    by_rule = RoutedChat(
        models, lambda question, names: asked.append(question) or names[len(question) % 3]
    )
    chosen = [
        by_rule.choose([{"role": "user", "content": "q" * n}], session=f"s{n}") for n in range(6)
    ]
    yield Row(
        "eq 17",
        "rho may be any function of the question",
        [f"m{n % 3 + 1}" for n in range(6)],
        chosen,
    )


# --- eq 10-13: the reward ---------------------------------------------------------------------------------------------

WEIGHTS = {"alpha": "0.4", "beta": "0.25", "gamma": "0.25", "delta": "0.1", "k": "1"}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def tokens(text: str) -> list[str]:
    """Norm and Tok of eq 11: lower case, without punctuation and articles."""
    letters = [character for character in text.lower() if character not in PUNCTUATION]
    return [word for word in "".join(letters).split() if word not in ARTICLES]


def f1(given: str, gold: str) -> Fraction:
    """eq 11, the overlap found by crossing out."""
    one = tokens(given)
    other = tokens(gold)
    left = list(other)
    for word in one:
        if word in left:
            left.remove(word)
    return Fraction(2 * (len(other) - len(left)), len(one) + len(other))


def reward(told: Sequence[tuple[str, str, str]], golds: Sequence[str]) -> Fraction:
    """eq 10-13 in fractions. A turn is (thought, tag, text); an empty text is an empty element."""
    a, b, g, d, k = (Fraction(value) for value in WEIGHTS.values())
    *before, (thought, tag, text) = told
    requests = sum(bool(t and what == ASK and said) for t, what, said in before)
    parsed = tag == ANSWER
    there = tag == ANSWER and bool(text)
    form = min(k, a * requests + b * parsed + g * there + d * (there and bool(thought)))
    answer = max(f1(text, gold) for gold in golds) if tag == ANSWER else Fraction(0)
    return -k + form + (answer if form == k else 0)


def rewards() -> Iterator[Row]:
    for setting in fields(PromptR1Reward):
        if setting.name in WEIGHTS:
            yield Row(
                "Appendix G",
                f"{setting.name} = {WEIGHTS[setting.name]}",
                float(WEIGHTS[setting.name]),
                setting.default,
            )
    t = ("w", ASK, "p")
    end = ("w", ANSWER, "right")
    bare = ("", ANSWER, "right")
    none = ("w", ANSWER, "wrong")
    golden = {
        "request, answer": [t, end],
        "request, wrong answer": [t, none],
        "request, answer without a thought": [t, bare],
        "answer at once": [end],
        "two requests, answer without a thought": [t, t, bare],
        "three requests": [t, t, t],
        "four requests: the cap k is reached without an answer": [t, t, t, t],
        "a request without a thought does not count": [("", ASK, "p"), end],
    }
    for name, told in golden.items():
        turns = [turn(thought or None, tag, text) for thought, tag, text in told]
        yield Row(
            "eq 10-13",
            name,
            float(reward(told, ["right"])),
            PromptR1Reward().score_turns(turns, ["right"]).total,
        )
    rng = random.Random(0)
    apart = 0
    outside = 0
    words = ["Paris", "the", "a", "Paris,", "PARIS", "city", "An", "of", "42", "U.S."]
    for _ in range(3000):
        golds = [
            " ".join(rng.choices(words[3:], k=rng.randint(1, 4))) + " x"
            for _ in range(rng.randint(1, 3))
        ]
        told = [
            (rng.choice(["", "w", "some thought"]), ASK, rng.choice(["p", "more, please?"]))
            for _ in range(rng.randint(0, 5))
        ]
        if rng.random() < 0.8:
            told.append(
                (rng.choice(["", "w"]), ANSWER, " ".join(rng.choices(words, k=rng.randint(1, 4))))
            )
        if not told:
            continue
        got = (
            PromptR1Reward()
            .score_turns([turn(thought or None, tag, text) for thought, tag, text in told], golds)
            .total
        )
        apart += abs(float(reward(told, golds)) - got) > 1e-9
        outside += not -1 - 1e-9 <= got <= 1 + 1e-9
    yield Row("eq 10-13", "3,000 random trajectories: rewards that differ", 0, apart)
    yield Row("eq 13", "3,000 random trajectories: outside of [-1, 1]", 0, outside)
    two = PromptR1Reward(k=2.0, alpha=1.0).score_turns(
        [parse_turn(turn("w", ASK, "p"))] * 2 + [parse_turn(turn("w", ANSWER, "x"))], ["x"]
    )
    yield Row(
        "eq 10-13",
        "k = 2, alpha = 1: min(2, 2 + .6), then -2 + 2 + 1",
        (1.0, 2.0),
        (two.total, two.format),
    )


# --- eq 11-12, Appendix F: metrics ------------------------------------------------------------------------------------


def metrics() -> Iterator[Row]:
    for before, after in {
        "The Eiffel Tower!": "eiffel tower",
        "an  APPLE, a day": "apple day",
        "theatre, anthem": "theatre anthem",
        "$1,234.50": "123450",
    }.items():
        yield Row("eq 11", f"Norm({before!r})", after, normalize_answer(before))
    yield Row(
        "eq 11",
        "tokens are a multiset: 'b b c' and 'b b b' share two",
        2 * 2 / 6,
        token_f1("b b c", ["b b b"]),
    )
    yield Row(
        "eq 12",
        "the best of the references counts",
        1.0,
        token_f1("Nairobi", ["Mombasa", "the Nairobi."]),
    )
    rng = random.Random(1)
    apart = 0
    unequal = 0
    words = ["the", "Red", "red", "fox.", "fox", "a", "jumps", "over", "it's", "its"]
    for _ in range(3000):
        one, other = (" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2))
        if not tokens(one) or not tokens(other):
            continue
        apart += abs(float(f1(one, other)) - token_f1(one, [other])) > 1e-12
        unequal += (tokens(one) == tokens(other)) != bool(exact_match(one, [other]))
    yield Row("eq 11", "3,000 random pairs: F1 that differ", 0, apart)
    yield Row("eq 53", "3,000 random pairs: exact matches that differ", 0, unequal)
    common = 2
    given = 3
    gold = 5
    precision = common / given
    recall = common / gold
    f = 2 * precision * recall / (precision + recall)
    yield Row("eq 54-56", "F1 by precision and recall", f, token_f1("p q r", ["p q s t u"]))
    yield Row(
        "eq 11",
        "nothing but an article on both sides: compared as written",
        (1.0, 0.0),
        (token_f1("a", ["A"]), token_f1("the", ["A"])),
    )
    vectors = {"p": (3.0, 4.0), "g": (4.0, 3.0), "o": (1.0, 0.0), "h": (0.0, 2.0)}

    class Encoder:
        def encode(self, texts: Sequence[str], **_: Any) -> Any:
            import numpy as np

            return np.array([vectors[text] for text in texts])

    cosines = [24 / 25, 0.0]
    yield Row(
        "eq 57",
        "SSim: cosines of the embeddings",
        cosines,
        list(semantic_similarity(["p", "o"], [["g"], ["h"]], Encoder())),
    )
    yield Row(
        "Figure 9",
        "Prompt-R1's 'Yes': EM and F1 of 1",
        (1.0, 1.0),
        (exact_match("Yes", ["Yes"]), token_f1("Yes", ["Yes"])),
    )
    for said in ("No, the directors of both films do not share the same nationality.", "No"):
        yield Row(
            "Figure 9",
            f"{said[:24]!r}: EM and F1 of 0",
            (0.0, 0.0),
            (exact_match(said, ["Yes"]), token_f1(said, ["Yes"])),
        )
    yield Row(
        "Appendix F",
        "EM, F1 and SSim can be asked for by name",
        True,
        {"exact_match", "token_f1", "semantic_similarity"} <= set(METRICS),
    )


# --- Tables 1 to 7 ----------------------------------------------------------------------------------------------------


def template() -> Iterator[Row]:
    text = prompt_r1_template()
    yield Row("Table 1", "at most 50 words of thought at first", True, "under 50 words" in text)
    for tag in (THINK, ASK, ANSWER):
        yield Row(
            "Table 1", f"<{tag}> is asked for", True, f"<{tag}>" in text and f"</{tag}>" in text
        )
    yield Row("Table 1", "the question has its place, once", 1, text.count("{question}"))
    first = text.index("At first")
    later = text.index("Read each reply")
    yield Row("Table 1", "the explanation comes before anything else", True, first < later)
    yield Row("Table 1", "no request twice", True, "never send the same one twice" in text)


def table_6() -> Iterator[Row]:
    run = yaml.safe_load((EXAMPLES / "configs" / "qwen3_4b.yaml").read_text(encoding="utf-8"))
    from agentic_prompting import PromptR1Config

    defaults = {setting.name: setting.default for setting in fields(PromptR1Config)}
    gpus = 8
    n = run["num_generations"]
    questions = run["generation_batch_size"] / n
    yield Row("Table 6", "batch size 128 questions", 128, questions)
    yield Row("Table 6", "policy repeat count 5", 5, n)
    a_pass = run["per_device_train_batch_size"] * gpus
    update = a_pass * run["gradient_accumulation_steps"]
    yield Row("Table 6", "micro-batch size per GPU 2", 2, run["per_device_train_batch_size"])
    yield Row("Table 6", "PPO mini-batch size 64 (rollouts an update)", 64, update)
    yield Row("Table 6", "updates a batch: 128 x 5 / 64", 10, run["generation_batch_size"] / update)
    for name, key, value in (
        ("learning rate", "learning_rate", 1e-6),
        ("maximum context length", "max_context", 8192),
        ("maximum response length", "max_completion_length", 8192),
        ("maximum single-turn response length", "max_turn_tokens", 1024),
        ("maximum turns", "max_turns", 5),
        ("training epochs", "num_train_epochs", 1),
    ):
        yield Row("Table 6", f"{name} {value:g}: the run's file", value, run[key])
        yield Row("Table 6", f"{name} {value:g}: the trainer's default", value, defaults[key])
    yield Row("Table 6", "agent Qwen3-4B", "Qwen/Qwen3-4B", run["model_name_or_path"])
    yield Row(
        "eq 15",
        "clip 1 +- 0.2, KL 0.001 (released script)",
        (0.2, 0.001),
        (run["epsilon"], run["beta"]),
    )
    yield Row(
        "eq 15",
        "a mean over each trajectory's tokens, then over trajectories",
        "grpo",
        run["loss_type"],
    )
    yield Row(
        "eq 15", "the KL term has no importance ratio", False, defaults["use_bias_correction_kl"]
    )
    yield Row("eq 14", "advantages are standardised in the group", "group", run["scale_rewards"])
    asking = Rollout([1])
    asking.add_turn(Sample([1]), parse_turn(turn("w", ASK, "p")))
    said = asyncio.run(LLMEnvironment(ScriptedChat(["r" * 5000])).step(asking))
    yield Row(
        "Appendix G", "a reply of at most 2,048 characters (released code)", 2048, len(said.text)
    )


def data() -> Iterator[Row]:
    rows = TASKS["prompt_r1"].expected_rows
    yield Row("Appendix D", "5,120 training rows of each of eight sets", 8 * 5120, rows["train"])
    sets = {name: n for name, n in rows.items() if name.startswith("test/")}
    yield Row("Appendix D", "twelve sets for evaluation", 12, len(sets))
    names = [
        "2wiki",
        "hotpot",
        "gsm8k",
        "dapo",
        "musique",
        "popqa",
        "booksum",
        "writingprompts",
        "mathqa",
        "squad",
        "triviaqa",
        "xsum",
    ]
    missing = [name for name in names if not any(name in one.casefold() for one in sets)]
    yield Row("4.1", "the twelve sets by name", [], missing)
    yield Row("Appendix D", "128 rows of each", {128}, set(sets.values()))
    table = yaml.safe_load(
        (EXAMPLES / "configs" / "eval_prompt_r1_table2.yaml").read_text(encoding="utf-8")
    )
    yield Row("Tables 2-3", "every set has its row", 12, len(set(table["tasks"])))
    columns = {
        "baseline",
        "baseline_qwen3_4b",
        "sft",
        "cot_qwen3_4b",
        "cot",
        "grpo_single_turn",
        "opro",
        "textgrad",
        "gepa",
        "prompt_r1",
    }
    yield Row(
        "Tables 2-3",
        "every column of the table is a system",
        set(),
        columns - set(table["systems"]),
    )
    yield Row("Appendix G", "three runs", 3, table["runs"])
    ablations = yaml.safe_load(
        (EXAMPLES / "configs" / "eval_prompt_r1_table4.yaml").read_text(encoding="utf-8")
    )
    without = {"without_environment", "without_rl", "without_agent", "prompt_r1"}
    yield Row(
        "Table 4",
        "full, without environment, RL, agent",
        set(),
        without - set(ablations["systems"]),
    )
    yield Row("Table 4", "on the twelve sets", 12, len(set(ablations["tasks"])))
    swapped = yaml.safe_load(
        (EXAMPLES / "configs" / "eval_prompt_r1_table5.yaml").read_text(encoding="utf-8")
    )
    used = [
        (system.get("folder"), system.get("environment"))
        for system in swapped["systems"].values()
        if "folder" in system
    ]
    yield Row("Table 5", "two trained agents x two environments", 4, len(set(used)))
    yield Row(
        "Table 5",
        "on four sets of another kind",
        4,
        sum("ood" in task for task in swapped["tasks"]),
    )
    # A figure of Table 2 over 128 questions is a multiple of 100 / 128 up to its two decimals.
    printed = [48.44, 44.53, 97.66, 26.56, 18.75, 28.13]
    fits = [min(abs(100 * i / 128 - value) for i in range(129)) <= 0.0051 for value in printed]
    yield Row(
        "Table 2",
        "Prompt-R1's EM are multiples of 1/128, as many questions as we ask",
        ([True] * 6, 128),
        (fits, table["n"]),
    )


def averages() -> Iterator[Row]:
    from benchmarks.paper_tables.estimates import mean_of_means

    for at, metric, values, printed in (
        ("Table 2", "EM", [48.44, 44.53, 97.66, 26.56, 18.75, 28.13], 44.01),
        ("Table 2", "F1", [54.41, 52.31, 97.66, 26.56, 26.31, 33.77, 26.50, 22.11], 42.45),
        ("Table 2", "SSim", [60.87, 38.54], 49.71),
        ("Table 3", "EM", [70.31, 52.34, 19.53], 47.39),
        ("Table 3", "F1", [76.91, 61.59, 29.28, 25.76], 48.39),
    ):
        got = mean_of_means([[value] for value in values], n_resamples=10).mean
        yield Row(
            at,
            f"average {metric} of Prompt-R1 over the sets that report it",
            printed,
            got,
            within=0.0051,
        )


def table_7() -> Iterator[Row]:
    from benchmarks.paper_tables.training import TABLE_7, train_sft

    for name, value in (
        ("per_device_train_batch_size", 4),
        ("gradient_accumulation_steps", 8),
        ("learning_rate", 1e-4),
        ("num_train_epochs", 3),
        ("lr_scheduler_type", "cosine"),
        ("warmup_steps", 0.1),
        ("bf16", True),
    ):
        yield Row("Table 7", f"SFT: {name} {value}", value, TABLE_7[name])
    yield Row(
        "Table 7",
        "SFT: LoRA of rank 8",
        8,
        inspect.signature(train_sft).parameters["lora_rank"].default,
    )


PARTS: list[Part] = [
    interaction,
    routing,
    rewards,
    metrics,
    template,
    table_6,
    table_7,
    data,
    averages,
]
UNTESTED = {
    "eq 8 (the likeliest answer of all texts)": "no decoder finds it; the final turn is sampled as in training",
    "eq 14-15 (advantages and gradient)": "need a policy: tests/trainers/test_grpo.py holds TRL's loss to NumPy",
    "eq 16 (training with one environment)": "nothing to compute: the environment is an argument",
    "Propositions 1-3, eq 18-52": "statements about models in expectation; docs/lab/prompt_r1.md has the sandbox's",
    "Tables 2-5, Figures 4-6 (scores)": "need Qwen3-4B and the large LLMs",
    "Table 6 (eight A100)": "hardware",
}
