"""Rollouts that are played ahead of the weights, across steps and restarts (`async_lead`).

**The source.** [`AsyncSource`] starts more groups of rollouts than a step trains on. Those that are
not finished stay *in flight* while the weights are updated.

**The log.** The episode of each rollout in flight talks to its policy and environment through an
[`EpisodeLog`], which keeps every turn and every reply, and writes it to this process's
[`InFlightFile`] at once.

**The resume.** A checkpoint has the logs of the groups in flight, and the file has what arrived
later. A resumed run takes the longer log of each episode, if the file belongs to the same run
(`run_identity.py`), and continues these episodes: each goes through its log once more. A log
returns what it holds, and asks policy and environment only for the rest: nothing is sampled or paid
for twice. Some rollouts are replayed from the start (`async/played_anew`): programs, which find
their turns in the log, and groups whose reset cannot be repeated.
"""

from .async_source import AsyncSource, RolloutGroup, make_async_source
from .in_flight_file import InFlightFile

__all__ = ["AsyncSource", "InFlightFile", "RolloutGroup", "make_async_source"]
