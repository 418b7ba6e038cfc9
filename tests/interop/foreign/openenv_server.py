"""A guessing game as an OpenEnv environment, served by the package's own server; prints its port.

Run where it is.
"""

import os
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    said: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret: int = 3, **ignored) -> Told:
        if secret < 0:
            raise ValueError("no such secret")
        self.secret = secret
        return Told(said="Guess a number.")

    def step(self, action: Guess, timeout_s=None, **ignored) -> Told:
        if action.number == 99:
            os._exit(1)
        if action.number > 10:
            raise ValueError("at most 10")
        right = action.number == self.secret
        return Told(said="right" if right else "wrong", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return State()


listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
uvicorn.Server(
    uvicorn.Config(create_fastapi_app(Game, Guess, Told, max_concurrent_envs=8), log_level="error")
).run([listening])
