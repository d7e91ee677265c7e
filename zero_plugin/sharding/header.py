"""The header every rank sends ahead of a collective, so that buffers of one size are never mixed up.

Two ranks that gather different units of equal size would exchange bytes without an error. So each
collective begins with a fixed-size header from every rank to every other; the bytes follow only when
all headers agree. The label is carried for the message alone and is not compared.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["reduce_scatter", "all_gather", "all_reduce", "exchange", "broadcast", "barrier"]

KINDS: tuple[Kind, ...] = get_args(Kind)
_COUNTED_IN_BYTES: tuple[Kind, ...] = ("exchange", "broadcast", "barrier")
HEADER_BYTES = 128
# What is compared comes first, so that agreement is one comparison of bytes.
COMPARED_BYTES = 64
_LABEL_BYTES = HEADER_BYTES - COMPARED_BYTES
_DTYPE_BYTES = 24
_MAGIC = b"ZPH1"
_LAYOUT = struct.Struct(f"<4sixxxxxxxxqqq{_DTYPE_BYTES}s{_LABEL_BYTES}s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective as one rank sees it.

    Attributes:
        kind: Which collective.
        tag: The caller's number for the unit or bucket; has to agree over ranks.
        numel: Elements of one rank's share (bytes for exchange and broadcast); has to agree.
        dtypes: Wire dtype (and output dtype where another), or a digest of what is sent; has to agree.
        label: Name of the unit or bucket for messages.
    """

    kind: Kind
    tag: int = 0
    numel: int = 0
    dtypes: str = ""
    label: str = ""

    def pack_into(self, buffer: bytearray, sequence: int) -> None:
        """Writes the header for the `sequence`-th collective into the first bytes of `buffer`."""
        label = self.label.encode()[:_LABEL_BYTES]
        dtypes = self.dtypes.encode()[:_DTYPE_BYTES]
        fields = (KINDS.index(self.kind), sequence, self.tag, self.numel, dtypes, label)
        _LAYOUT.pack_into(buffer, 0, _MAGIC, *fields)

    @property
    def text(self) -> str:
        """The call in words."""
        named = f" {self.label!r}" if self.label else ""
        what = f" of {self.dtypes}" if self.dtypes else ""
        unit = "bytes" if self.kind in _COUNTED_IN_BYTES else "elements"
        return f"{self.kind}{named} (tag {self.tag}, {self.numel} {unit}{what})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A header received: the call and its place in the sender's sequence, from 1."""

    sequence: int
    call: Call

    @property
    def text(self) -> str:
        """The header in words."""
        return f"#{self.sequence} {self.call.text}"


def unpack(buffer: bytearray) -> Header | None:
    """Reads a header; None where `buffer` holds none (no message has come yet)."""
    magic, kind, sequence, tag, numel, dtypes, label = _LAYOUT.unpack_from(buffer, 0)
    if magic != _MAGIC or not 0 <= kind < len(KINDS):
        return None
    call = Call(
        kind=KINDS[kind],
        tag=tag,
        numel=numel,
        dtypes=dtypes.rstrip(b"\0").decode(errors="replace"),
        label=label.rstrip(b"\0").decode(errors="replace"),
    )
    return Header(sequence=sequence, call=call)


def mismatch_text(channel: str, headers: Mapping[int, Header | None]) -> str:
    """What every rank was doing, one line a rank, and what to look for.

    Args:
        channel: Name of the sequence of collectives.
        headers: Every rank's header, None for a rank that has not come.
    """
    lines = [f"ranks disagree on the next collective of the {channel} sequence:"]
    for rank, header in sorted(headers.items()):
        lines.append(f"  rank {rank}: {header.text if header else 'has not come'}")
    lines.append(
        "No bytes were used. Every rank has to run the same units in the same order and the same "
        "number of steps: look for a branch, a data loader of uneven length or an exception caught "
        "on one rank only."
    )
    return "\n".join(lines)
