"""Training on a real CUDA device; the suite to run where one is at hand (`pytest -m cuda tests/gpu`)."""

from __future__ import annotations

import pytest
import torch
from support.models import gpt_batch, make_gpt

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.config import Tier

pytestmark = pytest.mark.cuda

STEPS = 10


def losses_of(config: ZeroConfig | None, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights; plain torch where there is no config."""
    model = make_gpt(dtype).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None if config is None else ZeroEngine(model, optimizer, config)
    losses: list[float] = []
    for step in range(STEPS):
        loss = model(gpt_batch(step).cuda())
        if engine is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])
    if engine is not None:
        engine.close()
    return losses, weights


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("optimizer", ["device", "host"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp32_follows_plain_torch(stage: int, optimizer: Tier, gradients: Tier) -> None:
    config = ZeroConfig(stage=stage, optimizer=optimizer, gradients=gradients, bucket_bytes="16KiB")
    plain, ours = losses_of(None, torch.float32), losses_of(config, torch.float32)
    assert max(abs(a - b) for a, b in zip(plain[0], ours[0], strict=True)) <= 1e-5
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=1e-6)


def test_low_precision_weights_agree_over_placements() -> None:
    runs = [
        losses_of(ZeroConfig(stage=2, optimizer=tier, gradients=tier), torch.bfloat16)
        for tier in ("device", "host")
    ]
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=2**-7, atol=1e-6)


def test_a_run_repeats_bit_for_bit() -> None:
    runs = [losses_of(ZeroConfig(bucket_bytes="16KiB"), torch.float32) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
