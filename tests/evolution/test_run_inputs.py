"""A run of `evolve` is resumed with the inputs that its ratings depend on."""

import json
from pathlib import Path

import pytest

from agentic_prompting.evolution import EvolveConfig, evolve
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rewards import exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, Policy, reflect, run


@pytest.mark.parametrize(
    "changed",
    [
        lambda rows: [*rows[:-1], {**rows[-1], "answers": ["another"]}],
        lambda rows: [*rows, {"question": "Which city is number 9?", "answers": ["city 9"]}],
    ],
)
def test_a_run_resumes_with_its_training_rows(tmp_path, changed):
    path = tmp_path / "state.json"
    resume = lambda rows, config: evolve(  # noqa: E731
        policy, ScriptedChat(reflect), rows, exact_match_reward, ROOT, config, checkpoint=path
    )
    policy = Policy()
    resume(ROWS, EvolveConfig(**{**vars(SETTINGS), "steps": 2}))
    calls = policy.calls
    with pytest.raises(ValueError, match=r"state\.json cannot be resumed: the training rows"):
        resume(changed(ROWS), SETTINGS)
    assert policy.calls == calls
    assert len(resume(ROWS[::-1], SETTINGS).steps) == SETTINGS.steps


@pytest.mark.parametrize("name", ["policy", "reward", "grammar"])
def test_a_run_resumes_with_its_scoring(tmp_path, name):
    """Otherwise held-out scores of one policy, reward or grammar stand beside those of another."""

    class Named(Policy):
        model = "small"

    class Other(Policy):
        model = "large"

    def half_reward(completions, **columns):
        return [0.5] * len(completions)

    path = tmp_path / "state.json"
    config = EvolveConfig(**{**vars(SETTINGS), "steps": 1})
    arguments = {
        "policy": Named(),
        "reference": ScriptedChat(reflect),
        "rows": ROWS,
        "reward": exact_match_reward,
        "prompt": ROOT,
        "config": config,
    }
    evolve(**arguments, checkpoint=path)
    other = {
        "policy": {"policy": Other()},
        "reward": {"reward": half_reward},
        "grammar": {"config": EvolveConfig(**{**vars(config), "grammar": "free"})},
    }
    with pytest.raises(ValueError, match=f"cannot be resumed: the {name} of the saved run"):
        evolve(**{**arguments, **other[name]}, checkpoint=path)


REWARD = """
def reward(completions, answers, price, **columns):
    if DISCOUNT == 0 and Path("broken").exists():
        raise KeyError("price")
    return [float(a[0] in c[0]["content"]) for c, a in zip(completions, answers)]
"""


@pytest.fixture
def resume_with(tmp_path, monkeypatch):
    """Runs and resumes an evolution, with parts that may be changed."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_reward.py"

    def resume(steps, discount=0, price=1, comment="", **settings):
        file.write_text(comment + REWARD.replace("DISCOUNT", str(discount)))
        names = {"__name__": "my_reward", "Path": Path}
        exec(compile(file.read_text(), str(file), "exec"), names)
        rows = [{**row, "price": price} for row in ROWS]
        config = EvolveConfig(**{**vars(SETTINGS), "steps": steps, **settings})
        path = tmp_path / "state.json"
        return evolve(
            Policy(), ScriptedChat(reflect), rows, names["reward"], ROOT, config, checkpoint=path
        )

    return resume


@pytest.mark.parametrize(
    "change, named",
    [
        ({"discount": 1}, "code of the reward"),
        ({"price": 2}, "columns that the reward reads"),
        ({"policy_sampling": {"temperature": 0.5}}, "sampling options"),
        ({"prompt_template": "Q: {question}"}, "prompt_template"),
        ({"prompt_place": "user"}, "prompt_place"),
    ],
)
def test_what_ratings_depend_on_stays(resume_with, change, named):
    """Otherwise ratings of two rewards or two policies stand beside each other."""
    resume_with(1)
    with pytest.raises(ValueError, match=f"cannot be resumed: the {named}"):
        resume_with(2, **change)
    assert len(resume_with(2, comment="# A remark.\n", max_words=99).steps) == 2


def test_a_reward_that_failed_may_be_mended(resume_with):
    """Its earlier steps were paid for."""
    resume_with(1)
    Path("broken").touch()
    with pytest.raises(KeyError):
        resume_with(2)
    assert len(resume_with(2, discount=1).steps) == 2
    with pytest.raises(ValueError, match="code of the reward"):
        resume_with(3, discount=2)


def test_a_state_without_inputs_resumes(tmp_path):
    path = tmp_path / "state.json"
    run(config=EvolveConfig(**{**vars(SETTINGS), "steps": 2}), checkpoint=path)
    state = json.loads(path.read_text())
    del state["inputs"]
    path.write_text(json.dumps(state))
    assert run(checkpoint=path).steps == run().steps
