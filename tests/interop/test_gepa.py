"""`interop/gepa.py`: GEPA improves the system prompt of an agent."""

from dataclasses import replace

import pytest

from agentic_prompting import PromptAgent
from agentic_prompting.interop import ToolGrammar
from agentic_prompting.llm import ServerFailed
from agentic_prompting.rewards import exact_match_reward
from agentic_prompting.rollout import (
    AgentSpec,
    Environment,
    FreeText,
    Limits,
    Observation,
    Rollout,
    Sample,
)
from agentic_prompting.sandbox.policy import build_policy, world_tokenizer

gepa = pytest.importorskip("gepa", reason="needs the extra optimizers")

from agentic_prompting.interop.gepa import AgentAdapter  # noqa: E402


class Obedient:
    """An agent that answers what its system prompt names, as `answer_all` of a [`PromptAgent`]
    does.
    """

    spec = AgentSpec(prompt_template="{question}")

    def __init__(self, error=None):
        self.error = error

    def answer_all(self, rows, progress=True):
        rollouts = [Rollout([1], row=dict(row)) for row in rows]
        for rollout in rollouts:
            if self.error:
                rollout.fail(Observation(error=self.error))
                continue
            word = rollout.row["prompt"][0]["content"].split()[-1]
            rollout.add_turn(Sample([1]), ToolGrammar().parse(word))
            rollout.finish("answered")
        return rollouts


def test_gepa_improves_the_prompt_of_an_agent():
    rows = [{"question": f"Capital {n}?", "answers": ["Nairobi"]} for n in range(4)]
    seen = []

    def reflect(prompt):
        seen.append(prompt)
        return "```\nAlways say Nairobi\n```"

    result = gepa.optimize(
        {"system_prompt": "Always say Lima"},
        trainset=rows[:2],
        valset=rows[2:],
        adapter=AgentAdapter(Obedient(), exact_match_reward),
        reflection_lm=reflect,
        reflection_minibatch_size=2,
        max_metric_calls=12,
        raise_on_exception=True,
    )
    assert result.best_candidate["system_prompt"] == "Always say Nairobi"
    assert "Capital 0?" in seen[0] and "Lima" in seen[0]


def test_an_outage_is_no_score_for_gepa():
    adapter = AgentAdapter(Obedient(ServerFailed("down")), exact_match_reward)
    with pytest.raises(ServerFailed):
        adapter.evaluate([{"question": "?", "answers": ["x"]}], {"system_prompt": "Say x"})


class Named(Environment):
    """Adds a column when an episode starts, and ends it at the first request."""

    def reset(self, row):
        return {**row, "episode": row["question"].upper()}

    def step(self, rollout):
        return None


def test_gepas_rows_need_not_be_alike():
    got = {}

    async def reward(prompts, completions, rollout, **columns):
        got.update(columns, prompts=prompts)
        return [1.0] * len(completions)

    rows = [
        {"question": "a"},
        {"question": "b", "answers": ["x"], "rollout": 1, "prompts": 2, "completions": 3},
    ]
    adapter = AgentAdapter(Obedient(), reward)
    assert adapter.evaluate(rows, {"system_prompt": "Say x"}, capture_traces=True).scores == [
        1.0,
        1.0,
    ]
    assert got["answers"] == [None, ["x"]]
    assert [prompt[0]["content"] for prompt in got["prompts"]] == ["Say x"] * 2


@pytest.mark.parametrize("traces", [False, True])
def test_gepa_may_evaluate_nothing(traces):
    adapter = AgentAdapter(Obedient(), lambda **columns: 1 / 0)
    batch = adapter.evaluate([], {"system_prompt": "Say x"}, capture_traces=traces)
    assert batch.outputs == batch.scores == [] and batch.trajectories == ([] if traces else None)
    assert adapter.make_reflective_dataset({}, batch, ["system_prompt"]) == {"system_prompt": []}


@pytest.mark.parametrize("candidate", ["go to Kenya", ""])
@pytest.mark.parametrize("join", [False, True])
def test_a_candidate_replaces_the_agents_system_prompt(candidate, join):
    limits = Limits(max_turns=1, max_turn_tokens=2)
    spec = AgentSpec(
        system_prompt="find the country", grammar=FreeText(), limits=limits, join_system_prompt=join
    )
    tokenizer = world_tokenizer()
    agent = PromptAgent(build_policy(tokenizer), tokenizer, Named(), spec)
    rewarded = []

    def reward(completions, **columns):
        rewarded.append(columns)
        return [0.0] * len(completions)

    rules = [
        {"role": "system", "content": "the rules"},
        {"role": "user", "content": "which country ?"},
    ]
    rows = [{"question": "which country ?"}, {"question": "which country ?", "prompt": rules}]
    batch = AgentAdapter(agent, reward).evaluate(
        rows, {"system_prompt": candidate}, capture_traces=True
    )
    expected = replace(spec, system_prompt=candidate)
    assert [trajectory.prompt_ids for trajectory in batch.trajectories] == [
        agent.chat_format.prompt_ids(expected.messages(row)) for row in rows
    ]
    assert rewarded[0]["episode"] == ["WHICH COUNTRY ?"] * 2, (
        "the columns of a reset reach the reward"
    )
    assert agent.spec is spec


def test_gepa_goes_on_after_an_outage_where_told_to():
    """As the page says: GEPA ends with the error by default, and skips the iteration where it is
    told to.
    """
    rows = [{"question": f"Capital {n}?", "answers": ["Nairobi"]} for n in range(4)]

    class FailsOnce(Obedient):
        """Its second batch fails, which is the first minibatch."""

        def __init__(self, batches):
            self.batches = batches

        def answer_all(self, rows, progress=True):
            self.batches.append(len(rows))
            self.error = ServerFailed("down") if len(self.batches) == 2 else None
            return super().answer_all(rows, progress)

    def improved(**options):
        return gepa.optimize(
            {"system_prompt": "Always say Lima"},
            trainset=rows[:2],
            valset=rows[2:],
            adapter=AgentAdapter(FailsOnce([]), exact_match_reward),
            reflection_lm=lambda prompt: "```\nAlways say Nairobi\n```",
            reflection_minibatch_size=2,
            max_metric_calls=12,
            **options,
        )

    with pytest.raises(ServerFailed):
        improved()
    assert (
        improved(raise_on_exception=False).best_candidate["system_prompt"] == "Always say Nairobi"
    )
