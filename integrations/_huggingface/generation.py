"""Generation with sharded weights: every rank runs as many forwards as the one that generates longest."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from zero_plugin.engine import ZeroEngine


def keep_in_step(engine: ZeroEngine) -> list[nn.Module]:
    """Have the models of an engine generate with `synced_gpus`, where a rank that ended early would leave the others waiting.

    Args:
        engine: any; only at stage 3 on several ranks something is done.

    Returns:
        The modules that have a `generate` of their own now.
    """
    if not engine.config.shards_parameters or engine.world_size == 1:
        return []
    changed: list[nn.Module] = []
    for module in engine.model.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(module).__mro__):
            module.__dict__["generate"] = _synced(module.generate)
            changed.append(module)
    return changed


def _synced(generate: Any) -> Any:
    @functools.wraps(generate)
    def synced(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "synced_gpus": True})

    return synced
