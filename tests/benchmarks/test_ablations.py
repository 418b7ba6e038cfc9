"""benchmarks/learning/prompt_r1_sandbox.py without its trainings: what its tables say follows from
the records.
"""

import asyncio

import pytest
import yaml

from benchmarks.lab import DEMO, Records
from benchmarks.learning import prompt_r1_sandbox as sandbox, prompt_r1_tables as tables


def records(agent, *scores, environment="home", turns_allowed=None, by="country"):
    """One record a seed; of ten two-hop and ten three-hop questions the first `score` are right."""
    named = {
        "agent": agent,
        "environment": environment,
        "turns_allowed": turns_allowed,
        "by": by,
        "turns": 3.0,
    }
    return [
        {
            **named,
            "seed": seed,
            "correct": "1" * score + "0" * (20 - score),
            "hops": "2" * 10 + "3" * 10,
        }
        for seed, score in enumerate(scores)
    ]


def rows(table):
    """The cells of each line, which are as many as those of the head."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(line) for line in lines} == {len(lines[0])}
    return lines[2:]


def test_the_bounds_of_proposition_3():
    assert tables.transfer_bounds(0.0, 4) == (0.0, 0.0)
    assert tables.transfer_bounds(0.1, 4) == pytest.approx((0.3439, 0.4))
    for noise in (
        0.01,
        0.3,
        1.0,
    ):  # eq 45: the product bound is never the looser one, and one reply is one ε
        tight, linear = tables.transfer_bounds(noise, 4)
        assert tight <= linear
        assert tables.transfer_bounds(noise, 1) == pytest.approx((noise, noise))


def test_intervals_are_over_trainings_and_differences_are_paired_by_seed():
    entries = (
        records("multi", 18, 20)
        + records("sft", 8, 6)
        + records("multi", 0, 0, environment="nobody")
    )
    full, start, alone = rows(tables.results(entries))
    assert full[:4] == [
        "multi-turn GRPO",
        "the oracle",
        "0.950 [0.315, 1.585]",
        "0.900, 1.000",
    ]  # t of 1: 12.7
    assert start[4] == "-0.600 [-1.871, +0.671]"
    assert start[5:7] == ["0.700", "0.000"]
    assert alone[1:3] == [
        "none",
        "0.000 [0.000, 0.000]",
    ]
    assert rows(tables.results(entries[:1]))[0][2] == "0.900 [one seed]"


def test_fewer_turns_are_compared_with_all():
    entries = records("multi", 18, 20) + records("multi", 10, 10, turns_allowed=3)
    five, three = rows(tables.turns(entries))
    assert (five[0], three[0]) == ("5", "3")
    assert three[2] == "0.500, 0.500"
    assert three[4:6] == ["1.000", "0.000"]


def test_transfer_is_judged_by_the_intervals_far_end():
    home = records("multi", 18, 18, 18)
    near = records("multi", 16, 16, 16, environment="noise 0.1") + records(
        "multi", 18, 12, 18, environment="noise 0.05"
    )
    anew = records("multi", 9, 9, 9, environment="reworded")
    wide, narrow, words = rows(tables.transfer(home + near + anew))
    assert wide[0] == "wrong with probability 0.05" and wide[3] == "-0.100 [-0.530, +0.330]"
    assert wide[4:] == ["0.185", "0.200", "no"], "the mean is within, the interval is not"
    assert narrow[3] == "-0.100 [-0.100, -0.100]" and narrow[6] == "yes"
    assert words[3] == "-0.450 [-0.450, -0.450]" and words[4:] == ["", "", ""], (
        "no bound where nothing is known of it"
    )


def test_the_old_split_stands_beside_the_new_one():
    found = records("sft", 7, 7) + records("multi", 18, 18)
    found += records("sft", 7, 7, by="question") + records("multi", 19, 19, by="question")
    lines = rows(tables.splits(found))
    assert [line[0] for line in lines] == ["by country", "by question", "what memory was worth"]
    assert lines[2][2] == "+0.050 [+0.050, +0.050]"


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ((18, 18), "less than .05"),
        ((18, 20), "part of what was shown before was memory"),
        ((17, 19), "2 seed(s) do not decide whether that is less than .05"),
    ],
)
def test_the_first_paragraph_says_no_more_than_its_seeds_do(old, said):
    entries = records("multi", 18, 18) + records("multi", *old, by="question")
    assert tables.headline(entries).endswith(f"higher: {said}.")


# --- the script -----------------------------------------------------------------------------------


def test_every_changed_number_of_the_training_comes_from_the_sandbox_config():
    config = yaml.safe_load(DEMO.read_text())
    assert config.pop("sandbox") is True and config.pop("share_replies") == "step"
    fields = set(sandbox.PromptR1Config.__dataclass_fields__)
    assert set(config) <= fields, "the script passes all of it to PromptR1Config"
    assert all(set(changes) - {"reward"} <= fields for changes in sandbox.TRAININGS.values())


def test_the_protocols_seeds_are_not_those_for_tuning():
    assert sandbox.SEEDS == (601, 602, 603, 604, 605) and sandbox.TUNING_SEED not in sandbox.SEEDS
    settings = [*sandbox.FIRST, *sandbox.LAST]
    assert len(set(settings)) == len(settings)
    assert {agent for agent, _, _ in settings} == set(sandbox.AGENTS)


def test_the_reworded_oracle_says_the_same_in_words_that_the_policy_has():
    from agentic_prompting.llm import complete
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.policy import world_tokenizer

    known = set(world_tokenizer().get_vocab())
    questions = set()
    for capital in ("Nairobi", "Lima", "Oslo", "Rome", "Cairo", "Tokyo"):
        question = f"which country has the capital {capital} ?"
        plain = complete(Oracle(), question).text
        anew = complete(sandbox.Reworded(Oracle()), question).text
        value = sandbox.value_of(plain)
        assert value in anew and anew != plain and set(anew.split()) <= known
        questions.add(anew.replace(value, "{}"))
    assert questions <= {*sandbox.WORDINGS} and len(questions) > 1
    reply = asyncio.run(sandbox.Reworded(Oracle())([{"role": "user", "content": "hello"}]))
    assert sandbox.value_of(reply.text) is None and reply.text == complete(Oracle(), "hello").text


def test_what_is_recorded_is_not_run_again(monkeypatch, tmp_path):
    asked = []

    class Run:
        def __init__(self, seed, by, folder, max_steps):
            self.seed = seed
            self.by = by

        def measure(self, agent, environment, turns):
            asked.append((self.by, self.seed, agent, environment, turns))
            return {"correct": "10", "hops": "23", "turns": 2.0, "answered": 1.0}

    monkeypatch.setattr(sandbox, "Run", Run)
    for _ in range(2):
        sandbox.run_all([1, 2], tmp_path, Records(tmp_path / "records.jsonl.gz"), None)
    assert (
        len(asked)
        == len(set(asked))
        == 2 * len([*sandbox.FIRST, *sandbox.OLD_SPLIT, *sandbox.LAST])
    )
    assert [by for by, *_ in asked].index("question") == 2 * len(sandbox.FIRST), (
        "what the protocol asks for comes first"
    )
    entries = Records(tmp_path / "records.jsonl.gz").read()
    assert {"commit", "date", "machine", "seconds"} <= set(entries[0])


def test_nothing_is_scored_where_a_rollout_failed():
    from agentic_prompting.rollout import Rollout

    rollout = Rollout([1], row={"answers": ["Kenya"]})
    rollout.status = "failed"
    with pytest.raises(RuntimeError, match="1 of 1 rollouts failed"):
        sandbox.outcome_of([rollout])
