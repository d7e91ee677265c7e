"""ZeRO-Offload's placement, found rather than stated: every cut of its data-flow graph is tried (ATC'21, section 3).

Circles are data, boxes are computations; an edge carries M parameters' worth of bytes whenever its ends lie apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

DATA: dict[str, int] = {"p16": 2, "g16": 2, "p32": 4, "m32": 4, "v32": 4}
"""Bytes of a parameter in each data node."""

COMPUTATIONS: tuple[str, ...] = ("forward-backward", "update", "float2half")

EDGES: tuple[tuple[str, str, int], ...] = (
    ("p16", "forward-backward", 4),  # read in the forward and in the backward
    ("forward-backward", "g16", 2),
    ("g16", "update", 2),
    ("p32", "update", 4),
    ("m32", "update", 4),
    ("v32", "update", 4),
    ("update", "p32", 4),
    ("update", "m32", 4),
    ("update", "v32", 4),
    ("p32", "float2half", 4),
    ("float2half", "p16", 2),
)
"""From, to, bytes of a parameter."""

FIXED_ON_DEVICE = "forward-backward"
"""Its work grows with the batch as well as with the model: it must not go to the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One way to part the graph.

    Attributes:
        on_host: nodes on the host; the others are on the device.
        traffic: bytes a parameter that cross in a step.
        device_bytes: bytes a parameter of the data on the device.
    """

    on_host: frozenset[str]
    traffic: int
    device_bytes: int


def cut(on_host: Iterable[str]) -> Cut:
    """Traffic and device memory of one placement."""
    host = frozenset(on_host)
    return Cut(
        on_host=host,
        traffic=sum(nbytes for a, b, nbytes in EDGES if (a in host) != (b in host)),
        device_bytes=sum(nbytes for name, nbytes in DATA.items() if name not in host),
    )


def all_cuts() -> list[Cut]:
    """Every placement that puts something on the host and leaves forward and backward on the device."""
    free = [name for name in (*DATA, *COMPUTATIONS) if name != FIXED_ON_DEVICE]
    return [
        cut(chosen)
        for count in range(1, len(free) + 1)
        for chosen in itertools.combinations(free, count)
    ]


def best_cuts() -> list[Cut]:
    """Least traffic first, then least device memory; all that are equally good."""
    cuts = all_cuts()
    least = min((item.traffic, item.device_bytes) for item in cuts)
    return [item for item in cuts if (item.traffic, item.device_bytes) == least]
