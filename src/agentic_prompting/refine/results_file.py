"""A file of refinement results, so that a run that was stopped can go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..records import RecordFile
from .types import Query, RefinementResult


class ResultsFile:
    """Results of one run, a JSON line each, written as they finish.

    Args:
        path (`str` or `Path`): The file. It is created, with its folders, if it does not exist.
        settings (`str`): Identifies the settings; see [`ProRefiner.digest`].
        version (`str`, *optional*): Identifies code and weights behind the settings; see
            [`ProRefiner.version`]. Results without one are not compared.

    Attributes:
        results (`dict[str, RefinementResult]`): The results that the file already had, by key.
            Those with an error are removed from the file.

    Raises:
        `ValueError`: The file holds something else, or results of other settings. It is left as it
            is.
    """

    def __init__(self, path: str | Path, settings: str, version: str | None = None):
        self._identity = {"settings": settings}
        if version is not None:
            self._identity["version"] = version
        self._records = RecordFile(path)
        self.results: dict[str, RefinementResult] = {}
        # Read what the file has. Results with an error are not kept: their queries run again.
        for number, record in enumerate(self._records, start=1):
            if not {"key", "settings", "error"} <= set(record):
                raise ValueError(
                    f"line {number} of {path} is no refinement result: give another file as output"
                )
            if record["settings"] != settings:
                raise ValueError(
                    f"{path} holds results of other settings or models: give another file as "
                    "output, or go on with the settings it was begun with"
                )
            if record.get("version", version) != version and version is not None:
                raise ValueError(
                    f"{path} holds results of before the code of a function, the weights of a "
                    "local model or the sampling of a client was changed: give another file as "
                    "output, or undo the change"
                )
            # If several results have the same key, the first one counts.
            result = RefinementResult.from_dict(record)
            if result.error is None:
                self.results.setdefault(record["key"], result)
        self._records.keep(lambda record: record["error"] is None)

        # If the file cannot be written, fail before the first call.
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).open("ab").close()

    def add(self, key: str, result: RefinementResult) -> None:
        """Write one result. It has been handed to the operating system when this returns."""
        self._records.append([{"key": key, **self._identity, **result.to_dict()}])


def result_keys(prompt: str, queries: Sequence[Query]) -> list[str]:
    """Return the key of each query in a file: its digest, and a number among equal queries."""
    counts: Counter[str] = Counter()
    keys = []
    for query in queries:
        digest = query.digest(prompt)[:32]
        counts[digest] += 1
        keys.append(f"{digest}-{counts[digest]}")
    return keys
