"""Ranks that fail together: an error of one is an error of all, which names it."""

from __future__ import annotations

import torch

from zero_plugin.errors import CheckpointError
from zero_plugin.sharding.control import Control

_TEXT_BYTES = 1024


def agree(control: Control, error: BaseException | None, doing: str) -> None:
    """Return if no rank has an error; a collective.

    Args:
        control: the ranks.
        error: this rank's, or None.
        doing: what failed then, as "saving PATH".

    Raises:
        CheckpointError: on every rank, if one has an error; it names the ranks and the first one's error. This rank's own is
            its cause.
    """
    if control.size == 1:
        if error is None:
            return
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error
        raise CheckpointError(f"{doing} failed: {_text(error)}") from error
    raw = b"" if error is None else (_text(error).encode()[: _TEXT_BYTES - 1] or b"?")
    payload = torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    rows = control.exchange(payload, label=doing[:64])
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    failed = [rank for rank, text in enumerate(texts) if text]
    if error is not None and not isinstance(error, Exception):
        raise error
    if not failed:
        return
    first = failed[0]
    others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
    raise CheckpointError(f"{doing} failed on rank {first}{others}: {texts[first]}") from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
