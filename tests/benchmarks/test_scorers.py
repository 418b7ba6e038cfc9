"""The scorers against SQuAD's, HotpotQA's and math-verify's own: `benchmarks/fidelity/scorers.py`."""

import pytest

from benchmarks.fidelity import scorers

pytest.importorskip("math_verify", reason="needs the [math] extra")


@pytest.fixture(scope="module")
def differences():
    return scorers.differences()


def test_every_difference_has_a_listed_reason(differences):
    assert [
        difference for difference in differences if difference.reason not in scorers.REASONS
    ] == []


def test_most_pairs_have_the_same_score(differences):
    for name in {difference.scorer for difference in differences}:
        assert sum(one.scorer == name for one in differences) < 0.2 * scorers.PAIRS


def test_math_verify_is_only_contradicted_with_reason(differences):
    """Where math-verify finds an answer right and ours does not, it is a hedge or a very small
    number.
    """
    stricter = [
        difference
        for difference in differences
        if difference.scorer == "math-verify" and difference.reference == 1.0
    ]
    assert {one.reason for one in stricter} <= {"hedge", "small number"}


def test_a_wrong_scorer_is_found():
    def reason(reply, accepted, reference):
        return scorers.text_reason(reply, accepted, is_hotpot=False)

    pairs = scorers.text_pairs(0)
    disagreements = list(
        scorers.compare(
            "never", pairs, lambda reply, answers: 0.0, scorers.squad_exact_match, reason
        )
    )
    assert any(not one.reason for one in disagreements)
    assert len(pairs) == len(scorers.math_pairs(0)) == scorers.PAIRS


def test_the_references_are_the_official_rules():
    assert scorers.normalised("The  Cat's hat, a") == "cats hat"
    assert scorers.squad_f1("a cat sat", "the cat") == pytest.approx(2 / 3)
    assert scorers.squad_f1("", "") == 0.0
    assert scorers.hotpot_f1("yes it is", "yes") == 0.0 and scorers.hotpot_f1("Yes.", "yes") == 1.0
    assert scorers.math_verify_match("0.5", "\\frac{1}{2}") == 1.0
