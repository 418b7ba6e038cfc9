"""A program that does what an environment does makes the same rollouts, token for token, with the same seeds."""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agentic_prompting import LLMEnvironment, Program, PromptAgent
from agentic_prompting.programs.session import Session
from agentic_prompting.rollout import FreeText, turn_seed
from agentic_prompting.sandbox import Oracle, as_rows, make_split

STOPS = ["</interaction_prompt>", "</answer>"]
SHARED = DefaultAsyncHttpxClient()


async def asks(row, base_url, api_key):
    """Prompt-R1's loop: the policy asks, the large LLM replies with its whole history, until the policy answers."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=SHARED)
    messages, asked = [{"role": "user", "content": f"question : {row['question']}"}], []
    for turn in range(5):
        said = (await client.chat.completions.create(model="agent", messages=messages, stop=STOPS)).choices[0].message
        if "<answer>" in said.content:
            return said.content.split("<answer>")[1].strip()
        if "<interaction_prompt>" not in said.content or turn == 4:
            return None
        asked += [{"role": "user", "content": said.content.split("<interaction_prompt>")[1].strip()}]
        reply = (await client.chat.completions.create(model="oracle", messages=asked)).choices[0].message
        asked += [{"role": "assistant", "content": reply.content}]
        wrapped = f"<interaction_response>\n{reply.content}\n</interaction_response>"
        messages += [said, {"role": "user", "content": wrapped}]


def test_same_rollouts(asking_policy, monkeypatch):
    rows = [{"question": row["question"]} for row in as_rows(make_split(0)[0][:12])]
    native = PromptAgent.from_pretrained(asking_policy, LLMEnvironment(Oracle())).answer_all(rows, progress=False)

    begin = Session.__init__

    def with_native_seeds(self, rollout, *args, **kwargs):
        begin(self, rollout, *args, **kwargs)
        self.seed_of = lambda call, times: turn_seed(rollout.seed, call.number - 1)

    monkeypatch.setattr(Session, "__init__", with_native_seeds)
    agent = PromptAgent.from_pretrained(asking_policy, Program(asks, llms={"oracle": Oracle()}))
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
