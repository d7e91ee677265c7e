"""Whether all ranks were built alike: found at the start, by name, not as a mismatched collective at step 900."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from zero_plugin.errors import ConfigError
from zero_plugin.sharding.control import Control

_TEXT_BYTES = 512


def check_same_setup(control: Control, sections: Mapping[str, Sequence[str]]) -> None:
    """Compare each section of this rank's setup with rank 0's; a collective.

    Args:
        control: the ranks.
        sections: for each section, lines that must be the same on all ranks.

    Raises:
        ConfigError: on every rank, naming the section, the first line that differs, and the ranks.
    """
    if control.size == 1:
        return
    for name, lines in sections.items():
        digest = _digest("\n".join(lines))
        rows = control.exchange(
            torch.tensor([digest, len(lines)], dtype=torch.int64, device="cpu"),
            label=f"same {name}",
        )
        others = [rank for rank, row in enumerate(rows) if row.tolist() != rows[0].tolist()]
        if others:
            raise ConfigError(
                _difference(control, name, lines, others, [int(row[1]) for row in rows])
            )


def _difference(
    control: Control,
    name: str,
    lines: Sequence[str],
    others: Sequence[int],
    counts: Sequence[int],
) -> str:
    """Find the first line that differs; every rank takes part."""
    who = f"rank {others[0]} was built with other {name} than rank 0"
    cure = "build the same model, optimizers and ZeroConfig, in the same order, on every rank"
    shortest = min(counts)
    digests = torch.tensor(
        [_digest(line) for line in lines[:shortest]] or [0], dtype=torch.int64, device="cpu"
    )
    rows = control.exchange(digests, label=f"lines of {name}")
    unequal = (rows[0] != rows[others[0]]).nonzero().flatten().tolist() if shortest else []
    place = unequal[0] if unequal else shortest
    texts = control.exchange(
        _encode(lines[place] if place < len(lines) else "(nothing)"), label=f"text of {name}"
    )
    return (
        f"{who}: number {place} is {_decode(texts[0])!r} on rank 0 and {_decode(texts[others[0]])!r} on rank "
        f"{others[0]}; {cure}"
    )


def _digest(text: str) -> int:
    return zlib.crc32(text.encode()) << 31 ^ zlib.adler32(text.encode())


def _encode(text: str) -> torch.Tensor:
    raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.tensor(list(raw), dtype=torch.uint8, device="cpu")


def _decode(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
