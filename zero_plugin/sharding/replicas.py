"""The copies of one model on all ranks: equal at the start, and their buffers before each training forward."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zero_plugin.config import ZeroConfig
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.hooks import ForwardHook, untraced
from zero_plugin.sharding.precut import precut_of


class Replicas:
    """Makes parameters and buffers equal to rank 0's, as DistributedDataParallel does.

    Args:
        model: this rank's copy.
        control: the ranks.
        config: whether buffers are sent.
    """

    def __init__(self, model: nn.Module, control: Control, config: ZeroConfig) -> None:
        self._model = model
        self._control = control
        self._sends_buffers = config.broadcast_buffers and control.size > 1
        self._hook: ForwardHook | None = None

    def equalise(self) -> None:
        """Send rank 0's parameters and buffers, and see to the buffers from now on; all ranks call it."""
        if self._control.size == 1:
            return
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            # What was cut while the model was built holds rank 0's values already.
            whole = [item for item in self._model.parameters() if precut_of(item) is None]
            tensors = [item.data for item in (*whole, *self._model.buffers())]
            self._control.broadcast(tensors)
        if self._sends_buffers and any(True for _ in self._model.buffers()):
            this = weakref.ref(self)

            def before_forward() -> None:
                replicas = this()
                if replicas is not None:
                    replicas.before_forward()

            self._hook = ForwardHook(self._model, before_forward)

    def before_forward(self) -> None:
        """Send rank 0's buffers before a training forward."""
        if self._hook is not None and self._model.training and torch.is_grad_enabled():
            self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Send rank 0's buffers; all ranks call it."""
        if self._sends_buffers:
            with untraced(), torch.inference_mode(mode=False), torch.no_grad():
                self._control.broadcast([item.data for item in self._model.buffers()])

    def close(self) -> None:
        """Take the hook off; idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
