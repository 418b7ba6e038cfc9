"""A task set of `verifiers` with a field of its own, which may show an image.

Imported where the package is.
"""

import verifiers.v1 as vf
from capitals import Capital, Row

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/kenya.png"}}


def asked(*parts):
    return [{"role": "user", "content": list(parts)}]


class PicturesConfig(vf.TasksetConfig):
    shown: str = "no"


class Pictures(vf.Taskset[Capital, PicturesConfig]):
    def load(self):
        text = [{"type": "text", "text": "The capital"}, {"type": "text", "text": "of Kenya?"}]
        yield Capital(Row(prompt=asked(*text), answer="Nairobi"), self.config.task)
        if self.config.shown == "first":
            yield Capital(Row(prompt=asked(*text, IMAGE), answer="Nairobi"), self.config.task)
        yield Capital(Row(prompt="Which country?", answer="Nairobi"), self.config.task)


class ShowConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Show(vf.Env[ShowConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            await talk.turn()
            if self.config.taskset.shown == "later":
                await talk.turn([vf.UserMessage.model_validate(asked(IMAGE)[0])])


__all__ = ["Pictures", "Show"]
