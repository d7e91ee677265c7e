"""The methods of transformers' Trainer that have to know that states are sharded."""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from zero_plugin.errors import ConfigError, FrameworkError
from zero_plugin.integrations._huggingface import shards
from zero_plugin.integrations._huggingface.accelerator import ZeroAccelerator, class_over, original
from zero_plugin.integrations._huggingface.callbacks import adapt
from zero_plugin.integrations._huggingface.optimizers import choose
from zero_plugin.integrations._lightning.common import is_built_in_shards
from zero_plugin.integrations._lightning.precision import from_grad_scaler, to_grad_scaler
from zero_plugin.versions import cure

if TYPE_CHECKING:
    from collections.abc import Generator

    from transformers import Trainer as Base

    from zero_plugin.engine import ZeroEngine
else:
    Base = object

_SCALER, _SCHEDULER = "scaler.pt", "scheduler.pt"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# What we override or call: method -> parameters that have to be there.
_METHODS: dict[str, tuple[str, ...]] = {
    "create_accelerator_and_postprocess": (),
    "train": ("resume_from_checkpoint",),
    "add_callback": ("callback",),
    "create_optimizer": (),
    "evaluation_loop": (),
    "save_model": ("output_dir", "_internal_call"),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_save_scaler": ("output_dir",),
    "_load_scaler": ("checkpoint",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_best_model": (),
    "log": ("logs",),
}


class ZeroTrainer(Base):
    """Mixin over the Trainer's class, or a subclass of it, put on an instance once its Accelerator is made."""

    accelerator: Any
    callback_handler: Any
    model: Any
    lr_scheduler: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; a delayed update is applied at the end."""
        result = super().train(*args, **kwargs)
        engine = self._engine
        if engine is not None and engine.config.delayed_update:
            engine.drain()
        return result

    def add_callback(self, callback: Any) -> None:
        """Add a callback; one that is known to read or write whole weights gathers them."""
        super().add_callback(callback)
        for item in self.callback_handler.callbacks:
            adapt(item)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer that `optim=` names; names whose package keeps states of its own get ours, or are refused."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = choose(self.args)
        return super().create_optimizer(*args, **kwargs)

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `from_pretrained` reads it; all ranks call it."""
        engine = self._engine
        if self._leaves_weights_out():
            with self._saves({}):
                super().save_model(output_dir, _internal_call=_internal_call)
            return
        config = None if engine is None else engine.config
        if (
            engine is None
            or config is None
            or not (config.shards_parameters or config.delayed_update)
        ):
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        if _reads_its_modules(self.model):
            with engine.full_params():
                super().save_model(output_dir, _internal_call=_internal_call)
            return
        state = self.accelerator.get_state_dict(self.model)
        with self._saves(state):
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        shown: dict[str, Any] | None = self.__dict__.get("_zero_state")
        super()._save(output_dir, state_dict=shown if state_dict is None else state_dict)
        if output_dir is None or not self.args.should_save:
            return
        if self.__dict__.get("_zero_shards") is False:
            shards.forget(output_dir)
        elif self._leaves_weights_out():
            for name in _WEIGHTS:
                # Written without a tensor.
                Path(output_dir, name).unlink(missing_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save what training resumes from: where the plugin says so, as shards in place of weights and optimizer state."""
        self.__dict__["_zero_shards"] = self._saves_shards()
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del self.__dict__["_zero_shards"]

    def _saves_shards(self) -> bool:
        if self._engine is None or self.args.save_only_model:
            return False
        reasons = {
            # An adapter's states are few, and its frozen base need not be in each checkpoint.
            "PEFT's adapters are saved alone": _is_adapted(self.model)
            and self.accelerator.zero_plugin.checkpoint == "auto"
            and not self._engine.config.delayed_update,
            "save_on_each_node=True writes whole files on each node": self.args.save_on_each_node,
        }
        because = next((reason for reason, present in reasons.items() if present), "")
        form = self.accelerator.zero_plugin.checkpoint
        return shards.wants_folder(form, self._engine.config, full_because=because)

    def _leaves_weights_out(self) -> bool:
        """Whether a checkpoint is being saved whose weights are in shards, and nobody else wants them."""
        whole = self.args.push_to_hub or _is_adapted(self.model)
        return bool(self.__dict__.get("_zero_shards")) and not whole

    @contextmanager
    def _saves(self, state: dict[str, Any]) -> Generator[None]:
        """Inside, `_save` writes this state dict, on the rank that has it; an upload saves once more inside."""
        before = self.__dict__.get("_zero_state")
        self.__dict__["_zero_state"] = state
        try:
            yield
        finally:
            self.__dict__["_zero_state"] = before

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather the optimizer's state, which all ranks do, and write it as the stock Trainer does."""
        zero = self.accelerator._zero  # noqa: SLF001
        if self._engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.__dict__.get("_zero_shards"):
            shards.save([self._engine], output_dir, first=False)
            if self.args.should_save:
                Path(output_dir, "optimizer.pt").unlink(missing_ok=True)
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))
            return
        wrapped: Any = self.optimizer
        with zero.only_on_rank_0(enabled=not self.args.save_on_each_node):
            state = wrapped.state_dict()
        with wrapped.showing(state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        engine = self._engine
        if engine is None or engine.config.loss_scale != "dynamic":
            super()._save_scaler(output_dir)
        elif self.args.should_save:
            torch.save(to_grad_scaler(engine.loss_scale_state()), Path(output_dir, _SCALER))

    # ------------------------------------------------------------------ loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, at stage 3 into the shards."""
        engine = self._engine
        if shards.holds_shards(resume_from_checkpoint):
            return  # by `_load_optimizer_and_scheduler`, which comes once the engine is made
        if engine is None and is_built_in_shards(self.model):
            # Only an engine can fill shards: done in `_load_optimizer_and_scheduler`, which comes after it is made.
            self.__dict__["_zero_late"] = resume_from_checkpoint
            return
        with nullcontext() if engine is None else engine.full_params(writeback=True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and shards.holds_shards(checkpoint):
            self.accelerator._zero.settle()  # noqa: SLF001
            shards.load([self._engine] if self._engine else [], checkpoint)
            scheduler = Path(checkpoint, _SCHEDULER)
            if scheduler.is_file():
                self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
            return
        if self.__dict__.pop("_zero_late", None) is not None and checkpoint is not None:
            self._load_from_checkpoint(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        engine = self._engine
        place = None if checkpoint is None else Path(checkpoint, _SCALER)
        if place is None or not place.is_file():
            return
        if engine is not None and engine.config.loss_scale == "dynamic":
            engine.load_loss_scale_state(from_grad_scaler(torch.load(place, weights_only=True)))

    def _load_best_model(self) -> None:
        engine, best = self._engine, self.state.best_model_checkpoint
        if engine is not None and best is not None and shards.holds_shards(best):
            shards.load([engine], best, weights_only=True)
            return
        with nullcontext() if engine is None else engine.full_params(writeback=True):
            super()._load_best_model()

    # ------------------------------------------------------------------ evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; a model that was built in shards gets its engine first."""
        engine = self._engine
        if engine is None and is_built_in_shards(self.model) and not self.is_in_train:
            self.create_optimizer()
            _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        elif engine is not None and not self.is_in_train:
            for name in ("fp16_full_eval", "bf16_full_eval"):
                if getattr(self.args, name):
                    raise ConfigError(
                        f"{name}=True casts the model for good, and its weights belong to an engine now: evaluate in a "
                        "process of its own, or use bf16=True, which computes in bf16 under autocast"
                    )
        return super().evaluation_loop(*args, **kwargs)

    # ------------------------------------------------------------------ logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the bytes that states take in each tier beside the training loss."""
        engine = self._engine
        if engine is not None and "loss" in logs:
            for tier, kinds in engine.memory().items():
                logs[f"zero_{tier}_bytes"] = sum(kinds.values())
            if engine.skipped_steps:
                logs["zero_skipped_steps"] = engine.skipped_steps
        super().log(logs, start_time)

    @property
    def _engine(self) -> ZeroEngine | None:
        engine: ZeroEngine | None = self.accelerator._zero.engine_of_model(original(self.model))  # noqa: SLF001
        return engine


def adopt(trainer: Any) -> None:
    """Make a Trainer ours, if its Accelerator is.

    Raises:
        FrameworkError: this release of transformers lacks a method that we override.
        ConfigError: the arguments ask for what an engine cannot do.
    """
    if not isinstance(trainer.accelerator, ZeroAccelerator):
        return
    for name, parameters in _METHODS.items():
        method = getattr(type(trainer), name, None)
        present: Any = () if method is None else inspect.signature(method).parameters
        missing = [p for p in parameters if p not in present]
        if method is None or missing:
            raise FrameworkError(
                f"transformers {transformers.__version__} has no Trainer.{name}({', '.join(missing)}) as zero-plugin "
                f"overrides it: {cure('transformers')}"
            )
    if trainer.args.n_gpu > 1:
        logging.getLogger("zero_plugin").warning(
            "%d GPUs are visible and one process was started, so one is used: start a process for each with accelerate "
            "launch or torchrun",
            trainer.args.n_gpu,
        )
        trainer.args._n_gpu = 1  # noqa: SLF001 - as the Trainer itself does to keep nn.DataParallel away
    trainer.__class__ = class_over(ZeroTrainer, type(trainer))


def _is_adapted(model: Any) -> bool:
    return any(base.__name__ == "PeftModel" for base in type(original(model)).__mro__)


def _reads_its_modules(model: Any) -> bool:
    """Whether PEFT asks modules for their weights even when it is given a state dict."""
    return any(
        base.__name__ == "AuxiliaryTrainingWrapper"
        for module in model.modules()
        for base in type(module).__mro__
    )
