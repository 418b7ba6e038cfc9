"""Rollouts that are played ahead of the weights, across steps and restarts."""

from .async_source import AsyncSource, RolloutGroup, make_async_source
from .in_flight_file import InFlightFile

__all__ = ["AsyncSource", "InFlightFile", "RolloutGroup", "make_async_source"]
