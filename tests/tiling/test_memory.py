"""What tiling is for: the working memory of a large layer shrinks with the number of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.storages import LiveStorages
from support.tiling import tile
from torch import Tensor, nn

INPUTS, OUTPUTS, BATCH = 256, 2048, 2
WEIGHT = INPUTS * OUTPUTS * 4


def freed_at_once(model: nn.Module) -> None:
    """Gradients go as soon as they are there, as they do when an engine offloads them."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)


def step(model: nn.Module, batch: int = BATCH, width: int = INPUTS, **options: Any) -> LiveStorages:
    inputs = torch.randn(batch, width, requires_grad=True)
    with LiveStorages([*model.parameters(), inputs], **options) as live:
        model(inputs).sum().backward()
    return live


@pytest.mark.parametrize("factor", [2, 4, 8, 16])
def test_gradients_of_one_tile_are_alive(factor: int) -> None:
    dense = nn.Linear(INPUTS, OUTPUTS, bias=False)
    tiled = tile(nn.Linear(INPUTS, OUTPUTS, bias=False), max_bytes=WEIGHT // factor)
    assert len(tiled.tiles) == factor
    freed_at_once(dense)
    freed_at_once(tiled)
    activations = 4 * BATCH * (INPUTS + OUTPUTS) * 4
    whole = step(dense).peak
    assert whole >= WEIGHT
    assert step(tiled).peak <= WEIGHT / factor + activations


@contextmanager
def gathered(model: nn.Module) -> Iterator[list[int]]:
    """Bytes of weights that forwards need at one time, counted at every change.

    What stage 3 holds: the parameters of the modules that are running, fetched before and released after.
    """
    now, seen = [0], [0]
    handles: list[Any] = []
    for module in model.modules():
        own = sum(p.nbytes for p in module.parameters(recurse=False))
        if own:

            def fetch(*_: Any, own: int = own) -> None:
                now[0] += own
                seen.append(now[0])

            def release(*_: Any, own: int = own) -> None:
                now[0] -= own

            handles += [
                module.register_forward_pre_hook(fetch),
                module.register_forward_hook(release),
            ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("factor", [1, 4, 16])
def test_weights_of_one_tile_are_needed(factor: int) -> None:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    tile(layer, max_bytes=WEIGHT // factor)
    with gathered(layer) as seen, torch.no_grad():
        layer(torch.randn(BATCH, INPUTS))
    assert max(seen) == WEIGHT // factor
    assert len(seen) == 1 + factor


def largest_trainable(factor: int, limit: int) -> int:
    """The largest width h for which h -> 4h -> h trains where no allocation may exceed `limit` bytes."""
    best = 0
    for width in (16, 32, 64, 128, 256):
        model = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        )
        if factor > 1:
            tile(model, max_bytes=4 * width * 4 * width // factor, split_inputs=True)
        freed_at_once(model)
        if max(parameter.nbytes for parameter in model.parameters()) > limit:
            continue
        try:
            step(model, batch=1, width=width, largest=limit)
        except MemoryError:
            continue
        best = width
    return best


def test_the_largest_trainable_width_grows_with_the_factor() -> None:
    """ZeRO-Infinity's test (section 8.5), scaled down: memory in small contiguous blocks, one layer, growing width."""
    limit = 4 * 32 * 4 * 32
    assert [largest_trainable(factor, limit) for factor in (1, 4, 16, 64)] == [32, 64, 128, 256]


def test_tiling_copies_one_weight_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    before = sum(parameter.nbytes for parameter in model.parameters())
    with LiveStorages(model.parameters()) as live:
        tile(model, max_bytes=4096)
    assert live.peak == before
    assert live.largest <= 4096
