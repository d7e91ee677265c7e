"""An update that reads one set of master and states and writes another: the bits of an update in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.native import ISAS, assert_same_bits
from torch import Tensor

from zero_plugin.kernels import HYPER_COLUMNS, SEGMENT_COLUMNS, Kernels
from zero_plugin.optim.rule import ADAMW

LARGE = 1_200_003
"""Elements from which results are written past the caches."""


def hyper(steps: int = 3) -> Tensor:
    row = torch.zeros(1, HYPER_COLUMNS, dtype=torch.float64)
    row[0, :10] = torch.tensor([1, 0.99, 0, 0.1, 0.999, 0.001, 0.5, 1e-8, -0.01, steps])
    return row


class Buffers:
    """Master, two states, gradient and output of one segment, each some elements into an allocation of its own."""

    def __init__(self, numel: int, offset: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def filled(dtype: torch.dtype) -> Tensor:
            whole = torch.rand(numel + offset, generator=generator).to(dtype)
            return whole[offset:]

        self.master = filled(torch.float32)
        self.states = (filled(torch.float32), filled(torch.float32))
        self.gradient = filled(torch.float32)
        self.output = filled(torch.bfloat16)

    def table(self, gradient: Tensor) -> Tensor:
        row = [
            self.master.data_ptr(),
            *(state.data_ptr() for state in self.states),
            gradient.data_ptr(),
            self.output.data_ptr(),
            self.master.numel(),
            0,
        ]
        return torch.tensor([row], dtype=torch.int64)

    def sources(self) -> Tensor:
        row = [self.master.data_ptr(), *(state.data_ptr() for state in self.states)]
        return torch.tensor([row], dtype=torch.int64)

    def read(self) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in (self.master, *self.states))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("output", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("numel", "offset"),
    [(1, 0), (67, 3), (LARGE, 0), (LARGE, 32), (LARGE, 5)],
    ids=["one", "odd", "lines", "later lines", "across lines"],
)
def test_apart_equals_in_place(
    numel: int, offset: int, output: torch.dtype | None, isa: str
) -> None:
    inside = Buffers(numel, offset, 1)
    old = Buffers(numel, offset, 1)
    new = Buffers(numel, offset, 2)
    kept = old.read()
    with Kernels(threads=2, isa=isa) as kernels:

        def update(table: Tensor, sources: Tensor | None) -> None:
            kernels.update(
                ADAMW.native_id,
                table,
                hyper(),
                gradient_dtype=torch.float32,
                output_dtype=output,
                scale=0.5,
                clip_value=None,
                sources=sources,
            )

        update(inside.table(inside.gradient), None)
        update(new.table(inside.gradient), old.sources())
    for mine, before in zip(old.read(), kept, strict=True):
        assert_same_bits(mine, before, "what is read")
    for number, (mine, other) in enumerate(zip(new.read(), inside.read(), strict=True)):
        assert_same_bits(mine, other, f"part {number}")
    if output is not None:
        assert_same_bits(new.output, inside.output, "output")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": True, "output_dtype": torch.bfloat16}, "updated in place only"),
        ({"moment_dtype": torch.uint8}, "updated in place only"),
        ({"moment_dtype": torch.bfloat16}, "updated in place only"),
        ({"sources": torch.zeros(1, 2, dtype=torch.int64)}, r"sources has shape \[1, 2\]"),
        ({"sources": torch.zeros(1, 3, dtype=torch.int64)}, "old master pointer is null"),
    ],
)
def test_what_cannot_be_updated_apart_is_refused(changes: dict[str, Any], message: str) -> None:
    one, two = (Buffers(33, 0, seed) for seed in (1, 2))
    kept = two.read()
    settings: dict[str, Any] = {
        "gradient_dtype": torch.float32,
        "output_dtype": None,
        "scale": 1.0,
        "clip_value": None,
        "places": torch.zeros(1, 4, dtype=torch.int64),
        "sources": one.sources(),
        **changes,
    }
    table = two.table(one.gradient)
    assert table.shape[1] == SEGMENT_COLUMNS
    with Kernels(threads=1) as kernels, pytest.raises(ValueError, match=message):
        kernels.update(ADAMW.native_id, table, hyper(), **settings)
    for mine, before in zip(two.read(), kept, strict=True):
        assert_same_bits(mine, before, "what would be written")
