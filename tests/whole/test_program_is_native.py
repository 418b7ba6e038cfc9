"""A program that does what an environment does makes the same rollouts, token for token, with the
same seeds.
"""

from agentic_prompting import LLMEnvironment, Program, PromptAgent
from agentic_prompting.rollout import FreeText
from agentic_prompting.sandbox import Oracle, as_rows, make_split
from benchmarks.learning.agent_programs import asks, native_seeds


def test_same_rollouts(asking_policy):
    rows = [{"question": row["question"]} for row in as_rows(make_split(0)[0][:12])]
    native = PromptAgent.from_pretrained(asking_policy, LLMEnvironment(Oracle())).answer_all(
        rows, progress=False
    )
    agent = PromptAgent.from_pretrained(asking_policy, Program(asks, llms={"oracle": Oracle()}))
    with native_seeds():
        played = agent.answer_all(rows, progress=False)
    assert any(len(one.turns) > 1 and one.status == "answered" for one in native)
    whole = [one for one in native if one.status in ("answered", "out_of_turns")]
    assert len(whole) >= 6
    for one, other in zip(native, played, strict=True):
        assert other.error is None and len(other.sequences) == 1
        if one in whole:
            assert (one.prompt_ids, one.ids, one.mask) == (other.prompt_ids, other.ids, other.mask)
            assert one.answer == (other.answer if one.status == "answered" else None)
    assert isinstance(agent.environment.grammar, FreeText)
