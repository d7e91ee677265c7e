"""Cross entropy of a vocabulary-sized head, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_plugin.config import parse_bytes
from zero_plugin.errors import ConfigError

Reduction = Literal["mean", "sum", "none"]

DEFAULT_TOKENS = 1024
"""Tokens in a chunk where neither a number of tokens nor of bytes is given."""


def tiled_cross_entropy(  # noqa: PLR0913 (those of F.cross_entropy, and the size of a chunk)
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
    max_bytes: int | str | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """`F.cross_entropy(head(hidden), labels)` without ever holding all logits.

    The logits of one chunk of tokens are alive at a time: they are made, reduced to their losses and freed, and made
    again in backward. The head is called as a module, twice a chunk and step (so under stage 3 its tiles are gathered
    for every chunk: choose chunks as large as memory allows). Works with a plain, tied, tiled or adapted head.

    Losses are formed in fp32 for bf16 and fp16 logits (as models of transformers do), and summed over chunks in order.
    For causal language models shift first: `tiled_cross_entropy(hidden[:, :-1], head, labels[:, 1:])`.

    Args:
        hidden: [..., width], the input of the head, floating point.
        head: maps [n, width] to [n, classes].
        labels: [...] class numbers, of the leading shape of `hidden`.
        chunk_tokens: tokens in a chunk; 1024 by default.
        max_bytes: instead of `chunk_tokens`, most bytes of one chunk's fp32 logits; at least one token is taken.
        ignore_index: label of tokens that do not count.
        reduction: `mean` over the tokens that count, `sum`, or `none` for the loss of each token, 0 where ignored.

    Returns:
        A scalar, or [...] for `none`; fp32, or fp64 for fp64 logits.

    Raises:
        ConfigError: shapes do not fit, or a setting is out of range.
    """
    _check(hidden, labels, reduction)
    if chunk_tokens is not None and max_bytes is not None:
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} and max_bytes={max_bytes!r} both set the size of a chunk: give one"
        )
    size = (
        _checked_tokens(DEFAULT_TOKENS if chunk_tokens is None else chunk_tokens)
        if max_bytes is None
        else _tokens_in(parse_bytes(max_bytes, "max_bytes"), head)
    )
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    each = "none" if reduction == "none" else "sum"

    def chunk_loss(part: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = head(part)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=each)

    run = _recomputed(chunk_loss) if torch.is_grad_enabled() else chunk_loss
    # An empty batch has one empty chunk, so that the head is part of the graph on every rank.
    losses = [
        run(part, target)
        for part, target in zip(flat.split(size), targets.split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses).view(labels.shape)
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _recomputed(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(part: Tensor, target: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(function, part, target, use_reentrant=False))

    return run


def _check(hidden: Tensor, labels: Tensor, reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise ConfigError(f"reduction={reduction!r} is not one of {get_args(Reduction)}")
    if hidden.dim() < 1 or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"labels of shape {tuple(labels.shape)} do not fit hidden states of shape {tuple(hidden.shape)}: give one label "
            "for each vector, after any shift"
        )


def _checked_tokens(tokens: Any) -> int:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"chunk_tokens={tokens!r} is not a number of tokens: give 1 or more")
    return tokens


def _tokens_in(limit: int, head: Any) -> int:
    classes = next(
        (
            value
            for name in ("out_features", "nf")
            if isinstance(value := getattr(head, name, None), int)
        ),
        None,
    )
    if classes is None:
        raise ConfigError(
            f"max_bytes={limit} needs the number of classes and {type(head).__name__} has no out_features: give chunk_tokens"
        )
    return max(1, limit // (4 * classes))
