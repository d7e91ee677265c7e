"""Clipping, decided before a step and applied inside its update: no pass over the gradient is made for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zero_plugin.errors import ConfigError
from zero_plugin.grads.norm import Clip, NormSummary, clip_factor, merge_partials, norm_of

_TOO_LATE = (
    "{} comes after the updates that update_in_backward=True has begun inside backward: do not clip (an infinite max_norm only "
    "measures), or use speculate=True, which undoes them where a clip binds"
)


class Clipper:
    """The clip of each optimizer's coming step.

    Args:
        refuses: whether updates run before a clip could be known.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self._clips: dict[int, Clip] = {}

    def by_norm(
        self,
        optimizers: Sequence[int],
        summaries: Sequence[NormSummary],
        *,
        max_norm: float,
        norm_type: float,
        scale: float,
    ) -> float:
        """Clip some optimizers' gradients by their common norm.

        Args:
            optimizers: which.
            summaries: of each one's gradients.
            max_norm: bound on the norm; infinity to measure only.
            norm_type: 2 or infinity.
            scale: the loss scale the gradients carry.

        Returns:
            The norm before this call.

        Raises:
            ConfigError: another norm, a negative bound, or an order of clips that this cannot express.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0:
            raise ConfigError(f"max_norm={max_norm!r} must be 0 or more")
        if self._refuses and max_norm != math.inf:
            raise ConfigError(_TOO_LATE.format(f"clip_grad_norm_(max_norm={max_norm!r})"))
        present = [self._clips.get(number, Clip()) for number in optimizers]
        if any(clip.value is not None for clip in present):
            raise ConfigError(
                "clip_grad_norm_ after clip_grad_value_ in one step is not supported: the norm of clamped gradients "
                "would need another pass; clip by norm first"
            )
        factors = {clip.factor for clip in present}
        if len(factors) > 1:
            raise ConfigError(
                "the optimizers were clipped by different factors already in this step: clip each one by itself"
            )
        factor = factors.pop()
        norm = norm_of(merge_partials(summaries), norm_type, scale) * factor
        clip = Clip(factor=factor * clip_factor(norm, max_norm))
        self._clips.update(dict.fromkeys(optimizers, clip))
        return norm

    def by_value(self, optimizers: Sequence[int], clip_value: float) -> None:
        """Clamp some optimizers' gradients, after what was clipped already.

        Raises:
            ConfigError: a negative bound.
        """
        if not clip_value >= 0:
            raise ConfigError(f"clip_value={clip_value!r} must be 0 or more")
        if self._refuses:
            raise ConfigError(_TOO_LATE.format(f"clip_grad_value_({clip_value!r})"))
        for number in optimizers:
            old = self._clips.get(number, Clip())
            value = clip_value if old.value is None else min(clip_value, old.value)
            self._clips[number] = Clip(factor=old.factor, value=float(value))

    def take(self, optimizer: int) -> Clip:
        """The clip of a step that begins; the next step starts unclipped."""
        return self._clips.pop(optimizer, Clip())

    def forget(self) -> None:
        """Drop every clip."""
        self._clips.clear()
