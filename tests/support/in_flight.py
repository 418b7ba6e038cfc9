"""Files of groups in flight as a run leaves them."""

from agentic_prompting.trainers.async_rollouts import InFlightFile

IDENTITY = {"seed": 0, "num_generations": 2, "limits": {"max_turns": 5}}


TURN = {
    "ids": [5, 6],
    "logprobs": [-0.5, -0.5],
    "finished": True,
    "drafted": 0,
    "updates": [0, 0],
    "seed": 3,
}


REPLY = {"text": "Nairobi", "seconds": 0.5, "replies": []}


def write(path, groups=2, identity=IDENTITY, policy=7):
    """A file as a run leaves it: each group started, with a turn and a reply of its first rollout."""
    file = InFlightFile(path, identity, policy, resumes=False)
    for number in range(groups):
        file.write({"group": number, "update": 0, "prompts": 11, "metadata": [{}, {}]})
        file.write({"group": number, "rollout": 0, "at": 0, "turn": TURN})
        file.write({"group": number, "rollout": 0, "at": 0, "reply": REPLY})
    return file


def resumed(path, identity=IDENTITY, policy=7, state=None):
    file = InFlightFile(path, identity, policy, resumes=True)
    return file, file.adopt_or_put_aside(state)
