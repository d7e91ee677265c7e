"""The strategy of Lightning's Trainer, for either spelling of the package."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import CheckpointError, ZeroError
from zero_plugin.integrations._lightning.common import (
    EngineSlots,
    PrecisionPlugins,
    build_config,
    check_callbacks,
    check_device_can,
    config_for,
    fits_in_host_memory,
    is_built_in_shards,
    needs_process_group,
    plan_config,
    take_auto,
)
from zero_plugin.integrations._lightning.folders import DELAYED_KEY, CheckpointForm, Folders

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as Base
    from torch.optim import Optimizer

    from zero_plugin.config import ZeroConfig
    from zero_plugin.optim.kept import KeptStates
else:
    Base = object

# How long a failed rank waits for the others to have failed as well, before it gives up saving a checkpoint.
EXCEPTION_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The classes and functions of one spelling of Lightning that the strategy needs.

    Attributes:
        precision: the precision plugins, stock and ours.
        no_optimizer: stands for an optimizer when `configure_optimizers` returns None.
        sync_module_states: broadcasts parameters and buffers from rank 0.
        reset_seed: seeds again what `seed_everything` seeded.
    """

    precision: PrecisionPlugins
    no_optimizer: type[Any]
    sync_module_states: Callable[[nn.Module], None]
    reset_seed: Callable[[], None]


class TrainerStrategy(Base):
    """Mixin that turns DDPStrategy into ours: the engine reduces, shards and steps; the module stays unwrapped.

    Launching, ranks, collectives for metrics, samplers and `torch.compile` support are DDPStrategy's.
    """

    spelling: Spelling

    def __init__(
        self,
        config: ZeroConfig | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Any = "popen",
        checkpoint: CheckpointForm = "auto",
        **settings: Any,
    ) -> None:
        self._auto = take_auto(config, settings)
        self._config = build_config(config, settings)
        self._folders = Folders(checkpoint, self._config)
        self._slots = EngineSlots()
        # The optimizer states of a fit that has ended, for a `trainer.save_checkpoint` after `trainer.fit`.
        self._kept: KeptStates | None = None
        self._ended_in_folders = False
        self._accumulates = False
        self._buffers_are_due = True
        self._all_failed = False
        self._loads_late = False
        # Holds all weights here through a validation whose length differs between ranks.
        self._validation = ExitStack()
        optional: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **optional,
        )

    # ------------------------------------------------------------------ what users may look at

    @property
    def config(self) -> ZeroConfig:
        """The settings; fp16 precisions add a dynamic loss scale when none was set."""
        return self._config

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine while `Trainer.fit` runs with an optimizer, else None."""
        return self._slots.only

    # ------------------------------------------------------------------ precision

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin; never the stock one, once the Trainer has given it."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer chooses the plugin after the strategy, and calls this setter with it.
        self._precision_plugin = (
            None
            if precision_plugin is None
            else self.spelling.precision.convert(precision_plugin, self._slots)
        )

    # ------------------------------------------------------------------ set-up

    def setup_distributed(self) -> None:
        """Make the default process group, unless this is the only process and nothing else suggests one."""
        self.set_world_ranks()
        if needs_process_group(self.world_size):
            super().setup_distributed()
        else:
            self.spelling.reset_seed()

    def setup(self, trainer: Trainer) -> None:
        """Place the module and, to fit, make its optimizers and the engine; nothing is wrapped."""
        self._require(self.accelerator).setup(trainer)
        fitting = _is_fitting(trainer)
        check_device_can(str(self.precision_plugin.precision), self.root_device)
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self._require(self.model))
        self.model = self.precision_plugin.convert_module(self._require(self.model))
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        elif torch.distributed.is_initialized():
            self.spelling.sync_module_states(self._require(self.model))
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call `configure_optimizers` and give what it returns to a new engine."""
        self._close_engine()
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        # A user may return Lightning's wrappers; the engine and the new wrappers need what is inside.
        optimizers = [_unwrap(optimizer) for optimizer in self.optimizers]
        # And a user may return the optimizers of the last fit, which go on from where they were, as in torch.
        kept = self._kept
        states = {
            number: kept.state_dict(optimizer)
            for number, optimizer in enumerate(optimizers)
            if kept is not None and kept.holds(optimizer)
        }
        self._kept = None
        model = self._require(self.model)
        if all(isinstance(optimizer, self.spelling.no_optimizer) for optimizer in optimizers):
            # There is no optimizer to shard, but backward must still average gradients over the ranks.
            if torch.distributed.is_initialized() and any(
                p.requires_grad for p in model.parameters()
            ):
                self.configure_ddp()
            return
        if self._auto is not None:
            self._config = plan_config(model, optimizers, self._auto)
        config = config_for(self._config, str(self.precision_plugin.precision))
        if config.shards_parameters:
            connected: Any = trainer
            check_callbacks(connected.callbacks)
        engine = ZeroEngine(model, optimizers, config)
        self._slots.engines.append(engine)
        for number, state in states.items():
            engine.load_optimizer_state_dict(optimizers[number], state)
        self._buffers_are_due = True
        # Wrappers copy the class of what they wrap, and the engine has just changed it.
        self.optimizers = optimizers

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, on rank 0's buffers if this is the first of the micro-batches of a step."""
        engine = self._slots.only
        if engine is not None:
            # The Trainer calls `training_step`, not the module's forward, which the engine watches.
            if self._buffers_are_due:
                engine.broadcast_buffers()
            self._buffers_are_due = not self._accumulates
        if engine is None or not getattr(self.lightning_module, "automatic_optimization", True):
            return super().training_step(*args, **kwargs)
        with engine.forward_context():
            return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside: backward adds to the gradients of a step that is not complete yet."""
        engine = self._slots.only
        before, self._accumulates = self._accumulates, True
        try:
            with super().block_backward_sync() if engine is None else engine.no_sync():
                yield
        finally:
            self._accumulates = before

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; sharded weights that it uses outside their modules are gathered."""
        engine = self._slots.only
        with nullcontext() if engine is None else engine.evaluation_context():
            return super().validation_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Validate with rank 0's buffers on every rank, as under DDP.

        Sharded weights are gathered module by module, which takes as many batches on every rank. Where their numbers differ,
        all weights are gathered for the whole validation.
        """
        engine = self._slots.only
        if engine is not None:
            engine.broadcast_buffers()
            if engine.config.shards_parameters and not self._same_on_every_rank(
                self._require(self.lightning_module).trainer._evaluation_loop.max_batches  # noqa: SLF001
            ):
                logging.getLogger("zero_plugin").warning(
                    "ranks validate on different numbers of batches, so all weights are gathered for this validation: give "
                    "every rank as many (Lightning's own DistributedSampler does) to gather them module by module"
                )
                self._validation.enter_context(engine.full_params())
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Let go of weights that were gathered for the validation."""
        self._validation.close()
        super().on_validation_end()

    def _same_on_every_rank(self, value: Any) -> bool:
        if self.world_size == 1:
            return True
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, value)
        return all(item == found[0] for item in found)

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the module was built in shards, which only an engine can fill."""
        if self._slots.only is None:
            self._loads_late = is_built_in_shards(self._require(self.lightning_module))
        return self._loads_late

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state in torch's format on rank 0, empty on the others; all ranks must call."""
        optimizer = _unwrap(optimizer)
        engine = self._slots.of(optimizer)
        if self._folders.wants(engine):
            return {}  # The engine saves it.
        if engine is not None:
            try:
                return engine.optimizer_state_dict(optimizer, rank0_only=True)
            except BaseException:
                if self._all_failed:
                    self._close_engine()  # the Trainer does not reach its own teardown then
                raise
        if self._kept is not None and self._kept.holds(optimizer):
            return self._kept.state_dict(optimizer, rank0_only=True)
        return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file, or the folder that every rank writes its part of; all ranks call it."""
        engine = self._slots.only
        if engine is None and self._ended_in_folders and storage_options is None:
            if self.is_global_zero:
                module = self._require(self.lightning_module)
                optimizers = list(map(_unwrap, self.optimizers))
                self._folders.save_ended(checkpoint, filepath, module, optimizers)
            return
        if engine is None or not self._folders.wants(engine):
            if engine is not None and engine.config.delayed_update:
                self._folders.note_delay(engine, checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options={storage_options!r} are for files: leave them out, or give the strategy checkpoint='file'"
            )
        try:
            self._folders.save(engine, checkpoint, self.broadcast(filepath))
        except BaseException:
            if self._all_failed:
                self._close_engine()  # the Trainer does not reach its own teardown then
            raise

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or what Lightning itself keeps in a folder; the rest is read when it is asked for."""
        found = self._folders.open(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only) if found is None else found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give every rank its part of the states in a checkpoint, ours or plain DDP's.

        Raises:
            CheckpointError: it holds another number of optimizers.
        """
        engine = self._slots.only
        if engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        if self._folders.is_loading:
            self._folders.load_engine(engine)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds the states of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(self.optimizers)}: resume with the same optimizers"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            engine.load_optimizer_state_dict(_unwrap(optimizer), state)
        if DELAYED_KEY in checkpoint:
            engine.load_delayed_update_state(checkpoint[DELAYED_KEY])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's full state: up to stage 2 on every rank, at stage 3 on rank 0, empty on the others.

        All ranks must call. It is the first thing every checkpoint asks for.

        Raises:
            CheckpointError: this rank is handling an exception that the other ranks have not met.
        """
        engine = self._slots.only
        self._check_every_rank_saves()
        if self._folders.wants(engine):
            return {}  # The engine saves it.
        if engine is None or not engine.config.shards_parameters:
            return super().lightning_module_state_dict()
        return engine.full_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a module's full state, into the shards if weights are sharded already; every rank gives it."""
        engine = self._slots.only
        if self._folders.is_loading:
            self._folders.load_model(self._require(self.lightning_module), engine, strict=strict)
            return
        with nullcontext() if engine is None else engine.full_params(writeback=True):
            super().load_model_state_dict(checkpoint, strict=strict)

    def _check_every_rank_saves(self) -> None:
        """Refuse to gather states that the other ranks will never send.

        `ModelCheckpoint(save_on_exception=True)` and `OnExceptionCheckpoint` save from the rank that failed. If all
        ranks failed the save works; if one did, the others are elsewhere and it would wait for them in vain.
        """
        engine = self._slots.only
        trainer = self._require(self.lightning_module).trainer
        if engine is None or self._all_failed or trainer.state.status.value != "interrupted":
            return
        _drop_step(engine)
        if self.world_size > 1 and not self._every_rank_failed():
            self._close_engine()  # the Trainer does not reach its own teardown when a callback raises
            raise CheckpointError(
                f"no checkpoint was saved on the exception of rank {self.global_rank}: optimizer states are sharded, "
                f"and not all of the {self.world_size} ranks failed within {EXCEPTION_SECONDS:.0f} s. "
                "Resume from the last regular checkpoint"
            )
        self._all_failed = True

    def _every_rank_failed(self) -> bool:
        store: Any = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        # Counted in the store, since a process may train, fail and train again.
        count = store.add(f"zero_plugin/exceptions/{self.global_rank}", 1)
        keys = [f"zero_plugin/exception/{count}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.global_rank], "failed")
        try:
            store.wait(keys, timedelta(seconds=EXCEPTION_SECONDS))
            found = "save"
        except RuntimeError:
            found = "give up"
        # A rank may come just as another stops waiting: what the first of them says holds for all.
        return store.compare_set(f"zero_plugin/exception/{count}", "", found) == b"save"

    # ------------------------------------------------------------------ end

    def on_exception(self, exception: BaseException) -> None:
        """Drop the step that was under way."""
        self._end_validation()
        engine = self._slots.only
        if engine is not None:
            _drop_step(engine)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the engine (threads, buffers, hooks), then do what DDPStrategy does.

        Sharded weights come back to host memory, on every rank, if the fit ended well and they fit there. Else they stay
        sharded where there are several processes, and raise when they are used.
        """
        engine = self._slots.only
        gone = False
        if engine is not None:
            kept = engine.keep_states()
            gather = engine.config.shards_parameters and self._can_gather(engine)
            gone = engine.config.shards_parameters and not gather and self.world_size > 1
            self._close_engine(gather=gather)
            kept.move_to_cpu()
            self._kept = kept
            self._ended_in_folders = self._folders.wants(engine)
        with self._without_module() if gone else nullcontext():
            super().teardown()

    def _can_gather(self, engine: ZeroEngine) -> bool:
        """Whether the ranks are together, and each has memory for all weights."""
        if self._require(self.lightning_module).trainer.state.status.value == "interrupted":
            return False
        fits = fits_in_host_memory(engine.model, self.num_processes)
        fits = self.reduce_boolean_decision(fits) if self.world_size > 1 else fits
        if not fits:
            logging.getLogger("zero_plugin").warning(
                "the weights stay sharded after the fit, since host memory does not hold all of them for each of %d local "
                "processes: load a checkpoint of the fit where they are needed",
                self.num_processes,
            )
        return fits

    @contextmanager
    def _without_module(self) -> Generator[None]:
        """Inside, the Trainer's teardown finds no module: it would move parameters that have no memory."""
        module, self._lightning_module = self._lightning_module, None
        try:
            yield
        finally:
            self._lightning_module = module

    def _end_validation(self) -> None:
        try:
            self._validation.close()
        except ZeroError as error:  # the exception that broke the validation is the one to raise
            logging.getLogger("zero_plugin").warning("while a validation was dropped: %s", error)

    def _close_engine(self, *, gather: bool = False) -> None:
        self._end_validation()
        while self._slots.engines:
            self._slots.engines.pop().close(gather=gather)
        self._all_failed = False

    @staticmethod
    def _require(value: Any) -> Any:
        if value is None:
            raise RuntimeError(
                "the strategy was used before the Trainer connected it: call it through the Trainer"
            )
        return value


def _drop_step(engine: ZeroEngine) -> None:
    try:
        engine.abort_step()
    except ZeroError as error:  # the exception that broke the step is the one to raise
        logging.getLogger("zero_plugin").warning("while a step was dropped: %s", error)


def _unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside a LightningOptimizer, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def _is_fitting(trainer: Trainer) -> bool:
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"
