"""Part of the states on the device: the same bits, exact bytes in each tier, and nothing of that part crosses the link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training import Recipe, adamw, assert_same_outcome, config, ranks, snapshot, train
from torch import nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import ConfigError

FRACTIONS = (0.2, 0.5, 1.0)
PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "gradients": "device", "backend": "chaos"},
    {"stage": 2},
    {"stage": 2, "speculate": True, "backend": "chaos"},
    {"stage": 3, "params": "device"},
    {"stage": 3, "params": "host", "backend": "chaos"},
]


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"steps": 4, "width": 12, "layers": 2, **options})


@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_a_fraction_on_the_device_changes_no_bit(settings: dict[str, Any]) -> None:
    for accumulate, dtype, clip in ((1, torch.float32, 0.5), (3, torch.bfloat16, None)):
        chosen = recipe(accumulate=accumulate, dtype=dtype, clip=clip)
        expected = train(chosen, overlap=False, bucket_bytes=1024)
        for fraction in FRACTIONS:
            found = train(chosen, device_fraction=fraction, bucket_bytes=1024, **settings)
            assert_same_outcome(found, expected)


def test_a_delayed_update_with_a_fraction_changes_no_bit() -> None:
    delayed = {"delayed_update": True, "delayed_update_warmup": 2, "bucket_bytes": 1024}
    for dtype in (torch.float32, torch.bfloat16):
        expected = train(recipe(steps=6, dtype=dtype), **delayed)
        for stage in (2, 3):
            found = train(recipe(steps=6, dtype=dtype), stage=stage, device_fraction=0.5, **delayed)
            assert_same_outcome(found, expected)


def outcomes_on(rank: int, size: int) -> Any:
    """Plain, then with a fraction, at three stages."""
    whole = {"bucket_bytes": 1024, "stage": 2}
    return [
        train(recipe(clip=0.5), rank=rank, **settings)
        for settings in (
            whole,
            {**whole, "device_fraction": 0.5},
            {**whole, "device_fraction": 0.5, "stage": 1},
            {**whole, "device_fraction": 0.5, "stage": 3, "params": "host"},
        )
    ]


@pytest.mark.dist
def test_a_fraction_on_the_device_changes_no_bit_on_ranks() -> None:
    for plain, *others in ranks(3, outcomes_on, deadline=100.0):
        for other in others:
            assert_same_outcome(other, plain)


def stack() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(5)))


def loss_of(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    width = next(model.parameters()).shape[1]
    return model(torch.randn(5, width, dtype=dtype)).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_lie_where_the_fraction_says(dtype: torch.dtype) -> None:
    """Only the blocks first in the forward stay; what stays neither goes down nor comes up."""
    moved: list[tuple[int, int]] = []
    for fraction in (0.0, 0.5, 1.0):
        model = stack().to(dtype)
        settings = {"bucket_bytes": 256, "device_fraction": fraction, "stage": 2}
        optimizer = adamw(model.parameters())
        with ZeroEngine(model, optimizer, config(**settings)) as engine:
            blocks = engine._roster.blocks
            stays = [block.on_device for block in blocks]
            kept = sum(block.chunk for block in blocks if block.on_device)
            elements = [sum(m.numel for m in block.parameters) for block in blocks]
            assert stays == sorted(stays, reverse=True), "not the first blocks"
            on_device = sum(n for n, stay in zip(elements, stays, strict=True) if stay)
            assert on_device <= fraction * sum(elements)
            first_left = stays.count(True)
            if first_left < len(blocks):
                assert on_device + elements[first_left] > fraction * sum(elements)
            held = engine.memory()
            left = sum(block.chunk for block in blocks) - kept
            # fp32 weights on the device are their own master there.
            masters = kept * 4 if dtype != torch.float32 else 0
            assert held["device"]["master"] == masters
            assert held["device"]["moments"] == kept * 8
            assert held["device"]["gradients"] == kept * dtype.itemsize
            assert held["host"]["master"] == left * 4
            assert held["host"]["moments"] == left * 8
            assert held["host"]["gradients"] == left * dtype.itemsize
            before = engine.ledger()
            engine.backward(loss_of(model, dtype))
            optimizer.step()
            after = engine.ledger()
            members = [m.numel for block in blocks if not block.on_device for m in block.parameters]
            down, up = (
                after[key] - before.get(key, 0) for key in ("device_to_host", "host_to_device")
            )
            assert (down, up) == (sum(members) * dtype.itemsize,) * 2
            moved.append((down, up))
            assert all(torch.isfinite(value).all() for value in snapshot(model).values())
    assert moved[0] > moved[1] > moved[2] == (0, 0)


def test_both_parts_are_updated_at_the_same_time() -> None:
    """The device's part does not wait for the host's: each has a lane of its own."""
    model = stack()
    optimizer = adamw(model.parameters())
    settings = {"bucket_bytes": 256, "device_fraction": 0.5, "backend": "threads"}
    with ZeroEngine(model, optimizer, config(**settings)) as engine:
        backend = engine._resources.backend
        host, device = backend.lane("update", "host"), backend.lane("update on device", "device")
        assert host is not device
        engine.backward(loss_of(model, torch.float32))
        optimizer.step()
        engine.wait_for_update()
        assert {block.on_device for block in engine._roster.blocks} == {True, False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_fraction": 1.5}, r"device_fraction=1.5 must be a number from 0 to 1"),
        ({"device_fraction": True}, r"device_fraction=True must be"),
        ({"device_fraction": 0.5, "optimizer": "device"}, r"needs optimizer='host', not 'device'"),
        (
            {"device_fraction": 0.5, "gradients": "nvme", "nvme_path": "x"},
            r"not supported with gradients='nvme'",
        ),
        ({"device_fraction": 0.5, "stage": 3, "split_master": True}, r"contradicts split_master"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)
