"""The old name of [`~records.atomic_write`]."""

from ..records import atomic_write as write_whole

__all__ = ["write_whole"]
