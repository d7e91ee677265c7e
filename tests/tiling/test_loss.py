"""The loss in chunks: like F.cross_entropy, with the logits of one chunk alive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.storages import LiveStorages
from support.tiling import tile
from torch import Tensor, nn

from zero_plugin import tiled_cross_entropy
from zero_plugin.errors import ConfigError

WIDTH, CLASSES = 12, 50


def case(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Any, Tensor, Tensor]:
    head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    hidden = torch.randn(3, 7, WIDTH, dtype=dtype)
    labels = torch.randint(0, CLASSES, (3, 7))
    labels[0, :3] = -100
    return head, hidden, labels


def run(loss: Tensor, inputs: Tensor, head: Any) -> dict[str, Any]:
    loss.sum().backward()
    found = {"loss": loss.detach(), "hidden": inputs.grad, "weight": head.weight.grad}
    if head.bias is not None:
        found["bias"] = head.bias.grad
    return {name: None if v is None else v.as_subclass(Tensor) for name, v in found.items()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", [{"chunk_tokens": 4}, {"max_bytes": 1400}, {}, {"max_bytes": 1}])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_loss(reduction: Any, size: Any, tiled: bool, bias: bool) -> None:
    plain, hidden, labels = case(bias=bias)
    head = copy.deepcopy(plain)
    if tiled:
        tile(head, max_bytes=1000)
        assert len(head.tiles) > 3
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = F.cross_entropy(plain(one).flatten(0, 1), labels.flatten(), reduction=reduction)
    ours = tiled_cross_entropy(other, head, labels, reduction=reduction, **size)
    assert ours.shape == (labels.shape if reduction == "none" else ())
    expected = run(loss.view(ours.shape), one, plain)
    torch.testing.assert_close(run(ours, other, head), expected, rtol=1e-12, atol=1e-12)


def test_low_precision_is_summed_in_fp32() -> None:
    plain, hidden, labels = case(torch.bfloat16)
    head = tile(copy.deepcopy(plain), max_bytes=300)
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = F.cross_entropy(plain(one).float().flatten(0, 1), labels.flatten())
    ours = tiled_cross_entropy(other, head, labels, chunk_tokens=5)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(run(ours, other, head), run(loss, one, plain), rtol=0.03, atol=0.01)


def test_under_autocast() -> None:
    head, hidden, labels = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
        ours = tiled_cross_entropy(hidden, tile(head, max_bytes=500), labels, chunk_tokens=5)
    torch.testing.assert_close(ours, expected)
    ours.backward()
    assert head.weight.grad is not None


def test_another_ignored_label() -> None:
    head, hidden, labels = case()
    labels[labels == -100] = 3
    ours = tiled_cross_entropy(hidden, head, labels, ignore_index=3, chunk_tokens=4)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=3)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction: Any) -> None:
    head, hidden, labels = case()
    for tokens in (labels.fill_(-100), labels[:0]):
        states = hidden[: len(tokens)]
        expected = F.cross_entropy(
            head(states).flatten(0, 1), tokens.flatten(), reduction=reduction
        )
        ours = tiled_cross_entropy(states, head, tokens, reduction=reduction, chunk_tokens=4)
        assert torch.equal(ours.flatten().isnan(), expected.flatten().isnan())
        assert ours.requires_grad


def test_frozen_head_and_frozen_states() -> None:
    head, hidden, labels = case()
    tiled_cross_entropy(hidden, head, labels, chunk_tokens=4).backward()
    assert head.weight.grad is not None
    head.requires_grad_(False)
    states = hidden.clone().requires_grad_()
    tiled_cross_entropy(states, head, labels, chunk_tokens=4).backward()
    assert states.grad is not None


def test_without_gradients_nothing_is_recomputed() -> None:
    head, hidden, labels = case()
    calls: list[int] = []
    head.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        loss = tiled_cross_entropy(hidden, head, labels, chunk_tokens=7)
    assert len(calls) == 3
    assert not loss.requires_grad


def test_dropout_before_the_head_is_drawn_once() -> None:
    head, hidden, labels = case()
    head = nn.Sequential(nn.Dropout(0.5), head)
    states = hidden.clone().requires_grad_()
    torch.manual_seed(3)
    tiled_cross_entropy(states, head, labels, chunk_tokens=21).backward()
    other = hidden.clone().requires_grad_()
    torch.manual_seed(3)
    F.cross_entropy(head(other).flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(states.grad, other.grad)


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_logits_of_one_chunk_are_alive(chunk: int) -> None:
    tokens, classes = 256, 2048
    head = nn.Linear(8, classes, bias=False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    labels = torch.randint(0, classes, (tokens,))

    def peak(size: int) -> int:
        head.zero_grad()
        with LiveStorages([*head.parameters(), hidden, labels]) as live:
            tiled_cross_entropy(hidden, head, labels, chunk_tokens=size).backward()
        return live.peak

    others = 3 * head.weight.nbytes + 4 * hidden.detach().nbytes
    logits = classes * 4
    assert peak(tokens) >= 2 * tokens * logits
    # Logits, their log-softmax and its gradient.
    assert peak(chunk) <= 3 * chunk * logits + others


class Odd(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 4, "max_bytes": 100}, "give one"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"chunk_tokens": True}, "chunk_tokens=True"),
        ({"chunk_tokens": 2.0}, "chunk_tokens=2.0"),
        ({"max_bytes": "many"}, "max_bytes='many'"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, r"\(3, 6\) do not fit"),
        ({"head": Odd(), "max_bytes": 100}, "Odd has no out_features"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    head, hidden, labels = case()
    arguments = {"head": head, "labels": labels, **options}
    with pytest.raises(ConfigError, match=message):
        tiled_cross_entropy(hidden, **arguments)
