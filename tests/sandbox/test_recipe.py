"""The warm starts that come with the package fit what the sandbox is now, and one that does not fit
is made anew.
"""

from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import _telemetry, send_telemetry
from transformers import AutoModelForCausalLM

from agentic_prompting import LLMEnvironment, PromptAgent
from agentic_prompting.rollout import AgentSpec
from agentic_prompting.sandbox import Oracle, recipe as recipes, setup, traces
from agentic_prompting.sandbox.policy import build_policy
from agentic_prompting.sandbox.results import exact_match_of
from support.marks import LONG


@pytest.fixture
def made(monkeypatch):
    """The recipes that were made here, by an untrained policy."""
    found = []

    def make(recipe, folder):
        found.append(recipe.fingerprint)
        return build_policy(recipe.tokenizer, recipe.seed)

    monkeypatch.setattr(recipes, "make_policy", make)
    return found


@pytest.mark.parametrize("number", [0, 1], ids=["prompt-r1", "espl"])
def test_the_package_comes_with_the_policies_of_its_demonstrations(number):
    recipe = setup.demo_recipes()[number]
    assert recipes.load_shipped(recipe, recipes.SHIPPED[number : number + 1]) is not None, (
        "run: make policies"
    )


def test_they_are_small():
    assert sum(file.stat().st_size for file in recipes.SHIPPED) <= 1.6e6


def test_a_demonstration_makes_no_warm_start(made, tmp_path, capsys):
    sandbox = setup.prepare_sandbox(tmp_path, setup.DEMO_SEED)
    assert made == [] and "from the package" in capsys.readouterr().out
    held = recipes.load_shipped(setup.demo_recipes()[0], recipes.SHIPPED).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(sandbox.model).state_dict()
    assert all(torch.equal(weights, held[name]) for name, weights in saved.items())
    assert AgentSpec.load(sandbox.model) == sandbox.spec


def test_one_that_no_longer_fits_is_made_anew_and_that_is_said(made, tmp_path, capsys, monkeypatch):
    fits = setup.demo_recipes()[0].fingerprint
    monkeypatch.setattr(setup, "DEFAULT_MIX", {**traces.DEFAULT_MIX, "bare": 0.1})
    setup.prepare_sandbox(tmp_path, setup.DEMO_SEED)
    assert len(made) == 1 and made[0] != fits
    assert "no warm start in the package fits this recipe" in capsys.readouterr().out
    setup.prepare_sandbox(tmp_path, setup.DEMO_SEED)
    assert len(made) == 1, "what is in the run's folder is used again"


def test_a_warm_start_of_another_seed_is_refused(made, tmp_path):
    """It was used again, whatever it had been made for: held-out questions may be among what it has
    learned.
    """
    setup.prepare_sandbox(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"warm_start was made from other inputs \(seed, "):
        setup.prepare_sandbox(tmp_path, seed=2)
    with pytest.raises(ValueError, match="steps"):
        setup.prepare_sandbox(tmp_path, seed=1, warm_start_steps=9)
    with pytest.raises(ValueError, match="data"):
        setup.prepare_sandbox(tmp_path, seed=1, n_test=64)
    assert len(made) == 1
    # One of an older version does not say what it was made from.
    (tmp_path / "warm_start" / "made_from.json").unlink()
    setup.prepare_sandbox(tmp_path, seed=2)


def test_a_fingerprint_is_of_everything_that_a_warm_start_depends_on(monkeypatch):
    recipe = setup.sandbox_recipe(setup.make_split(0, 8)[0], 0, 2)
    first, *others = recipe.world.countries
    moved = replace(recipe.world, countries=(replace(first, currency="franc"), *others))

    def with_other_traces(n, rng):
        imitated, plain = recipe.traces(n, rng)
        return [*imitated[:-1], imitated[0]], plain

    changes = [
        {"world": moved},
        {"spec": replace(recipe.spec, prompt_template="question : question : {question}")},
        {"traces": with_other_traces},
        {"steps": 3},
        {"copying_steps": 3},
        {"seed": 1},
        {"drawn_by": 1},
    ]
    found = [recipe.fingerprint, *(replace(recipe, **change).fingerprint for change in changes)]
    for name, changed in (("SFT", {"learning_rate": 1e-3}), ("ARCHITECTURE", {"hidden_size": 64})):
        monkeypatch.setattr(recipes, name, {**getattr(recipes, name), **changed})
        found.append(replace(recipe).fingerprint)
    assert len(set(found)) == len(found)
    again = setup.sandbox_recipe(setup.make_split(0, 8)[0], 0, 2)
    monkeypatch.undo()
    assert again.fingerprint == recipe.fingerprint, "and of nothing else"


def test_a_policy_is_shipped_as_it_was_made(tmp_path):
    recipe = setup.sandbox_recipe(setup.make_split(0, 8)[0], 0, 1)
    policy = recipes.make_policy(recipe, tmp_path / "sft")
    file = tmp_path / "policy.npz"
    recipes.ship(policy, recipe, file)
    held = recipes.load_shipped(recipe, [file]).state_dict()
    assert all(torch.equal(weights, held[name]) for name, weights in policy.state_dict().items())
    assert recipes.load_shipped(replace(recipe, seed=1), [file]) is None


def test_a_run_in_the_sandbox_pings_nobody(made, tmp_path, monkeypatch):
    """TRL's trainers send a ping when they are constructed."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: pytest.fail("a ping"))
    setup.prepare_sandbox(tmp_path, 0, n_test=8, warm_start_steps=1)
    send_telemetry("trl/any")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [pytest.param(setup.DEMO_SEED, marks=LONG)])
def test_the_one_made_anew_scores_as_the_shipped_one(tmp_path, monkeypatch, seed):
    shipped = setup.prepare_sandbox(tmp_path / "shipped", seed)
    monkeypatch.setattr(recipes, "SHIPPED", ())
    anew = setup.prepare_sandbox(tmp_path / "anew", seed)
    environment = LLMEnvironment(Oracle(seed=seed))
    old, new = (
        exact_match_of(
            PromptAgent.from_pretrained(one.model, environment).answer_all(
                list(one.test), progress=False
            )
        )
        for one in (shipped, anew)
    )
    assert old.low <= new.mean <= old.high and new.low <= old.mean <= new.high, (old, new)
