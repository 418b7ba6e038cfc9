"""Where commands can be confined on this machine, and where not."""

import pytest

from agentic_prompting.harnesses.bubblewrap import why_unavailable

REASON = why_unavailable()
ISOLATION = "none" if REASON else "bwrap"
"""The isolation of tests that are about something else."""

needs_sandbox = pytest.mark.skipif(bool(REASON), reason=f"no sandbox here: {REASON}")
both_isolations = pytest.mark.parametrize(
    "isolation", [pytest.param("bwrap", marks=needs_sandbox), "none"]
)
