"""`agentic-prompting evolve` on data of one's own: grammar, reward, advice in the command's words,
nothing learned.
"""

import json
import sys
from typing import get_args

import pytest

from agentic_prompting.data import hold_out, load_task
from agentic_prompting.evolution.operators import FAILURES_IN_WORDS, WITHOUT_ATTEMPT, Reason
from agentic_prompting.llm import Budget, Usage
from support.evolving import reflect
from support.pages import block
from support.servers import LoopbackServer

OWN_REWARD = '''
def score(completions, answers, **columns):
    """1 if an accepted answer stands anywhere in the reply; a little for a reply at all."""
    texts = [one[0]["content"] for one in completions]
    return [1.0 if any(gold in text for gold in golds) else 0.1 for text, golds in zip(texts, answers)]
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with rows and a reward of one's own; the options that name them."""
    (tmp_path / "desk_reward.py").write_text(OWN_REWARD)
    lines = "".join(f"Which colour has flag {i}?,blue\n" for i in range(4))
    (tmp_path / "mine.csv").write_text("request,reply\n" + lines)
    monkeypatch.chdir(tmp_path)
    return [
        "--dataset=mine.csv",
        "--columns=question=request,answer=reply",
        "--steps=2",
        "--problems-per-step=4",
        f"--output-dir={tmp_path / 'out'}",
    ]


@pytest.fixture
def models():
    """Options of a small model that knows nothing until its prompt says "amber", and of one that
    reflects.
    """

    def said(body, number):
        if body["model"] == "large":
            return said.editor(body["messages"])
        if said.same is not None:
            return said.same
        right = "amber" in body["messages"][0]["content"] or number % 3 == 0
        return "It is blue." if right else "say amber"

    said.same = None
    said.editor = reflect
    with LoopbackServer(said) as server:
        urls = ["--policy-base-url", server.base_url, "--reference-base-url", server.base_url]
        said.options = ["--policy-model", "small", "--reference-model", "large", *urls]
        said.server = server
        yield said


def test_the_pointer_to_headroom_repeats_the_limits(run, own, models):
    prices = ["--policy-client=price=1/1", "--reference-client=price=1/1"]
    limits = ["--budget-usd=2.5", "--budget-tokens=100000"]
    words = ["evolve", *own, *models.options, *prices, *limits, "--grammar", "free"]
    (pointer,) = [line for line in run(*words)[1].splitlines() if "prompting headroom" in line]
    assert "--budget-usd 2.5" in pointer and "--budget-tokens 100000" in pointer


def test_the_whole_reply_is_the_answer_and_the_reward_ones_own(run, own, models):
    free = [
        "--grammar",
        "free",
        "--reward",
        "desk_reward:score",
        "--initial-prompt",
        "Name a colour.",
    ]
    status, out, err = run("evolve", *own, *models.options, *free, "--json")
    assert status == 0, err
    record = json.loads(out)
    assert "Always mention amber." in record["prompt"] and record["held_out"] == {}
    assert record["cost_usd"] == sum(usage["cost_usd"] for usage in record["usage"].values())


def test_headroom_is_pointed_to_before_the_first_run(run, own, models, tmp_path):
    words = ["evolve", *own, *models.options, "--grammar", "free"]
    pointer = f"headroom --policy-model small --output-dir {tmp_path / 'out'}"
    # After the least useful budget, and before the first step.
    assert pointer in run(*words, "--steps", 1)[1].splitlines()[1]
    assert pointer not in run(*words)[1], "it goes on"
    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "headroom.json").write_text("{}")
    assert "agentic-prompting headroom" not in run(*words, "--output-dir", measured)[1]
    aside = run(*words, "--output-dir", tmp_path / "aside", "--json")
    assert "agentic-prompting headroom" in aside[2] and json.loads(aside[1])


def test_sampling_of_the_policy_is_an_option(run, own, models):
    run(
        "evolve",
        *own,
        *models.options,
        "--grammar",
        "free",
        "--policy-sampling",
        '{"temperature": 0.3}',
    )
    assert {
        body.get("temperature") for body in models.server.requests if body["model"] == "small"
    } == {0.3}
    status, _, err = run("evolve", *own, *models.options, "--policy-sampling", "0.3")
    assert status == 2 and "policy_sampling" in err


def test_nothing_learned_is_status_3_and_says_what_to_change(run, own, models):
    """The reward wants tags, and the model writes none."""
    status, out, err = run("evolve", *own, *models.options, "--initial-prompt", "Name a colour.")
    last = err.strip().splitlines()[-1]
    assert status == 3 and last.startswith("agentic-prompting: nothing was learned: "), (
        status,
        err,
    )
    assert "grammar" in last
    assert "Name a colour." in out, "the prompt is as it was"


def test_why_nothing_was_learned_is_the_last_line(run, own, models, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # as a terminal shows both
    status, out, _ = run("evolve", *own, *models.options, "--initial-prompt", "Name it.")
    lines = out.strip().splitlines()
    assert status == 3 and any(line.startswith("written to ") for line in lines), lines
    assert "nothing was learned" in lines[-1] and "grammar" in lines[-1], lines[-3:]


def test_advice_names_options(run, own, models):
    models.same = "always the same"
    status, _, err = run(
        "evolve", *own, *models.options, "--grammar", "free", "--reward", "desk_reward:score"
    )
    assert status == 3
    assert "policy_sampling" in err and "reflect_on" in err


def test_an_empty_best_prompt_is_status_3(run, own, models):
    """It began empty, and no child came to be."""
    models.same = "always the same"
    status, out, err = run(
        "evolve", *own, *models.options, "--grammar", "free", "--reward", "desk_reward:score"
    )
    assert status == 3 and "nothing was learned" in err and "by rating:\n\n" not in out


def test_proposing_no_change_is_no_incapability(run, own, models):
    models.editor = lambda messages: "[]"
    words = ["evolve", *own, *models.options, "--grammar", "free", "--reflection", "one_call"]
    words += ["--reflect-on", "imperfect"]
    status, out, err = run(*words)
    assert status == 3 and "proposed no change in 2 attempts" in err
    assert "no usable edit" not in err and "more capable" not in err
    assert "no change proposed in 2, without a usable edit 0" in out
    record = json.loads(run(*words, "--json")[1])
    assert record["attempts"] == {"no_change": 2}


def test_no_change_is_counted_apart_from_unreadable(run, own, models):
    replies = iter(["[]", "I have no idea."])
    models.editor = lambda messages: next(replies)
    words = ["evolve", *own, *models.options, "--grammar", "free", "--reflection", "one_call"]
    status, out, err = run(*words, "--reflect-on", "imperfect")
    assert (
        status == 3 and "no change proposed in 1, without a usable edit 1 (not readable 1)" in out
    )
    assert "1 attempt of the reference LLM had no usable edit" in err
    assert "1 more proposed no change" in err


def test_no_gain_is_said_in_words(run, own, models, tmp_path):
    lines = "".join(f"Which colour has flag {i}?,blue\n" for i in range(10))
    (tmp_path / "mine.csv").write_text("request,reply\n" + lines)
    models.editor = lambda messages: "[]"
    words = ["evolve", *own, *models.options, "--grammar", "free", "--held-out", 0.4]
    words += ["--initial-prompt", "Name a colour."]
    out = run(*words)[1]
    assert "no gain was shown: the best prompt is still the first one" in out
    assert json.loads(run(*words, "--json")[1])["held_out_gain"]["difference"]["mean"] == 0


def test_more_problems_than_rows_are_refused(run, own, models):
    status, _, err = run("evolve", *own, *models.options, "--problems-per-step", 9)
    assert status == 2 and "problems_per_step" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("raise KeyError('gold')", ["own_score:score", "own_score.py:2", "KeyError: 'gold'"]),
        ("return json.dumps(score)", ["own_score:score", "own_score.py:2", "TypeError"]),
        ("return None", ["the reward score", "one number or None for each of the 20", "not None"]),
        ("return 0.5", ["the reward score", "one number or None for each of the 20", "not 0.5"]),
    ],
)
def test_a_reward_that_fails_is_one_line_with_its_name(run, own, models, tmp_path, body, parts):
    source = f"def score(completions, **columns):\n    {body}\n\nimport json\n"
    (tmp_path / "own_score.py").write_text(source)
    status, _, err = run("evolve", *own, *models.options, "--reward", "own_score:score")
    assert (status, err.count("\n")) == (2, 1)
    assert all(part in err for part in parts), err


def test_an_evolved_prompt_is_no_agent(run, own, models, tmp_path):
    """The folder has no weights: the error says what its prompt is for."""
    status, _, err = run("evolve", *own, *models.options, "--grammar", "free", "--json")
    assert status in (0, 3), err
    status, _, err = run("serve", tmp_path / "out", "--sandbox")
    assert (status, err.count("\n")) == (2, 1)
    assert "system_prompt.txt" in err
    status, out, _ = run("doctor", "--run", tmp_path / "out")
    assert status == 1 and "system_prompt.txt" in out


def test_a_stopped_run_says_what_was_not_measured(run, own, models, tmp_path):
    lines = "".join(f"Which colour has flag {i}?,blue\n" for i in range(10))
    (tmp_path / "mine.csv").write_text("request,reply\n" + lines)
    options = ["--grammar", "free", "--held-out", 0.4, "--budget-tokens"]
    status, out, _ = run("evolve", *own, *models.options, *options, 700)
    assert status == 1
    assert "step 1:" in out
    assert "held out: not measured" in out and "--steps 2" in out
    # All steps are done: under a higher limit the prompts are measured.
    status, out, err = run("evolve", *own, *models.options, *options, 10**6)
    assert "held out (4 rows)" in out and "step 1" not in out, err


def test_the_bill_has_interrupted_steps_and_judges(run, own, models, tmp_path):
    # What the account has beside the complete steps of the state.
    account = Budget(path=tmp_path / "out" / "spending.sqlite")
    account.add("policy", Usage(prompt_tokens=10**6, cost_usd=2.0))
    account.add("judge", Usage(prompt_tokens=5, cost_usd=1.0))
    status, out, err = run("evolve", *own, *models.options, "--grammar", "free", "--json")
    assert status in (0, 3), err
    record = json.loads(out)
    assert record["usage"]["policy"]["prompt_tokens"] > 10**6
    assert record["usage"]["judge"]["prompt_tokens"] == 5
    assert record["cost_usd"] == pytest.approx(3.0)


def test_a_share_of_the_rows_is_held_out(run, tmp_path, own, models):
    """The first and the best prompt are tried on it, and nothing is learned from it."""
    lines = "".join(f"Which colour has flag {i}?,blue\n" for i in range(10))
    (tmp_path / "mine.csv").write_text("request,reply\n" + lines)
    options = ["--grammar", "free", "--reward", "desk_reward:score", "--held-out", 0.4]
    options += ["--initial-prompt", "Name a colour."]
    status, out, err = run("evolve", *own, *models.options, *options, "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["first_held_out"]["n"] == record["best_held_out"]["n"] == 4
    assert record["best_held_out"]["mean"] == 1.0 > record["first_held_out"]["mean"]
    gain = record["held_out_gain"]
    first_mean = record["first_held_out"]["mean"]
    assert gain["difference"]["mean"] == pytest.approx(1 - first_mean)
    assert gain["difference"]["low"] > 0 and gain["wins"] == gain["difference"]["n"] == 4

    # Each held-out question is asked under the first and the best prompt only.
    prompts = {}
    for body in models.server.requests:
        if body["model"] == "small":
            system, *_, question = [message["content"] for message in body["messages"]]
            prompts.setdefault(question, set()).add(system)
    rows = load_task("mine.csv", columns={"question": "request", "answer": "reply"})
    _, held_out = hold_out(rows, 0.4)
    asked = {question: prompts[question] for question in held_out["question"]}
    assert set(map(len, asked.values())) == {2}
    status, out, err = run("evolve", *own, *models.options, *options)
    assert "held out (4 rows): the first prompt" in out
    assert "difference, paired: +" in out and "over 4 questions, 4 better, 0 worse" in out
    assert "no gain was shown" not in out
    report_page = run("report", tmp_path / "out", "--no-pictures")
    assert report_page[0] == 0, report_page
    page = next((tmp_path / "out").rglob("*.html")).read_text()
    assert "difference, paired: +" in block(page, "lineage")["gain"]
    status, _, err = run("evolve", *own, *models.options, *options, "--eval-task", "mine.csv")
    assert status == 2 and "--held-out" in err and "--eval-task" in err


def test_every_reason_of_a_failed_attempt_has_words():
    outcomes = {"child", "no_change", *WITHOUT_ATTEMPT}
    assert FAILURES_IN_WORDS.keys() == set(get_args(Reason)) - outcomes
