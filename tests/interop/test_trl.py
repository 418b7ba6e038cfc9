"""TRL's environment classes."""

import threading

import pytest

from agentic_prompting.interop import (
    TRLEnvironment,
)
from agentic_prompting.llm.loop import gather, run
from support.tool_episodes import Guess, call, step


def test_a_class_of_trl_has_an_instance_per_episode():
    environment = TRLEnvironment(Guess)
    rows = [
        run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], "secret": n}))
        for n in (3, 4)
    ]
    assert rows[0]["prompt"][-1]["content"] == "Play. Guess a number."
    assert step(environment, call("guess", number=4), row=rows[0]).text == "wrong"
    assert step(environment, call("guess", number=4), row=rows[1]).text == "right"
    step(environment, call("guess", number=3), row=rows[0])
    assert run(environment.reward([row["environments"] for row in rows])) == [0.5, 1.0]


def test_a_reset_that_fails_is_an_outage():
    environment = TRLEnvironment(Guess)
    row = run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], "secret": -1}))
    assert "no route" not in str(row["prompt"])
    assert step(environment, call("guess", number=4), row=row).error
    assert run(environment.reward([row["environments"]])) == [None]


class Silent:
    """Without a tool."""

    def reset(self, **row):
        return "hello"


def test_a_class_without_tools_is_named():
    with pytest.raises(ValueError, match="Silent"):
        TRLEnvironment(Silent)

    def look(part: str) -> str:
        """Looks for a part.

        Args:
            part: Its name.
        """
        return part

    assert set(TRLEnvironment(Silent, tools=[look]).tools) == {"look"}


def test_making_an_instance_holds_up_no_other_episode():
    """A class may load something.

    It was made on the event loop of all rollouts, one after the other.
    """
    both = threading.Barrier(2, timeout=20)
    is_first = True

    class Loads(Guess):
        def __init__(self):
            # The first instance only shows the methods.
            if not is_first:
                both.wait()

    environment = TRLEnvironment(Loads)
    is_first = False
    row = {"prompt": [{"role": "user", "content": "Play."}], "secret": 3}
    rows = run(gather([environment.reset(row), environment.reset(row)]))
    assert all(isinstance(each["environments"], Loads) for each in rows)
