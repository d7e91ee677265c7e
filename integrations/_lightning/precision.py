"""Precision plugins whose loss scaling and clipping are the engine's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.fabric.plugins.precision import Precision as FabricBase
    from lightning.pytorch.plugins.precision import Precision as TrainerBase
    from torch import Tensor, nn

    from zero_plugin.integrations._lightning.common import EngineSlots
else:
    TrainerBase = FabricBase = object

# The stock mixed precision plugin's name, under which a Trainer checkpoint holds the state of the loss scale. Writing
# there too lets a checkpoint go from plain DDP to us and back.
SCALER_KEY = "MixedPrecision"


def to_grad_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's loss scale as `torch.amp.GradScaler.state_dict` writes it."""
    return {
        "scale": state["scale"],
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": state["good_steps"],
    }


def from_grad_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """A `torch.amp.GradScaler.state_dict` as the engine reads it.

    Raises:
        CheckpointError: it lacks the scale.
    """
    if "scale" not in state:
        raise CheckpointError(
            f"the loss scale in the checkpoint ({dict(state)!r}) has no 'scale': it was not saved by a GradScaler"
        )
    return {"scale": state["scale"], "good_steps": state.get("_growth_tracker", 0)}


class TrainerPrecision(TrainerBase):
    """Mixin for the Trainer's precision plugins.

    Without an engine (validation, test, prediction, a fit without optimizer) everything is as in the stock plugin.
    """

    slots: EngineSlots

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the module's own `backward` on the scaled loss, inside the engine's reduction round."""
        engine = self.slots.only
        if engine is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        with engine.backward_context():
            super().backward(engine.scale_loss(tensor), model, optimizer, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Clip by the global norm over all ranks' parts, or by value."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        engine = self.slots.of(optimizer)
        if engine is None:
            super().clip_gradients(optimizer, clip_val or 0.0, gradient_clip_algorithm)
        elif clip_val is not None and clip_val > 0:
            if gradient_clip_algorithm == "value":
                engine.clip_grad_value_(clip_val, optimizer=optimizer)
            else:
                engine.clip_grad_norm_(clip_val, optimizer=optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the loss scale, in `torch.amp.GradScaler`'s format."""
        super().on_save_checkpoint(checkpoint)
        engine = self.slots.only
        if engine is not None and engine.config.loss_scale == "dynamic":
            checkpoint[SCALER_KEY] = to_grad_scaler(engine.loss_scale_state())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the loss scale, ours or plain DDP's."""
        super().on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint.get(SCALER_KEY, {}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale; Lightning calls this itself for checkpoints of old versions."""
        engine = self.slots.only
        if engine is not None and engine.config.loss_scale == "dynamic" and state_dict:
            engine.load_loss_scale_state(from_grad_scaler(state_dict))


class FabricPrecision(FabricBase):
    """Mixin for Fabric's precision plugins; one Fabric may hold several engines."""

    slots: EngineSlots

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run `backward` on the scaled loss inside the reduction round of every engine.

        A loss may reach several models (a generator's goes through the discriminator), so all of them take part.

        Raises:
            ConfigError: several engines scale the loss by different factors and `model` does not say which counts.
        """
        with ExitStack() as stack:
            for engine in self.slots.engines:
                stack.enter_context(engine.backward_context())
            super().backward(self._scale(tensor, model), model, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Fabric does not save its precision plugin; `engine.loss_scale_state()` holds the loss scale."""
        return {}

    def _scale(self, tensor: Tensor, model: nn.Module | None) -> Tensor:
        engines = self.slots.engines
        if model is not None:
            engines = [engine for engine in engines if engine.model is model] or engines
        if not engines:
            return tensor
        scaled = engines[0].scale_loss(tensor)
        for other in engines[1:]:
            if engines[0].loss_scale != other.loss_scale:
                raise ConfigError(
                    f"{len(engines)} models were set up with a loss scale each, and this backward does not say which "
                    "one its loss belongs to: call fabric.backward(loss, model=model)"
                )
        return scaled
