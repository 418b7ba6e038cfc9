"""What the pictures share: colours that stay apart for every kind of colour vision, and the way to matplotlib."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's, darkest contrasts first; each line has dashes of its own as well, so that colour is not all there is.
LINES: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("#0072B2", (1, 0)),
    ("#E69F00", (5, 2)),
    ("#CC79A7", (2, 2)),
    ("#009E73", (7, 2, 2, 2)),
    ("#D55E00", (1, 1)),
)


def figure_class() -> Any:
    """matplotlib's `Figure`, without its global state.

    Raises:
        `ImportError`: If matplotlib is missing; says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'agentic-prompting[report]'") from error
    return Figure
