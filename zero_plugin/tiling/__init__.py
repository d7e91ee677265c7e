"""Memory-centric tiling (ZeRO-Infinity, section 5.1.3): a large layer as a sequence of small ones.

Under stage 3 each tile is gathered, used and released on its own, so that the largest piece of contiguous memory, and
what is gathered at one time, is a tile instead of a weight. At other stages it is the weight's gradient that shrinks.
"""

from __future__ import annotations

from zero_plugin.tiling.convert import tile_linears
from zero_plugin.tiling.loss import tiled_cross_entropy
from zero_plugin.tiling.modules import Tiled, TiledEmbedding, TiledLinear

__all__ = ["Tiled", "TiledEmbedding", "TiledLinear", "tile_linears", "tiled_cross_entropy"]
