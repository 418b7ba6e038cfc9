"""Prompt-R1 (arXiv 2511.01016), row by row; see `papers.py`."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agentic_prompting.data import TASKS
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.evaluation import METRICS, semantic_similarity
from agentic_prompting.llm import Message, RoutedChat, ScriptedChat
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

# --- eq 1-9: the conversation ---------------------------------------------------------------------

THINK = "think"
ASK = "interaction_prompt"
REPLY = "interaction_response"
ANSWER = "answer"


def tagged(tag: str, text: str) -> str:
    return f"<{tag}>{text}</{tag}>"


def turn(thought: str | None, tag: str | None, text: str = "") -> str:
    """A turn as the agent writes it; without the element of a thought or tag that is None."""
    elements = []
    if thought is not None:
        elements.append(tagged(THINK, thought))
    if tag is not None:
        elements.append(tagged(tag, text))
    return "".join(elements)


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
        self.contexts: list[str] = []  # before each turn
        self.requests: list[list[str]] = []  # the messages of each call of the large LLM
        self.logprobs: list[float] = []
        environment = LLMEnvironment(ScriptedChat(self._reply))
        start = Rollout([ord(character) for character in "q+template "])
        self.rollout: Rollout = asyncio.run(
            play(start, self._policy, environment, Letters(), self.limits)
        )

    async def _policy(self, request: SampleRequest) -> Sample:
        self.contexts.append("".join(map(chr, request.context)))
        text = self.turns[len(self.contexts) - 1]
        ids = [ord(character) for character in text[: request.max_new_tokens]]
        logprobs = [-((7 * i) % 5 + 1) / 8 for i in range(len(ids))]
        self.logprobs += logprobs
        return Sample(ids, logprobs, finished=len(ids) == len(text))

    def _reply(self, messages: Sequence[Message]) -> str:
        self.requests.append([message["content"] for message in messages])
        return f"r{len(self.requests)}"


def interaction() -> Iterator[Row]:
    turns = [turn(f"a{t}", ASK, f"p{t}") for t in (1, 2, 3)] + [turn("end", ANSWER, "y")]
    episode = Episode(turns)
    histories = [["p1"], ["p1", "r1", "p2"], ["p1", "r1", "p2", "r2", "p3"]]

    # The large LLM's view.
    yield Row(
        "eq 1", "the first request meets an empty history H_0", histories[0], episode.requests[0]
    )
    yield Row(
        "eq 2", "the history grows by the pair of request and reply", histories, episode.requests
    )
    contents = chain.from_iterable(episode.requests)
    leaked = [text for text in contents if "a1" in text or "template" in text]
    yield Row("eq 1", "L sees neither thoughts nor the template", [], leaked)

    # The agent's view.
    states = ["q+template "]
    for text, reply in zip(turns, ("r1", "r2", "r3"), strict=False):
        states.append(states[-1] + text + tagged(REPLY, reply))
    yield Row("eq 3", "S begins with the question and the template", states[0], episode.contexts[0])
    yield Row(
        "eq 4-6", "the state is all thoughts, requests and replies so far", states, episode.contexts
    )

    # The trajectory that is trained on.
    yield Row(
        "eq 7",
        "log pi of a turn is a sum over its thought and its request",
        sum(episode.logprobs),
        sum(episode.rollout.logprobs),
    )
    yield Row(
        "eq 9",
        "only S's factors are the policy's: replies are masked",
        sum(len(text) for text in turns),
        sum(episode.rollout.mask),
    )
    replies = len(tagged(REPLY, "r1")) * 3
    yield Row("eq 9", "... and are in the trajectory", replies, episode.rollout.mask.count(0))
    yield Row(
        "Figure 8",
        "three interactions and an answer",
        ("answered", 3),
        (episode.rollout.status, len(episode.requests)),
    )


def limits() -> Iterator[Row]:
    endless = Episode([turn("a", ASK, "p")] * 9)
    yield Row(
        "Table 6",
        "T = 5: four interactions, the fifth turn has to answer",
        (5, 4),
        (len(endless.contexts), len(endless.requests)),
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

    # rho as weights.
    routed = RoutedChat(models, weights)
    counts: Counter[str] = Counter()
    for number in range(20_000):
        counts[routed.choose([{"role": "user", "content": "q"}], session=str(number))] += 1
    shares = {name: counts[name] / 20_000 for name in weights}
    yield Row(
        "eq 17", "models are drawn as rho says (20,000 sessions)", weights, shares, within=0.015
    )
    session_models = set()
    for number in range(50):
        request = [{"role": "user", "content": f"p{number}"}]
        session_models.add(routed.choose(request, session="one"))
    yield Row("eq 17", "one model for a whole session", 1, len(session_models))

    # rho as a function.
    by_length = RoutedChat(models, lambda question, names: names[len(question) % 3])
    chosen = []
    for number in range(6):
        request = [{"role": "user", "content": "q" * number}]
        chosen.append(by_length.choose(request, session=f"s{number}"))
    yield Row(
        "eq 17",
        "rho may be any function of the question",
        [f"m{n % 3 + 1}" for n in range(6)],
        chosen,
    )


# --- eq 10-13: the reward -------------------------------------------------------------------------

WEIGHTS = {"alpha": "0.4", "beta": "0.25", "gamma": "0.25", "delta": "0.1", "k": "1"}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def tokens(text: str) -> list[str]:
    """Norm and Tok of eq 11: lower case, without punctuation and articles."""
    letters = [character for character in text.lower() if character not in PUNCTUATION]
    return [word for word in "".join(letters).split() if word not in ARTICLES]


def f1(answer: str, gold: str) -> Fraction:
    """eq 11; the overlap is counted by crossing out words of the gold answer."""
    answer_tokens = tokens(answer)
    gold_tokens = tokens(gold)
    unmatched = list(gold_tokens)
    for word in answer_tokens:
        if word in unmatched:
            unmatched.remove(word)
    overlap = len(gold_tokens) - len(unmatched)
    return Fraction(2 * overlap, len(answer_tokens) + len(gold_tokens))


Parts = tuple[str, str, str]  # of a turn: thought, tag, text; an empty text is an empty element


def reward(trajectory: Sequence[Parts], golds: Sequence[str]) -> Fraction:
    """eq 10-13 in fractions."""
    alpha, beta, gamma, delta, k = (Fraction(value) for value in WEIGHTS.values())
    *earlier_turns, (last_thought, last_tag, last_text) = trajectory

    # The reward of the format.
    complete_requests = 0
    for thought, tag, text in earlier_turns:
        complete_requests += bool(thought and tag == ASK and text)
    is_answer = last_tag == ANSWER
    has_text = is_answer and bool(last_text)
    has_thought = has_text and bool(last_thought)
    form = alpha * complete_requests + beta * is_answer + gamma * has_text + delta * has_thought
    form = min(k, form)

    # That of the answer counts only with a full reward of the format.
    answer = Fraction(0)
    if is_answer and form == k:
        answer = max(f1(last_text, gold) for gold in golds)
    return -k + form + answer


def score(trajectory: Sequence[Parts], golds: Sequence[str]) -> float:
    """The package's reward of a trajectory; a thought that is empty is left out."""
    turns = [turn(thought or None, tag, text) for thought, tag, text in trajectory]
    return PromptR1Reward().score_turns(turns, golds).total


def reward_weights() -> Iterator[Row]:
    for setting in fields(PromptR1Reward):
        if setting.name in WEIGHTS:
            yield Row(
                "Appendix G",
                f"{setting.name} = {WEIGHTS[setting.name]}",
                float(WEIGHTS[setting.name]),
                setting.default,
            )


def reward_examples() -> Iterator[Row]:
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
    for name, trajectory in golden.items():
        expected = float(reward(trajectory, ["right"]))
        yield Row("eq 10-13", name, expected, score(trajectory, ["right"]))


def random_rewards() -> Iterator[Row]:
    rng = random.Random(0)
    differing = 0
    outside = 0
    words = ["Paris", "the", "a", "Paris,", "PARIS", "city", "An", "of", "42", "U.S."]
    for _ in range(3000):
        golds = []
        for _ in range(rng.randint(1, 3)):
            golds.append(" ".join(rng.choices(words[3:], k=rng.randint(1, 4))) + " x")
        trajectory = []
        for _ in range(rng.randint(0, 5)):
            thought = rng.choice(["", "w", "some thought"])
            trajectory.append((thought, ASK, rng.choice(["p", "more, please?"])))
        if rng.random() < 0.8:
            thought = rng.choice(["", "w"])
            answer = " ".join(rng.choices(words, k=rng.randint(1, 4)))
            trajectory.append((thought, ANSWER, answer))
        if not trajectory:
            continue
        total = score(trajectory, golds)
        differing += abs(float(reward(trajectory, golds)) - total) > 1e-9
        outside += not -1 - 1e-9 <= total <= 1 + 1e-9
    yield Row("eq 10-13", "3,000 random trajectories: rewards that differ", 0, differing)
    yield Row("eq 13", "3,000 random trajectories: outside of [-1, 1]", 0, outside)


def other_weights() -> Iterator[Row]:
    request = parse_turn(turn("w", ASK, "p"))
    answer = parse_turn(turn("w", ANSWER, "x"))
    result = PromptR1Reward(k=2.0, alpha=1.0).score_turns([request, request, answer], ["x"])
    yield Row(
        "eq 10-13",
        "k = 2, alpha = 1: min(2, 2 + .6), then -2 + 2 + 1",
        (1.0, 2.0),
        (result.total, result.format),
    )


# --- eq 11-12, Appendix F: metrics ----------------------------------------------------------------


def f1_examples() -> Iterator[Row]:
    normalized = {
        "The Eiffel Tower!": "eiffel tower",
        "an  APPLE, a day": "apple day",
        "theatre, anthem": "theatre anthem",
        "$1,234.50": "123450",
    }
    for text, expected in normalized.items():
        yield Row("eq 11", f"Norm({text!r})", expected, normalize_answer(text))
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


def random_matches() -> Iterator[Row]:
    rng = random.Random(1)
    differing_f1 = 0
    differing_matches = 0
    words = ["the", "Red", "red", "fox.", "fox", "a", "jumps", "over", "it's", "its"]
    for _ in range(3000):
        answer = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        gold = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        if not tokens(answer) or not tokens(gold):
            continue
        differing_f1 += abs(float(f1(answer, gold)) - token_f1(answer, [gold])) > 1e-12
        is_match = tokens(answer) == tokens(gold)
        differing_matches += is_match != bool(exact_match(answer, [gold]))
    yield Row("eq 11", "3,000 random pairs: F1 that differ", 0, differing_f1)
    yield Row("eq 53", "3,000 random pairs: exact matches that differ", 0, differing_matches)


def metrics() -> Iterator[Row]:
    # Two of three tokens are among the five of the gold answer.
    precision = 2 / 3
    recall = 2 / 5
    expected = 2 * precision * recall / (precision + recall)
    yield Row("eq 54-56", "F1 by precision and recall", expected, token_f1("p q r", ["p q s t u"]))
    yield Row(
        "eq 11",
        "nothing but an article on both sides: compared as written",
        (1.0, 0.0),
        (token_f1("a", ["A"]), token_f1("the", ["A"])),
    )
    yield Row(
        "eq 57",
        "SSim: cosines of the embeddings",
        [24 / 25, 0.0],
        list(semantic_similarity(["p", "o"], [["g"], ["h"]], Encoder())),
    )
    yield Row(
        "Figure 9",
        "Prompt-R1's 'Yes': EM and F1 of 1",
        (1.0, 1.0),
        (exact_match("Yes", ["Yes"]), token_f1("Yes", ["Yes"])),
    )
    for answer in ("No, the directors of both films do not share the same nationality.", "No"):
        yield Row(
            "Figure 9",
            f"{answer[:24]!r}: EM and F1 of 0",
            (0.0, 0.0),
            (exact_match(answer, ["Yes"]), token_f1(answer, ["Yes"])),
        )
    yield Row(
        "Appendix F",
        "EM, F1 and SSim can be asked for by name",
        True,
        {"exact_match", "token_f1", "semantic_similarity"} <= set(METRICS),
    )


EMBEDDINGS = {"p": (3.0, 4.0), "g": (4.0, 3.0), "o": (1.0, 0.0), "h": (0.0, 2.0)}


class Encoder:
    """Embeds the four texts of `EMBEDDINGS`."""

    def encode(self, texts: Sequence[str], **options: object) -> np.ndarray:
        return np.array([EMBEDDINGS[text] for text in texts])


# --- Tables 1 to 7 --------------------------------------------------------------------------------


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


def read_config(name: str) -> dict[str, Any]:
    path = EXAMPLES / "configs" / name
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def training_defaults() -> dict[str, Any]:
    from agentic_prompting import PromptR1Config

    return {setting.name: setting.default for setting in fields(PromptR1Config)}


def table_6() -> Iterator[Row]:
    run = read_config("qwen3_4b.yaml")
    defaults = training_defaults()

    # Sizes of batches.
    gpus = 8
    n = run["num_generations"]
    questions = run["generation_batch_size"] / n
    yield Row("Table 6", "batch size 128 questions", 128, questions)
    yield Row("Table 6", "policy repeat count 5", 5, n)
    forward_pass = run["per_device_train_batch_size"] * gpus
    update = forward_pass * run["gradient_accumulation_steps"]
    yield Row("Table 6", "micro-batch size per GPU 2", 2, run["per_device_train_batch_size"])
    yield Row("Table 6", "PPO mini-batch size 64 (rollouts an update)", 64, update)
    yield Row("Table 6", "updates a batch: 128 x 5 / 64", 10, run["generation_batch_size"] / update)

    # Numbers of the table under their names.
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


def loss() -> Iterator[Row]:
    run = read_config("qwen3_4b.yaml")
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
        "eq 15",
        "the KL term has no importance ratio",
        False,
        training_defaults()["use_bias_correction_kl"],
    )
    yield Row("eq 14", "advantages are standardised in the group", "group", run["scale_rewards"])


def replies() -> Iterator[Row]:
    rollout = Rollout([1])
    rollout.add_turn(Sample([1]), parse_turn(turn("w", ASK, "p")))
    observation = asyncio.run(LLMEnvironment(ScriptedChat(["r" * 5000])).step(rollout))
    length = len(observation.text)
    yield Row("Appendix G", "a reply of at most 2,048 characters (released code)", 2048, length)


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
    all_sets = " ".join(sets).casefold()
    missing = [name for name in names if name not in all_sets]
    yield Row("4.1", "the twelve sets by name", [], missing)
    yield Row("Appendix D", "128 rows of each", {128}, set(sets.values()))


def tables_2_and_3() -> Iterator[Row]:
    table = read_config("eval_prompt_r1_table2.yaml")
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


def tables_4_and_5() -> Iterator[Row]:
    ablations = read_config("eval_prompt_r1_table4.yaml")
    without = {"without_environment", "without_rl", "without_agent", "prompt_r1"}
    yield Row(
        "Table 4",
        "full, without environment, RL, agent",
        set(),
        without - set(ablations["systems"]),
    )
    yield Row("Table 4", "on the twelve sets", 12, len(set(ablations["tasks"])))

    swapped = read_config("eval_prompt_r1_table5.yaml")
    combinations = set()
    for system in swapped["systems"].values():
        if "folder" in system:
            combinations.add((system["folder"], system.get("environment")))
    yield Row("Table 5", "two trained agents x two environments", 4, len(combinations))
    yield Row(
        "Table 5",
        "on four sets of another kind",
        4,
        sum("ood" in task for task in swapped["tasks"]),
    )


def multiples() -> Iterator[Row]:
    """A figure of Table 2 over 128 questions is a multiple of 100 / 128 up to its two decimals."""
    printed = [48.44, 44.53, 97.66, 26.56, 18.75, 28.13]
    fits = []
    for value in printed:
        nearest = 100 / 128 * round(value * 128 / 100)
        fits.append(abs(nearest - value) <= 0.0051)
    yield Row(
        "Table 2",
        "Prompt-R1's EM are multiples of 1/128, as many questions as we ask",
        ([True] * 6, 128),
        (fits, read_config("eval_prompt_r1_table2.yaml")["n"]),
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
        average = mean_of_means([[value] for value in values], n_resamples=10).mean
        yield Row(
            at,
            f"average {metric} of Prompt-R1 over the sets that report it",
            printed,
            average,
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
    limits,
    routing,
    reward_weights,
    reward_examples,
    random_rewards,
    other_weights,
    f1_examples,
    random_matches,
    metrics,
    template,
    table_6,
    loss,
    replies,
    table_7,
    data,
    tables_2_and_3,
    tables_4_and_5,
    multiples,
    averages,
]
UNTESTED = {
    "eq 8 (the likeliest answer of all texts)": (
        "no decoder finds it; the final turn is sampled as in training"
    ),
    "eq 14-15 (advantages and gradient)": (
        "need a policy: tests/trainers/test_grpo.py holds TRL's loss to NumPy"
    ),
    "eq 16 (training with one environment)": "nothing to compute: the environment is an argument",
    "Propositions 1-3, eq 18-52": (
        "statements about models in expectation; docs/lab/prompt_r1.md has the sandbox's"
    ),
    "Tables 2-5, Figures 4-6 (scores)": "need Qwen3-4B and the large LLMs",
    "Table 6 (eight A100)": "hardware",
}
