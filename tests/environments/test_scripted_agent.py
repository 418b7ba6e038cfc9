"""A script plays the agent, to try an environment out."""

from agentic_prompting.environments import Worker, Workers, as_environment
from agentic_prompting.environments.scripted_agent import play_script
from agentic_prompting.rollout import AgentSpec, Observation, TagGrammar

ROWS = [{"question": "what is 2 plus 2 ?", "answers": ["4"]}, {"question": "q", "answers": ["a"]}]


def play(requests=()):
    asked = []

    def step(rollout):
        asked.append(rollout.turns[-1].request)
        return Observation("a reply")

    rollouts = play_script(
        as_environment(step), AgentSpec("{question}", grammar=TagGrammar()), ROWS, requests
    )
    return rollouts, asked


def test_the_question_is_asked_then_answered():
    rollouts, asked = play()
    assert sorted(asked) == sorted(row["question"] for row in ROWS)
    assert [rollout.answer for rollout in rollouts] == ["4", "a"]
    assert rollouts[0].observations[0].text == "a reply"


def test_each_request_is_a_turn():
    tag = TagGrammar().act
    rollouts, asked = play(["one", f"<{tag}>two</{tag}>"])
    assert sorted(asked) == ["one", "one", "two", "two"]
    assert all(len(rollout.turns) == 3 for rollout in rollouts)


def test_every_worker_of_a_conductor_is_asked():
    pool = {"A": Worker(str.upper, takes="text"), "B": Worker(str.title, takes="text")}
    environment = Workers(pool)
    spec = AgentSpec(environment.prompt_template, grammar=environment.grammar)
    (first, _) = play_script(environment, spec, ROWS)
    assert first.observations[0].error is None
    # The order of the workers is drawn.
    assert set(first.observations[0].quotable_texts) == {"WHAT IS 2 PLUS 2 ?", "What Is 2 Plus 2 ?"}
    (named, _) = play_script(environment, spec, ROWS, ['<ask to="B">one</ask>'])
    assert named.observations[0].quotable_texts == ("One",)
