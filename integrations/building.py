"""The context in which a model is built straight into shards, and what Hugging Face needs in it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from zero_plugin.config import ZeroConfig
from zero_plugin.sharding.init import ShardedBuild

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Hugging Face reads ahead without bound unless this variable says so."""


@contextmanager
def init_context(config: ZeroConfig) -> Generator[None]:
    """Inside, models are built straight into shards: each rank keeps its slices, and no rank ever holds the whole model.

    Host memory stays below the rank's shard plus the largest submodule's own parameters, with `from_pretrained` too
    (safetensors). Values are those of a plain build with the same seed; where ranks differ, rank 0's are taken. All ranks
    build the same model, in the same order.

    Args:
        config: the engine's own; `stage=3`.

    Raises:
        ConfigError: the config does not shard parameters.
        ParameterError: a lazy module is built.

    Example:
        >>> config = ZeroConfig(stage=3)
        >>> with zero_plugin.init_context(config):
        ...     model = MyModel()
        >>> engine = ZeroEngine(model, torch.optim.AdamW(model.parameters()), config)
    """
    before = os.environ.get(ONE_BY_ONE)
    with ShardedBuild(config):
        os.environ[ONE_BY_ONE] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(ONE_BY_ONE, None)
            else:
                os.environ[ONE_BY_ONE] = before
