"""A task set of `verifiers` whose environment talks with the agent. Imported where the package is."""

import verifiers.v1 as vf
from capitals import Capital, Row


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Talks(vf.Taskset[Capital, vf.TasksetConfig]):
    def load(self):
        return [Capital(Row(prompt="Which country?", answer="Nairobi"), self.config.task)]


class Talk(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and "Nairobi" not in said.last_reply:
                said = await talk.turn(f"You said {said.last_reply} Its capital?")
        talk.trace.record_reward("talked", 0.5)


__all__ = ["Talk", "Talks"]
