"""A task set of `verifiers`: one reply, its own reward. Imported where the package is."""

import os

import verifiers.v1 as vf


class Row(vf.TaskData):
    answer: str


class Capital(vf.Task[Row]):
    @vf.reward
    async def right(self, trace) -> float:
        if "die" in trace.last_reply:
            os._exit(3)
        if "outage" in trace.last_reply:
            raise RuntimeError("the judge is down")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def replies(self, trace) -> float:
        return trace.num_turns


class Capitals(vf.Taskset[Capital, vf.TasksetConfig]):
    def load(self):
        print("what a task set prints does no harm")
        for country, city in (("Kenya", "Nairobi"), ("Peru", "Lima")):
            row = Row(prompt=f"The capital of {country}?", system_prompt="Be brief.", answer=city)
            yield Capital(row, self.config.task)


__all__ = ["Capitals"]
