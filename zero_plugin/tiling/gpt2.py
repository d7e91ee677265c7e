"""The tiled form of transformers' `Conv1D`; imported only where transformers is already loaded, or by a pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.pytorch_utils import Conv1D

from zero_plugin.tiling.modules import TiledProduct

if TYPE_CHECKING:
    from torch import Tensor


class TiledConv1D(TiledProduct, Conv1D):
    """A `Conv1D` of GPT-2 in tiles; its weight is [inputs, outputs]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], one tile after the other."""
        return self.product(x)
