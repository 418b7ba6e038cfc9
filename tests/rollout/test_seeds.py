"""Seeds: what tells two rollouts apart tells their random numbers apart."""

from agentic_prompting.rollout import rollout_seed, turn_seed


def test_texts_with_one_ending_have_different_seeds():
    first = rollout_seed(0, "what is the currency of the country with airport AMM ?")
    second = rollout_seed(0, "what is the language of the country with airport AMM ?")
    assert first != second


def test_the_order_of_parts_matters():
    assert rollout_seed(1, 2) != rollout_seed(2, 1)
    assert rollout_seed(0, "train", 1) == rollout_seed(0, "train", 1)


def test_seeds_of_runs_stay_as_they_were():
    # Checkpoints and replay caches of earlier versions depend on these numbers.
    assert rollout_seed(42, "train", 3, 0, 7) == 3138528523979885898
    assert rollout_seed(0, "headroom", 8) == 7246774704063590031
    assert turn_seed(5, 1) == 3871919820751948823
