"""A progress bar for what takes long, where somebody looks: on a terminal, if tqdm is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

LONG_BYTES = 1 << 30
"""Bytes from which a save or load counts as long."""


@contextmanager
def shown(what: str, total: int, *, quiet: bool) -> Generator[Callable[[int], None]]:
    """Inside, bytes that were moved are shown.

    Args:
        what: beside the bar.
        total: bytes to move.
        quiet: show nothing (ranks but the first).

    Yields:
        Takes the number of bytes just moved.
    """
    bar = None if quiet or total < LONG_BYTES or not sys.stderr.isatty() else _make(what, total)
    if bar is None:
        yield lambda _: None
        return
    with bar:
        yield bar.update


def _make(what: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)
