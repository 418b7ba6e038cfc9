"""What is read from the records of a pilot run."""

from agentic_prompting.planning.pilot_figures import PilotFigures
from agentic_prompting.rollout import (
    Observation,
    Rollout,
    RolloutLog,
    Sample,
    parse_turn,
    rollout_record,
)


def test_a_program_pilot_counts_calls_of_large_llms(tmp_path):
    """Its turns have observations as well, which are no calls."""
    rollout = Rollout([1], row={"question": "q"})
    for _ in range(3):
        rollout.add_turn(Sample([5]), parse_turn("<interaction_prompt> more </interaction_prompt>"))
        rollout.add_observation(Observation("found"), [6])
    rollout.counts |= {"program/llm_calls": 2, "program/llm_seconds": 3.0}
    RolloutLog(tmp_path / "rollouts").write(
        [rollout_record(rollout.finish("answered"), mode="train", step=0)]
    )
    figures = PilotFigures.read(tmp_path)
    assert figures.means["calls"] == 2
    assert figures.means["call_seconds"] == 1.5
