"""Measuring: confidence intervals for every number that is reported."""

from .intervals import Estimate, bootstrap_interval, wilson_interval

__all__ = ["Estimate", "bootstrap_interval", "wilson_interval"]
