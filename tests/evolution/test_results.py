"""The results of a batch: one match for each combination of prompts."""

from agentic_prompting.evolution import (
    Attempt,
    AttemptText,
    SystemPrompt,
    collect_matches,
    truth_of,
)


def test_each_combination_of_prompts_is_a_match():
    prompts = [SystemPrompt(f"Prompt {number}.", id=number) for number in range(4)]
    # One problem under prompts 0 and 1, then two under 2 and 3, three attempts each.
    slots = [0, 0, 0, 1, 1, 1] + [2, 2, 2, 3, 3, 3] * 2
    rewards = [index / 20 for index in range(17)] + [None]
    texts = [
        AttemptText(f"q{index // 6} as {index}", "truth", f"text {index}") for index in range(18)
    ]
    first, second = collect_matches(
        rewards,
        texts,
        [prompts[number] for number in slots],
        prompts_per_problem=2,
        attempts_per_prompt=3,
    )
    assert [result.prompt.id for result in first] == [0, 1]
    assert [result.prompt.id for result in second] == [2, 3]
    for result in second:
        assert [problem.question for problem in result.problems] == ["q1 as 6", "q2 as 12"]
    attempts = tuple(Attempt(f"text {index}", index / 20) for index in (9, 10, 11))
    assert second[1].problems[0].attempts == attempts
    assert second[1].problems[1].attempts[2].reward is None


def test_a_row_without_answers_says_so():
    """A metric may read other columns, and an empty line would look like an empty answer."""
    assert truth_of({"answers": ["Paris", 4.0]}) == "Paris | 4"
    assert truth_of({"question": "q"}) == truth_of({"answers": []}) == "not given"
