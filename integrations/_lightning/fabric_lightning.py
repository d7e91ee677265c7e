"""The Fabric strategy for `lightning.fabric`."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.precision.amp import MixedPrecision
from lightning.fabric.plugins.precision.half import HalfPrecision
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl

from zero_plugin.integrations._lightning.checks import FABRIC, check_supported
from zero_plugin.integrations._lightning.common import LOW_PRECISION, PrecisionPlugins
from zero_plugin.integrations._lightning.fabric import FabricStrategy, Spelling, SyncControl
from zero_plugin.integrations._lightning.precision import FabricPrecision

check_supported(DDPStrategy, FABRIC)


class ZeroPrecision(FabricPrecision, Precision):
    """32-true."""


class ZeroMixedPrecision(FabricPrecision, MixedPrecision):
    """16-mixed and bf16-mixed; the engine scales the loss, so there is no GradScaler.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device: device type for autocast.
    """

    def __init__(self, precision: Any, device: str) -> None:
        # The stock constructor makes a GradScaler for fp16, which warns where there is no CUDA.
        super().__init__("bf16-mixed", device)
        self.precision = precision
        self._desired_input_dtype = LOW_PRECISION[precision]


class ZeroHalfPrecision(FabricPrecision, HalfPrecision):
    """16-true and bf16-true."""


class ZeroSyncControl(SyncControl, _BackwardSyncControl):
    """Holds the reduction back inside `Fabric.no_backward_sync`."""


class FabricZeroOffloadStrategy(FabricStrategy, DDPStrategy):
    """ZeRO for `lightning.fabric.Fabric`: takes `ZeroConfig`'s fields, and DDPStrategy's arguments for launching.

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
        sync_control=ZeroSyncControl,
    )
