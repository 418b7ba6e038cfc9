"""`PromptAgent.answer(question, refiner=…)`: the agent's system prompt is refined for one question,
then it answers.
"""

import asyncio
from dataclasses import replace

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import LLMEnvironment, PromptAgent
from agentic_prompting.agent import GreedyAnswers
from agentic_prompting.llm import run
from agentic_prompting.refine import LabelVerifier, ProRefiner
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import AgentSpec, FreeText, Limits, Sample, SampleRequest, parse_turn
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import build_policy, world_tokenizer
from support.refine_models import Log, models
from support.tokenizers_for_tests import tokenizer_for

SPEC = AgentSpec(
    system_prompt="find the country",
    grammar=FreeText(),
    limits=Limits(max_turns=1, max_turn_tokens=6),
)


@pytest.fixture(scope="module")
def agent():
    tokenizer = world_tokenizer()
    return PromptAgent(build_policy(tokenizer), tokenizer, LLMEnvironment(Oracle()), SPEC)


def refiner(log, verifier=None, **options):
    return ProRefiner(**models(log, length=15, **options), verifier=verifier)


def prompt_of(agent, rollout):
    return agent.chat_format.tokenizer.decode(rollout.prompt_ids)


def test_the_agent_answers_under_the_refined_prompt(agent):
    log = Log()
    rollout = agent.answer("which country ?", refiner=refiner(log))
    result = rollout.row["refinement"]
    assert result.prompt == "find the country++" and result.initial_prompt == SPEC.system_prompt
    assert (
        next(said[0]["content"] for role, said, _ in log.calls if role == "task")
        == SPEC.system_prompt
    )
    spec = replace(SPEC, system_prompt=result.prompt)
    expected = agent.chat_format.prompt_ids(spec.messages({"question": "which country ?"}))
    assert rollout.prompt_ids == expected != agent.answer("which country ?").prompt_ids
    assert rollout.done and rollout.ids
    assert agent.spec.system_prompt == SPEC.system_prompt  # for this question only


def test_an_answer_can_be_awaited(agent):
    """The same as waiting for it; several are played together."""

    async def two():
        return await asyncio.gather(
            agent.aanswer("which country ?", seed=3), agent.aanswer("which capital ?", seed=4)
        )

    first, second = asyncio.run(two())
    assert (first.ids, second.ids) == (
        agent.answer("which country ?", seed=3).ids,
        agent.answer("which capital ?", seed=4).ids,
    )
    refined = asyncio.run(agent.aanswer("which country ?", refiner=refiner(Log())))
    assert refined.row["refinement"].prompt == "find the country++" and refined.done


RULES = [{"role": "system", "content": "the rules"}, {"role": "user", "content": "?"}]


class Round:
    """An environment that adds a line to the prompt when an episode starts."""

    def __init__(self):
        self.prompts = []

    def reset(self, row):
        self.prompts.append(row["prompt"])
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return {**row, "prompt": f"{prompt} round one"}
        return {**row, "prompt": [*prompt, {"role": "user", "content": "round one"}]}

    def step(self, rollout):
        return None


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("prompt_format", ["chat", "text"])
@pytest.mark.parametrize(
    "prompt", [None, [{"role": "system", "content": "the rules"}, {"role": "user", "content": "?"}]]
)
def test_a_reset_keeps_one_system_prompt(prompt, prompt_format, join):
    """The prompt that an environment's `reset` leaves is complete, in an agent as in training."""
    tokenizer = world_tokenizer()
    environment = Round()
    spec = replace(SPEC, join_system_prompt=join, prompt_format=prompt_format)
    agent = PromptAgent(build_policy(tokenizer), tokenizer, environment, spec)
    row = {"question": "which country ?", **({} if prompt is None else {"prompt": prompt})}
    whole = agent.chat_format.prompt(spec.messages(row))
    (rollout,) = agent.answer_all([row], progress=False)
    assert environment.prompts == [whole]
    assert rollout.prompt_ids == agent.chat_format.prompt_ids(rollout.row["prompt"])
    assert prompt_of(agent, rollout).count(SPEC.system_prompt) == (
        1 if prompt is None or join else 0
    )
    if prompt is None:
        awaited = asyncio.run(agent.aanswer("which country ?"))
        assert awaited.prompt_ids == rollout.prompt_ids


def test_texts_of_an_assigned_form_are_trusted():
    tokenizer = tokenizer_for("qwen3")
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape)
    )
    agent = PromptAgent(model, tokenizer, spec=SPEC)
    agent.spec = replace(SPEC, system_prompt="Write <think> first.")
    prompt_ids = agent.answer("which country ?").prompt_ids
    assert tokenizer.convert_tokens_to_ids("<think>") in prompt_ids


def test_an_accepted_first_answer_leaves_the_prompt_alone(agent):
    rollout = agent.answer(
        "which country ?", seed=3, refiner=refiner(Log(), verifier=lambda query, answer: True)
    )
    alone = agent.answer("which country ?", seed=3)
    assert rollout.row["refinement"].stop_reason == "verified"
    assert (rollout.prompt_ids, rollout.ids) == (alone.prompt_ids, alone.ids)


def test_a_refinement_that_fails_half_way_still_gives_an_answer(agent):
    log = Log(fail_at=set(range(3, 99)))
    rollout = agent.answer("which country ?", refiner=refiner(log))
    result = rollout.row["refinement"]
    assert result.error is not None and result.prompt == "find the country+"
    assert rollout.status != "failed" and rollout.ids


def test_what_cannot_be_refined(agent):
    bare = PromptAgent(
        build_policy(world_tokenizer()), world_tokenizer(), spec=replace(SPEC, system_prompt=None)
    )
    with pytest.raises(ValueError, match="no system prompt to refine"):
        bare.answer("which country ?", refiner=refiner(Log()))
    with pytest.raises(ValueError, match="compares with accepted answers"):
        agent.answer("which country ?", refiner=refiner(Log(), verifier=LabelVerifier(exact_match)))
    with pytest.raises(ValueError, match="query 0 is empty"):
        agent.answer(" ", refiner=refiner(Log()))


def test_eq_8_the_answering_turn_can_be_the_likeliest_one():
    """Every turn of a free-text agent answers: drawn anew with each seed, or the same greedy one."""
    tokenizer = world_tokenizer()
    model = build_policy(tokenizer)
    drawn, greedy = (
        PromptAgent(
            model,
            tokenizer,
            spec=replace(SPEC, sampling={"temperature": 1.0}),
            greedy_answer=chosen,
        )
        for chosen in (False, True)
    )
    seeds = range(4)
    assert len({tuple(drawn.answer("which country ?", seed=seed).ids) for seed in seeds}) > 1
    likeliest = {tuple(greedy.answer("which country ?", seed=seed).ids) for seed in seeds}
    lowest = PromptAgent(model, tokenizer, spec=replace(SPEC, sampling={"temperature": 1e-4}))
    assert likeliest == {tuple(lowest.answer("which country ?").ids)}


def test_eq_8_leaves_requests_drawn():
    asked = []

    class Scripted:
        async def __call__(self, request):
            asked.append(request.greedy)
            return Sample([{True: 7, False: request.seed}[request.greedy]])

    class Reader:
        def parse(self, ids):
            return parse_turn(
                {1: "<think>a</think><interaction_prompt>b</interaction_prompt>"}.get(
                    ids[0], ANSWER
                )
            )

    policy = GreedyAnswers(Scripted(), Reader())
    played = [run(policy(SampleRequest([0], 5, seed))).ids for seed in (1, 2)]
    assert played == [[1], [7]] and asked == [False, False, True]


ANSWER = "<think>a</think><answer>b</answer>"


def test_an_environment_by_name_needs_several(agent):
    with pytest.raises(ValueError, match="environment='shop' would be ignored"):
        agent.answer("which country ?", environment="shop")
