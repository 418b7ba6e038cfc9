"""Harness benchmarks without their harnesses: the world, its reward, and the tables."""

from agentic_prompting.rollout import Rollout
from benchmarks.learning import harness_world
from benchmarks.reliability import harnesses


def test_a_world_holds_out_every_thing_once():
    rows, held_out = harness_world.draw_world(1001)
    assert (len(rows), len(held_out)) == (24, 8)
    asked = {row["question"] for row in rows}
    assert asked.isdisjoint(row["question"] for row in held_out)
    assert (
        {row["answer"] for row in held_out}
        == set(harness_world.WORDS)
        == {row["answer"] for row in rows}
    )
    assert not any(row["answer"] in row["question"] for row in rows + held_out)
    assert harness_world.draw_world(1002) != (rows, held_out) == harness_world.draw_world(1001)


def test_only_the_right_word_is_rewarded(tmp_path):
    rollout = Rollout([1], row={"question": "q", "answer": "jade"})
    assert harness_world.right_word(rollout, tmp_path) == 0.0
    for text, reward in (("jade\n", 1.0), ("jade ochre", 0.0), ("", 0.0)):
        (tmp_path / "answer.txt").write_text(text)
        assert harness_world.right_word(rollout, tmp_path) == reward


def test_the_warm_start_imitates_what_was_recorded():
    rows, _ = harness_world.draw_world(1)
    asked = rows[0]["question"]
    parts = [
        (f"<|im_start|>the harness's own prompt<|im_end|>{asked}", False),
        (f"echo {harness_world.WORDS[0]} > answer.txt", True),
        ("no output\n", False),
        ("done", True),
    ]
    model, tokenizer = harness_world.make_policy(1, parts, 2000)
    ids, labels = harness_world._imitated(tokenizer, parts, asked, rows[1], "jade")
    assert rows[1]["question"] in tokenizer.decode(ids) and asked not in tokenizer.decode(ids)
    assert (
        tokenizer.decode([label for label in labels if label != -100])
        == "echo jade > answer.txtdone"
    )
    assert harness_world.warm_start(model, tokenizer, parts, asked, rows, 1, steps=30) < 1.5


def test_the_tables_follow_from_the_records():
    counts = dict.fromkeys(harnesses.COUNTS, 0)
    row = {
        "harness": "pi",
        "dialect": "chat",
        "sequences_per_rollout": 1,
        **counts,
        "give_up_s": 1.5,
        "load": 2.0,
    }
    older = {**row, "lost": 3, "looked_up": []}
    text = harnesses.table(
        [older, {**row, "witness_differences": None, "looked_up": ["a.example", "b.example"]}]
    )
    assert text.splitlines()[2:] == [
        "| pi | chat | 1 | 0 | 0 | 0 | none | 0 | 1.5 (2) | a.example, b.example |"
    ]
    one = {"harness": "pi", "before": 0.5, "failed": 0, "witness_differences": 0}
    (line,) = harness_world.table([{**one, "after": 0.9}, {**one, "after": 1.0}]).splitlines()[2:]
    assert line.startswith("| pi, by messages | 0.500 [0.500, 0.500] | 0.950 [")
    assert line.endswith("| 0 | 0 | 2 |")
