"""A service on loopback for tests: the tiny policy's tokenizer, a scripted sampler, a scripted
large LLM.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentic_prompting.agent import PromptAgent
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.rollout import BatchEngine, Sample
from agentic_prompting.serve import Metrics, ServeConfig, Server, Service
from agentic_prompting.serve.answering import AgentAnswers

ASK = (
    "<think> ask the whole question </think> <interaction_prompt> what is the capital of Kenya ? "
    "</interaction_prompt>"
)
END = "<think> done </think> <answer> Nairobi </answer>"


class Scripted:
    """A sampler that asks, and answers after the reply; `turns` replaces both.

    It logs the sizes of its batches.
    """

    def __init__(self, agent, turns=None, seconds=0.0):
        self.format = agent.chat_format
        self.turns = turns
        self.seconds = seconds
        self.batches: list[int] = []

    def __call__(self, requests):
        self.batches.append(len(requests))
        time.sleep(self.seconds)
        return [Sample(self.format.turn_ids(self._turn(request.context))) for request in requests]

    def _turn(self, context):
        if self.turns:
            return self.turns
        return END if "interaction_response" in self.format.tokenizer.decode(context) else ASK


def scripted_agent(policy, chat, turns=None, seconds=0.0) -> PromptAgent:
    """An agent that asks `chat` once in every episode and answers Nairobi."""
    agent = PromptAgent.from_pretrained(policy, LLMEnvironment(chat))
    agent.policy = BatchEngine(Scripted(agent, turns, seconds))
    return agent


def service_of(agent, **limits) -> Service:
    config = ServeConfig(port=0, **limits)
    return Service({"agent": AgentAnswers(agent, config.max_cost_usd)}, config, Metrics())


@contextmanager
def running(service: Service) -> Iterator[str]:
    """The service's address while it runs on a thread of its own, in the real server."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    server = service.server = Server(service)
    thread = threading.Thread(target=server.run, args=[listener], daemon=True)
    thread.start()
    server.has_started.wait(10)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(timeout=15)
        listener.close()
