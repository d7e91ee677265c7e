"""ProcessGroup: values, bits, bytes and workspace at 1 to 4 ranks."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks

from zero_plugin.sharding import peer
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.trace import Ledger

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
SIZES = [1, 2, 3, 4]
PIECE = 4096
# Around the borders of pieces of each item size, and several pieces long.
NUMELS = [0, 1, 7, 1023, 1024, 1025, 2047, 2049, 3 * 1024 + 5]


def create(ledger: Ledger | None = None, timeout: float = 20.0) -> ProcessGroup:
    return ProcessGroup.create(device=CPU, ledger=ledger or Ledger(), timeout_seconds=timeout)


def rows_of(rank: int, size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(size, numel, generator=generator).mul_(3.0).to(dtype)


def mean_of(size: int, row: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    """The rule itself: rank order, fp32, one true division."""
    total = rows_of(0, size, numel, wire)[row].float()
    for rank in range(1, size):
        total = total + rows_of(rank, size, numel, wire)[row].float()
    return total / torch.tensor(float(size))


def values(rank: int, size: int) -> None:
    peer.PIECE_BYTES = PIECE
    group = create()
    assert (group.rank, group.size) == (rank, size)
    for tag, numel in enumerate(NUMELS):
        for wire in (torch.float32, torch.bfloat16, torch.float16):
            rows = rows_of(rank, size, numel, wire)
            for result in (torch.float32, torch.bfloat16, torch.float16):
                output = torch.full((numel,), float("nan"), dtype=result)
                group.reduce_scatter(output, rows, tag=tag, label=f"bucket {tag}")
                expected = mean_of(size, rank, numel, wire).to(result)
                assert torch.equal(output, expected), (numel, wire, result)
                whole = torch.full((size * numel,), float("nan"), dtype=result)
                group.all_reduce(whole, rows.view(-1), tag=tag)
                for row in range(size):
                    expected = mean_of(size, row, numel, wire).to(result)
                    assert torch.equal(whole.view(size, numel)[row], expected)
    group.close()


@pytest.mark.parametrize("size", SIZES)
def test_means_follow_the_rule_bit_for_bit(size: int) -> None:
    run_ranks(size, values)
