"""Callbacks of other libraries that read or write whole weights in the middle of training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._huggingface.accelerator import class_over, original

if TYPE_CHECKING:
    from transformers import TrainerCallback as Base
else:
    Base = object


class FollowingReference(Base):
    """Mixin over TRL's SyncRefModelCallback, which mixes the model's weights into the reference's in place."""

    accelerator: Any
    ref_model: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Gather both for the steps in which they are mixed; all ranks call it."""
        if state.global_step % args.ref_model_sync_steps:
            return None
        with self._whole(kwargs["model"], written=False), self._whole(self.ref_model, written=True):
            return super().on_step_end(args, state, control, **kwargs)

    def _whole(self, model: Any, *, written: bool) -> Any:
        engine = self.accelerator._zero.engine_of_model(original(model))  # noqa: SLF001
        if engine is None or not engine.config.shards_parameters:
            return nullcontext()
        return engine.full_params(writeback=written)


def adapt(callback: Any) -> None:
    """Have a callback's instance gather what it reads, if it is one that is known to."""
    if any(base.__name__ == "SyncRefModelCallback" for base in type(callback).__mro__):
        callback.__class__ = class_over(FollowingReference, type(callback))
