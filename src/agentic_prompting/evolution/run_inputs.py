"""The inputs of [`evolve`] on which the ratings of a run depend, compared when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..records import digest
from ..rewards.reward_columns import required_columns
from ..versions import code_version, row_version
from .results import question_of, truth_of
from .scoring import Reward
from .settings import EvolveConfig

_OTHER_RUN = "or use another checkpoint file (--output-dir) for another run"

# Inputs that an error can quote.
_READABLE_INPUTS = ("policy", "reward", "grammar", "prompt_template", "prompt_place")

# Inputs that are saved as digests, in the words of the error.
_DIGESTS_IN_WORDS = {
    "policy_sampling": "the sampling options of the policy are",
    "reward_columns": "the columns that the reward reads are",
    "policy_code": "the code of the policy is",
    "reward_code": "the code of the reward is",
}


def describe_run_inputs(
    policy: object,
    reward: Reward,
    rows: Sequence[Mapping[str, Any]],
    eval_rows: Sequence[Mapping[str, Any]],
    config: EvolveConfig,
) -> dict[str, Any]:
    """Return the inputs of a run as plain JSON, which its checkpoint keeps.

    Args:
        policy (`object`), reward (`Callable`), config ([`EvolveConfig`]): As in [`evolve`].
        rows (`Sequence[Mapping]`), eval_rows (`Sequence[Mapping]`): The problems as mappings.

    Returns:
        `dict`: `None` for an input that is not compared.
    """
    # A local model has no name: its `model` is the network.
    policy_name = getattr(policy, "model", None)
    # The options of the run come on top of those of the model.
    policy_sampling: dict[str, Any] = {}
    for options in (getattr(policy, "sampling", None), config.policy_sampling):
        if isinstance(options, Mapping):
            policy_sampling.update(options)
    return {
        "rows": _summarize_rows(rows),
        "eval_rows": _summarize_rows(eval_rows),
        "policy": policy_name if isinstance(policy_name, str) else None,
        "reward": getattr(reward, "__name__", type(reward).__name__),
        "grammar": type(config.grammar).__name__,
        "prompt_template": config.prompt_template,
        "prompt_place": config.prompt_place,
        # Digests, because sampling options may hold secrets.
        "policy_sampling": digest(policy_sampling),
        "reward_columns": _summarize_columns(rows, required_columns(reward)),
        "policy_code": code_version(policy),
        "reward_code": code_version(reward),
    }


def check_run_inputs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a resumed run has the inputs of the saved one.

    The ratings hold for its training rows, policy, reward, template and grammar only. The held-out
    rows may change, because nothing is learned from them.

    Args:
        saved (`Mapping[str, Any]`), current (`Mapping[str, Any]`): As [`describe_run_inputs`]
            returns them. An input that is missing or `None` is not compared: files of older
            versions lack some.

    Raises:
        `ValueError`: Another input than the held-out rows has changed.
    """
    if _is_changed(saved, current, "rows"):
        raise ValueError(
            "the training rows are not those of the saved run, by question or accepted answers "
            f"({saved['rows']['n']} then, {current['rows']['n']} now): pass the same rows, and "
            f"hold out the same share, {_OTHER_RUN}"
        )
    for name in _READABLE_INPUTS:
        if _is_changed(saved, current, name):
            raise ValueError(
                f"the {name} of the saved run was {saved[name]!r}, not {current[name]!r}: pass the "
                f"same one, {_OTHER_RUN}"
            )
    for name, description in _DIGESTS_IN_WORDS.items():
        if _is_changed(saved, current, name):
            raise ValueError(
                f"{description} not as in the saved run, whose ratings hold for what it had: undo "
                f"the change, {_OTHER_RUN}"
            )


def _is_changed(saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> bool:
    """Return whether both runs have an input, and it differs."""
    saved_value = saved.get(name)
    return None not in (saved_value, current[name]) and saved_value != current[name]


def _summarize_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of rows and a digest of their questions and accepted answers, in any order."""
    contents = sorted((question_of(row), truth_of(row)) for row in rows)
    return {"n": len(rows), "digest": digest(contents)}


def _summarize_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a digest of the columns that a reward needs, in any order of the rows."""
    return digest(sorted(row_version(row, names) for row in rows))
