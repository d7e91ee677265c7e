"""The Trainer strategy for `pytorch_lightning`."""

# The mixins are typed against the other spelling, whose classes have the same members under other names.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Any

from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.core import saving
from pytorch_lightning.core.optimizer import _MockOptimizer
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies import DDPStrategy

from zero_plugin.integrations._lightning.checks import TRAINER, check_supported
from zero_plugin.integrations._lightning.common import PrecisionPlugins
from zero_plugin.integrations._lightning.precision import TrainerPrecision
from zero_plugin.integrations._lightning.trainer import Spelling, TrainerStrategy
from zero_plugin.integrations.registration import load_folders_too

check_supported(DDPStrategy, TRAINER)

# For `load_from_checkpoint`, which asks no strategy.
saving.pl_load = load_folders_too(saving.pl_load)


class ZeroPrecision(TrainerPrecision, Precision):
    """32-true."""


class ZeroMixedPrecision(TrainerPrecision, MixedPrecision):
    """16-mixed and bf16-mixed; the engine scales the loss, so there is no GradScaler.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device: device type for autocast.
    """

    def __init__(self, precision: Any, device: str) -> None:
        # The stock constructor makes a GradScaler for fp16, which warns where there is no CUDA.
        super().__init__("bf16-mixed", device)
        self.precision = precision


class ZeroHalfPrecision(TrainerPrecision, HalfPrecision):
    """16-true and bf16-true."""


class ZeroOffloadStrategy(TrainerStrategy, DDPStrategy):
    """ZeRO for `pytorch_lightning.Trainer`: takes `ZeroConfig`'s fields, and DDPStrategy's arguments for launching.

    Example:
        ```python
        trainer = Trainer(strategy=ZeroOffloadStrategy(stage=2, optimizer="host", gradients="host"))
        ```

    Args:
        config: a whole `ZeroConfig`, in place of single fields.
        checkpoint: `"file"`: one file; `"folder"`: every rank writes its part; `"auto"`: folders at stage 3.
        settings: fields of `ZeroConfig`.

    Raises:
        ConfigError: a setting is unknown, wrong or contradictory.
    """

    spelling = Spelling(
        precision=PrecisionPlugins(
            plain=Precision,
            mixed=MixedPrecision,
            half=HalfPrecision,
            zero_plain=ZeroPrecision,
            zero_mixed=ZeroMixedPrecision,
            zero_half=ZeroHalfPrecision,
        ),
        no_optimizer=_MockOptimizer,
        sync_module_states=_sync_module_states,
        reset_seed=reset_seed,
    )
