"""The groups in flight of one process, on disk: their starts, and each turn and reply on arrival.

Entries are valid only for the run that wrote them. The file's first line identifies that run, by
the settings that decide what a group is, and by the weights at its beginning. Entries of another
run, and damaged lines, are counted in one warning and not used; they never prevent a resume.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...records import RecordFile, atomic_write
from .episode_log import observation_from_json, sample_from_json
from .run_identity import ENVIRONMENT_CODE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunHeader:
    """The first line of an [`InFlightFile`].

    The keys of the line are the file's format: they stay as they are if an attribute is renamed.

    Args:
        run_id (`str`): The id of the run.
        identity (`dict`): The settings of [`describe_run`].
        initial_weights (`int`): The fingerprint of the weights that the run began with.
    """

    run_id: str
    identity: dict[str, Any]
    initial_weights: int

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain JSON; [`RunHeader.from_json`] gives an equal header back."""
        return {
            "run": self.run_id,
            "identity": self.identity,
            "policy": self.initial_weights,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunHeader:
        """Return the header of a [`RunHeader.to_json`]."""
        return cls(
            run_id=str(record["run"]),
            identity=dict(record["identity"]),
            initial_weights=record["policy"],
        )


@dataclass
class SavedEpisode:
    """The turns and replies that the [`EpisodeLog`] of an earlier process has written."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.turns) + len(self.replies)


@dataclass
class SavedGroup:
    """A group that an earlier process started.

    Args:
        number (`int`): The number of the group.
        started_at (`int`): Weight updates before the group was started.
        prompts_fingerprint (`int`): The fingerprint of its rendered prompts.
        metadata (`list[dict]`): The metadata of each rollout.
        episodes (`dict[int, SavedEpisode]`): The log of each rollout that has one.
    """

    number: int
    started_at: int
    prompts_fingerprint: int
    metadata: list[dict[str, Any]]
    episodes: dict[int, SavedEpisode] = field(default_factory=dict)


class InFlightFile:
    """The file of a process's groups in flight.

    Must be constructed while the run's folder is locked: it may delete or replace the file.

    Args:
        path (`Path`): The file.
        identity (`dict`): Plain settings that decide what a group is; see [`describe_run`].
        initial_weights (`int`): The fingerprint of the weights that this process starts with; see
            [`fingerprint_weights`].
        resumes (`bool`): Whether the entries of an earlier process may be used. Otherwise they are
            deleted.

    Attributes:
        run_id (`str`): The id of the run. A checkpoint stores it, to recognise the run's file.
        saved_groups (`dict[int, SavedGroup]`): The groups that an earlier process has written, by
            number.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], initial_weights: int, resumes: bool
    ):
        self.record_file = RecordFile(path)
        # Convert the settings as the file will, so that they can be compared: tuples become lists.
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.initial_weights = initial_weights
        self.run_id = uuid.uuid4().hex
        self.saved_groups: dict[int, SavedGroup] = {}
        self._lock = threading.Lock()
        self._has_warned = False  # whether a failure to write was logged
        self._header: RunHeader | None = None  # of the run that wrote the file
        # Read what the run has in flight, or begin without entries.
        if resumes:
            self._read()
        else:
            path.unlink(missing_ok=True)
        self._has_header = self._header is not None

    def adopt_or_put_aside(self, checkpoint_state: Mapping[str, Any] | None) -> bool:
        """Continue the run of the entries, under its id; or put them aside if they are another
        run's.

        They are then moved to a file beside this one, with one warning.

        Args:
            checkpoint_state (`dict`, *optional*): `run`, `identity` and `groups` of the checkpoint
                that is resumed. `None`: there is no checkpoint, and the model must still have the
                weights that the run began with.

        Returns:
            `bool`: Whether the entries belong to this run. If not, the groups in flight that the
                checkpoint itself has must not be used, either.
        """
        changes = self._find_changes(checkpoint_state)
        if changes:
            group_numbers = set(self.saved_groups)
            if checkpoint_state is not None:
                group_numbers |= {group["group"] for group in checkpoint_state.get("groups", ())}
            self._put_aside(len(group_numbers), sorted(changes))
            return False

        # Continue the run under its old id.
        if self._header is not None:
            self.run_id = self._header.run_id
        elif checkpoint_state is not None:
            self.run_id = checkpoint_state["run"]
        return True

    def write(self, record: Mapping[str, Any]) -> None:
        """Append an entry. If the disk is full, training continues without the file."""
        with self._lock:
            # The first entry of a run follows its header.
            records = [record]
            if not self._has_header:
                header = RunHeader(self.run_id, self.identity, self.initial_weights)
                records = [header.to_json(), record]
            try:
                self.record_file.append(records)
                self._has_header = True
            except OSError as error:
                if not self._has_warned:
                    logger.warning(
                        "%s cannot be written, training continues without it: %s",
                        self.record_file.path,
                        error,
                    )
                self._has_warned = True

    def delete_groups_before(self, number: int) -> None:
        """Delete the entries of groups that no checkpoint needs any more."""
        # A full disk must not fail the checkpoint: the next one tries again.
        with self._lock, suppress(OSError):
            self.record_file.keep(lambda record: record.get("group", number) >= number)

    # --- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read every whole line; count the others, and rewrite the file without them."""
        path = self.record_file.path
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            logger.warning("%s cannot be read, groups in flight are played again: %s", path, error)
            return

        # Sort the lines into usable and damaged ones.
        lines = content.split(b"\n")
        usable_lines = []
        damaged_line_numbers = []
        for line_number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if self._read_line(line):
                usable_lines.append(line)
            elif line_number < len(lines):
                damaged_line_numbers.append(line_number)
            # Otherwise it is the last line, which has no end: the kill cut it off.

        if damaged_line_numbers:
            logger.warning(
                "%s: %d damaged lines are not used, the first is line %d; their turns and replies "
                "are sampled and paid again",
                path,
                len(damaged_line_numbers),
                damaged_line_numbers[0],
            )

        # Without its header nothing in the file can be attributed to a run.
        if self._header is None:
            usable_lines = []
            self.saved_groups = {}
        usable_content = b"".join(line + b"\n" for line in usable_lines)
        if usable_content != content:
            atomic_write(path, usable_content)

    def _read_line(self, line: bytes) -> bool:
        """Read a line, and return whether it could be used."""
        try:
            record = json.loads(line)
            # The header names the run.
            if "identity" in record:
                self._header = RunHeader.from_json(record)
                return True
            # All other lines belong to a group: its start, or a turn or reply of it.
            number = _check_whole_number(record["group"])
            if "prompts" in record:
                self.saved_groups[number] = SavedGroup(
                    number,
                    started_at=_check_whole_number(record["update"]),
                    prompts_fingerprint=_check_whole_number(record["prompts"]),
                    metadata=[dict(metadata) for metadata in record["metadata"]],
                )
                return True
            return number in self.saved_groups and _add_entry(
                self.saved_groups[number].episodes, record
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False

    def _find_changes(self, checkpoint_state: Mapping[str, Any] | None) -> set[str]:
        """Return what this run has other than the run that wrote the checkpoint or the entries."""
        changes: set[str] = set()
        if checkpoint_state is not None:
            changes |= self._changed_settings(checkpoint_state["identity"])
        if self._header is None:
            return changes

        # The file names its run. Without a checkpoint that names one, too, the weights identify it.
        changes |= self._changed_settings(self._header.identity)
        if checkpoint_state is None:
            if self._header.initial_weights != self.initial_weights:
                changes.add("the weights that the run began with")
        elif self._header.run_id != checkpoint_state["run"]:
            changes.add("the run")
        return changes

    def _changed_settings(self, identity: Mapping[str, Any]) -> set[str]:
        changed = {name for name in self.identity if identity.get(name) != self.identity[name]}
        # Files of older versions do not say which code their replies are from.
        return changed if ENVIRONMENT_CODE in identity else changed - {ENVIRONMENT_CODE}

    def _put_aside(self, group_count: int, changes: Sequence[str]) -> None:
        """Move the entries to a file beside this one, and begin without any.

        Args:
            group_count (`int`): Number of groups of the file and the checkpoint, for the warning.
            changes (`list[str]`): What differs from the run that wrote them.
        """
        path = self.record_file.path
        unused_path = path.with_name(f"{path.stem}.unused{path.suffix}")
        has_file = path.exists()
        logger.warning(
            "%s: %d groups in flight are not used, because this run differs in %s; they are played "
            "again%s",
            path,
            group_count,
            ", ".join(changes),
            f", and the file is kept as {unused_path.name}" if has_file else "",
        )
        # Begin without entries, under a new header.
        self._header = None
        self._has_header = False
        self.saved_groups = {}
        if has_file:
            os.replace(path, unused_path)


def _add_entry(episodes: dict[int, SavedEpisode], record: Mapping[str, Any]) -> bool:
    """Append a turn or reply to its episode, and return whether it was whole and in order.

    Replaces the entry at its index and drops those after it: an earlier process wrote them.
    """
    entry_type: Literal["turn", "reply"] = "turn" if "turn" in record else "reply"
    entry = record[entry_type]
    # A number that is no index, or a field that is missing, raises.
    rollout_index = _check_whole_number(record["rollout"])
    index = _check_whole_number(record["at"])
    is_usable = _is_usable_turn(entry) if entry_type == "turn" else _is_usable_reply(entry)
    if not is_usable:
        return False

    # The entry must follow the others of its episode without a gap.
    episode = episodes.setdefault(rollout_index, SavedEpisode())
    entries = episode.turns if entry_type == "turn" else episode.replies
    if index > len(entries):
        return False  # one before it was lost
    entries[index:] = [entry]

    # A turn has its reply after it, and a reply the next turn: these belonged to the old entry.
    if entry_type == "turn":
        del episode.replies[index:]
    else:
        del episode.turns[index + 1 :]
    return True


def _is_usable_turn(turn: Mapping[str, Any]) -> bool:
    _check_whole_number(turn["seed"])
    sample = sample_from_json(turn)
    # Each token needs a log-probability, and the number of updates of the weights that sampled it.
    logprobs = sample.logprobs or ()
    if not len(sample.ids) == len(logprobs) == len(sample.updates) > 0:
        return False
    for number in (*sample.ids, *sample.updates):
        _check_whole_number(number)
    return all(isinstance(logprob, float | int) for logprob in logprobs)


def _is_usable_reply(reply: Mapping[str, Any]) -> bool:
    observation = observation_from_json(reply)
    return observation is None or isinstance(observation.text, str)


def _check_whole_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
