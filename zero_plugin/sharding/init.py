"""Builds a model straight into shards: what a module registers is cut to this rank's slices as soon as it is built.

A parameter that was cut stays the same object, guarded. Whoever touches it inside the context, to write or to read, finds
it *opened*: its full weights are gathered into it and it is a plain parameter again, until it is cut anew. That happens
only at points every rank passes (a module begins or ends its `__init__`, another cut parameter is touched, the
context ends), and only once no other tensor shares the memory, on any rank.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError, EngineStateError, ParameterError
from zero_plugin.runtime.memory import allocate_file, allocate_host, forget_pages, trim_heap
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.guard import ReleasedParameter, is_metadata, name_of, tensors_in
from zero_plugin.sharding.layout import cut
from zero_plugin.sharding.precut import (
    Precut,
    empty_weights,
    precut_of,
    record_of,
    set_record,
)
from zero_plugin.sharding.units import can_shard
from zero_plugin.trace import Ledger

_PIECE = 1 << 18
"""Elements that are gathered at once, of all ranks' slices together."""

_FILE_FROM = 1 << 16
"""Bytes of a slice from which it lies in a file, where weights do."""

_TRIM_FROM = 1 << 20
"""Freed bytes below which nothing is given back."""

_ABOUT_SHAPES = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    *("new_tensor", "is_floating_point", "is_complex", "numel", "is_same_size"),
    "_has_compatible_shallow_copy_type",
)
_LIKE = frozenset(
    getattr(place, name)
    for name in _ABOUT_SHAPES
    for place in (torch, Tensor)
    if hasattr(place, name)
)
"""Functions that ask for shape, dtype and device only."""

_INITIALISERS = (
    *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)
_OVERWRITE = frozenset(getattr(nn.init, name) for name in _INITIALISERS) | frozenset(
    getattr(Tensor, name) for name in ("normal_", "uniform_", "zero_", "fill_", "exponential_")
)
"""Functions that write every element of what they are given first, and read none."""

_CONVERSIONS = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
"""Methods that act on each element alone, so on slices as well."""

_DATA: Any = Tensor.data
_SET_DATA = _DATA.__set__


class UnplacedParameter(ReleasedParameter):
    """A parameter that was cut while its model was built, and that no engine has taken over."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata; else open the parameters and compute with them."""
        kwargs = kwargs or {}
        if is_metadata(func) or func in _LIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = [item for item in tensors_in(args, kwargs) if isinstance(item, UnplacedParameter)]
        builder = _builder_of(found[0])
        converted = builder.convert(func, args, kwargs)
        if converted is not None:
            return converted
        if func == _SET_DATA and args[0] is found[0]:
            builder.replace(found[0], args[1])
            return None
        builder.open(found, name_of(func), overwrite=func in _OVERWRITE)
        try:
            return func(*args, **kwargs)
        except BaseException:
            builder.forget(found)
            raise

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Shape and dtype; never values."""
        del tensor_contents
        return (
            f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Exchange the memory of the opened parameter."""
        _builder_of(self).open([self], "set_", overwrite=True)
        return Tensor.set_(self, *args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """The opened parameter as another class."""
        _builder_of(self).open([self], "as_subclass", overwrite=False)
        return Tensor.as_subclass(self, cls)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy with a slice of its own."""
        record = _record_of(self)
        return _builder_of(self).hollow(self, record, record.part.clone())

    def __reduce_ex__(self, proto: object) -> Any:
        """Refuse: what would be saved has no weights."""
        del proto
        raise ParameterError(
            f"{_record_of(self).place} is sharded and cannot be pickled: give the model to ZeroEngine(model, optimizer, "
            "ZeroConfig(stage=3)) and save engine.full_state_dict()"
        )


class ShardedBuild:
    """The context in which a model is built into shards; a collective at more than one rank.

    Every rank builds the same model. Where values differ, rank 0's are taken.

    Args:
        config: of the engine to come; `stage=3`.

    Raises:
        ConfigError: the config shards no parameters, or differs from that of an enclosing context.
    """

    def __init__(self, config: ZeroConfig) -> None:
        if not config.shards_parameters:
            raise ConfigError(
                f"init_context was given stage={config.stage}, at which weights are whole: set stage=3, or build the model "
                "without the context"
            )
        self._config = config
        self._outer: ShardedBuild | None = None
        self._depth = 0
        self._thread = 0
        self._group: ProcessGroup | None = None
        self._guard: type[UnplacedParameter] = type(
            "UnplacedParameter",
            (UnplacedParameter,),
            {"keeper_reference": weakref.ref(self), "__module__": __name__},
        )
        self._patches: _Patches | None = None
        self._inside: list[nn.Module] = []
        self._registered: list[tuple[nn.Module, nn.Parameter]] = []
        self._opened: list[nn.Parameter] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._largest = 0
        self._freed = 0
        self._sequence = 0
        self._plain_uses = 0

    @property
    def is_open(self) -> bool:
        """Whether the model is still being built."""
        return self._depth > 0

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    @property
    def _size(self) -> int:
        return 1 if self._group is None else self._group.size

    # The context -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join the ranks and follow what modules register."""
        outer = current_build()
        if outer is not None:
            outer.join(self._config)
            self._outer = outer
            return self
        if self._group is not None or self._depth:
            raise EngineStateError(
                "an init_context is entered twice: make a new one for each `with`"
            )
        self._group = ProcessGroup.create(
            device=torch.device("cpu"),
            ledger=Ledger(),
            timeout_seconds=self._config.timeout_seconds,
        )
        self._thread = threading.get_ident()
        self._plain_uses = _uses(nn.Parameter(torch.empty(1, device="cpu")))
        self._depth = 1
        self._patches = _Patches(self)
        return self

    def join(self, config: ZeroConfig) -> None:
        """A context inside this one.

        Raises:
            ConfigError: it has another config.
        """
        if config != self._config:
            raise ConfigError(
                "an init_context inside another one was given another config: give both the same one"
            )
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cut what is left, and leave torch as it was."""
        if self._outer is not None:
            self._outer.leave()
            self._outer = None
            return
        try:
            if kind is None:
                self._sweep()
                self._settle(force=True)
        finally:
            self.leave()
            if self._patches is not None:
                self._patches.remove()
                self._patches = None
            self._inside.clear()
            self._registered.clear()
            for item in self._opened:
                set_record(item, None)
            self._opened.clear()
            self._modules.clear()
            if self._group is not None:
                self._group.close()

    def leave(self) -> None:
        """One context less."""
        self._depth -= 1

    # What modules do ---------------------------------------------------------------------------------------------

    def construct(self, module: nn.Module, run: Callable[[], None]) -> None:
        """Run a module's `__init__`, then cut its parameters."""
        if threading.get_ident() != self._thread or any(module is item for item in self._inside):
            run()
            return
        self._settle()
        self._inside.append(module)
        self._modules[id(module)] = weakref.ref(module)
        try:
            run()
        except BaseException:
            self._registered[:] = [item for item in self._registered if item[0] is not module]
            raise
        finally:
            self._inside.pop()
        self._settle()

    def register(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """A module registers a parameter.

        Raises:
            ParameterError: its shape is not known yet.
        """
        if threading.get_ident() != self._thread or parameter is None:
            return
        if isinstance(parameter, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ParameterError(
                f"{type(module).__name__}.{name} is the parameter of a lazy module, and its shape is not known yet: inside "
                "zero_plugin.init_context, give the module its sizes (nn.Linear in place of nn.LazyLinear)"
            )
        if not any(item is module for item in self._inside):
            self._settle()
        if isinstance(parameter, nn.Parameter):
            self._registered.append((module, parameter))

    # What users do with cut parameters -----------------------------------------------------------------------------

    def name_of(self, parameter: Tensor) -> str:
        """Class and name in its module."""
        return _place_of(parameter)

    def open(
        self, parameters: Sequence[UnplacedParameter], action: str, *, overwrite: bool
    ) -> None:
        """Make parameters plain, with their full weights.

        Args:
            parameters: that were cut.
            action: what is done with them, for the message.
            overwrite: their values will be written before they are read.

        Raises:
            ParameterError: the context has ended, and other ranks may not take part.
        """
        unique = list({id(item): item for item in parameters}.values())
        if not self.is_open:
            self._check_alone(unique[0], action)
            for item in unique:
                record = _record_of(item)
                _show(item, record.part.view(item.shape))
                set_record(item, None)
            return
        with _silently():
            self._settle(room=sum(_nbytes(item) for item in unique))
            for item in unique:
                record = _record_of(item)
                full = record.part if self._size == 1 else self._full(item, record, overwrite)
                _show(item, full.view(item.shape))
                self._opened.append(item)

    def borrow(self, parameters: Sequence[Tensor], action: str) -> None:
        """Open parameters for a computation together with those of an engine."""
        self.open(
            [p for p in parameters if isinstance(p, UnplacedParameter)], action, overwrite=False
        )

    def discard(self, parameters: Sequence[Tensor]) -> None:
        """Nothing to drop: writes are kept."""

    @staticmethod
    def saving() -> AbstractContextManager[None]:
        """Nothing to see to: cut weights are no plain tensor's memory."""
        return nullcontext()

    def forget(self, parameters: Sequence[nn.Parameter]) -> None:
        """A computation raised: parameters that it may have written to in part are what they were."""
        if self._size == 1:
            return
        for item in parameters:
            record = record_of(item)
            if record is not None and type(item) is nn.Parameter:
                self._opened[:] = [other for other in self._opened if other is not item]
                self._close(item, record.part, record.place)

    def replace(self, parameter: UnplacedParameter, value: Tensor) -> None:
        """`parameter.data = value`."""
        record = precut_of(value)
        if record is not None:
            if value is not parameter:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.data = value.data
                set_record(parameter, record)
            return
        if not self.is_open:
            self._check_alone(parameter, "data")
        _show(parameter, value)
        if self.is_open:
            self._opened.append(parameter)
        else:
            set_record(parameter, None)

    def convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A change of dtype or device, made on the slice; None if it is not one."""
        if name_of(func) not in _CONVERSIONS or func is not getattr(Tensor, name_of(func), None):
            return None
        first, rest = args[0], args[1:]
        others = tensors_in(rest, kwargs)
        if (
            not isinstance(first, UnplacedParameter)
            or "memory_format" in kwargs
            or (torch.is_grad_enabled() and first.requires_grad)
            or any(isinstance(item, UnplacedParameter) for item in others)
        ):
            return None
        probe: Tensor = func(
            torch.empty(0, dtype=first.dtype, device=first.device), *rest, **kwargs
        )
        if (probe.dtype, probe.device) == (first.dtype, first.device):
            return first
        if probe.device.type == "meta":
            return torch.empty(first.shape, dtype=probe.dtype, device="meta")
        record = _record_of(first)
        part = self._store(record.part.to(probe.dtype), probe.device)
        return self.hollow(first, record, part, like=probe)

    def hollow(
        self, source: UnplacedParameter, record: Precut, part: Tensor, like: Tensor | None = None
    ) -> Tensor:
        """A new cut parameter of the shape of `source` with a slice of its own."""
        like = torch.empty(0, dtype=source.dtype, device=source.device) if like is None else like
        found = nn.Parameter(
            empty_weights(source.shape, like.dtype, like.device), requires_grad=source.requires_grad
        )
        set_record(
            found,
            Precut(
                part=part, shards=record.shards, rank=record.rank, place=record.place, builder=self
            ),
        )
        found.__class__ = self._guard
        return found

    # Cutting -----------------------------------------------------------------------------------------------------

    def _settle(self, *, room: int | None = None, force: bool = False) -> None:
        """A point that every rank passes: cut what is complete and shared with nobody.

        Args:
            room: bytes that will be opened; leave open what fits beside them into the largest module. None: leave nothing open.
            force: cut also what shares its memory.
        """
        if not (self._opened or self._registered):
            return
        with _silently():
            fresh = self._take_fresh()
            kept = 0
            if room is not None:
                kept = self._how_many_stay(room)
            split = len(self._opened) - kept
            old, stay = self._opened[:split], self._opened[split:]
            items = [*((item, _place_of(item)) for item in old), *fresh]
            if not items:
                return
            ready = self._agree([item for item, _ in items], force=force)
            self._opened[:] = [
                item for item, done in zip(old, ready, strict=False) if not done
            ] + stay
            for (item, place), done in zip(items, ready, strict=True):
                if done:
                    self._close(item, self._slice(item), place)
                elif record_of(item) is None:
                    # Shares its memory: watched like an opened one from now on.
                    set_record(item, self._record(torch.empty(0), place))
                    self._opened.append(item)

    def _take_fresh(self) -> list[tuple[nn.Parameter, str]]:
        """Registered parameters of modules that are complete."""
        found: dict[int, tuple[nn.Parameter, str]] = {}
        left: list[tuple[nn.Module, nn.Parameter]] = []
        own: dict[int, int] = {}
        for module, parameter in self._registered:
            if any(module is item for item in self._inside):
                left.append((module, parameter))
                continue
            names = [name for name, item in _own_parameters(module) if item is parameter]
            if not names or isinstance(parameter, ReleasedParameter) or id(parameter) in found:
                continue
            if any(parameter is item for item in self._opened):
                continue
            if self._can_cut(parameter):
                found[id(parameter)] = (parameter, f"{type(module).__name__}.{names[0]}")
                own[id(module)] = own.get(id(module), 0) + _nbytes(parameter)
        self._registered[:] = left
        self._largest = max([self._largest, *own.values()])
        return list(found.values())

    def _can_cut(self, parameter: nn.Parameter) -> bool:
        return (
            can_shard(parameter, self._config.persist_below)
            and parameter.device.type != "meta"
            and not parameter.is_inference()
        )

    def _how_many_stay(self, room: int) -> int:
        """Of the opened parameters, how many of the youngest may stay open."""
        self._largest = max(self._largest, room)
        left = self._largest - room
        count = 0
        for item in reversed(self._opened):
            left -= _nbytes(item)
            if left < 0:
                break
            count += 1
        return count

    def _agree(self, items: Sequence[nn.Parameter], *, force: bool) -> list[bool]:
        """Which parameters all ranks can cut; those hold rank 0's values then."""
        group = self._group
        if self._size == 1 or group is None:
            return [True] * len(items)
        free = [force or _uses(item) <= self._plain_uses for item in items]
        rows = group.exchange(
            torch.tensor(
                [[int(is_free), _digest(item)] for is_free, item in zip(free, items, strict=True)],
                dtype=torch.int64,
                device="cpu",
            ),
            label=f"weights of a module ({len(items)})",
        )
        ready = [all(bool(row[i, 0]) for row in rows) for i in range(len(items))]
        unequal = [
            item.data
            for i, item in enumerate(items)
            if ready[i] and any(row[i, 1] != rows[0][i, 1] for row in rows)
        ]
        group.broadcast(unequal)
        return ready

    def _slice(self, parameter: nn.Parameter) -> Tensor:
        """This rank's slice of full weights."""
        data = parameter.data
        flat = data.contiguous().view(-1)
        own = flat.untyped_storage().nbytes() == flat.numel() * flat.element_size()
        if self._size == 1 and own and flat.untyped_storage().resizable() and self._stays(data):
            return flat
        part = cut(flat.numel(), self._size)[self._rank]
        return self._store(flat.narrow(0, part.start, part.numel), data.device)

    def _stays(self, data: Tensor) -> bool:
        if self._config.params == "nvme":
            return _nbytes(data) < _FILE_FROM
        return data.device.type == "cpu" or self._config.params == "device"

    def _store(self, part: Tensor, device: torch.device) -> Tensor:
        """A slice in memory of its own, in the tier of the weights."""
        if device.type != "cpu" and self._config.params == "device":
            return part.to(device, copy=True)
        nbytes = part.numel() * part.element_size()
        in_file = self._config.params == "nvme" and nbytes >= _FILE_FROM
        raw = (
            allocate_file(self._config.nvme_paths[0], nbytes)
            if in_file
            else allocate_host(max(nbytes, 64))
        )
        own = raw[:nbytes].view(part.dtype)
        own.copy_(part)
        if in_file:
            forget_pages(raw)
        return own

    def _record(self, part: Tensor, place: str) -> Precut:
        return Precut(part=part, shards=self._size, rank=self._rank, place=place, builder=self)

    def _trim(self, nbytes: int) -> None:
        """Note bytes that were freed, and give them back once they are worth it."""
        self._freed += nbytes
        if self._freed >= _TRIM_FROM:
            self._freed = 0
            trim_heap()

    def _close(self, parameter: nn.Parameter, part: Tensor, place: str) -> None:
        """Take a parameter's memory, and guard it."""
        parameter.data = empty_weights(parameter.shape, parameter.dtype, parameter.device)
        # Whoever saved it for a backward finds a changed weight, not an empty one.
        torch.autograd.graph.increment_version(parameter)
        set_record(parameter, self._record(part, place))
        parameter.__class__ = self._guard
        if self._size > 1:
            self._trim(_nbytes(parameter))

    def _full(self, parameter: Tensor, record: Precut, overwrite: bool) -> Tensor:  # noqa: FBT001
        """Full weights [numel], gathered from all ranks piece by piece; a collective."""
        group = self._group
        numel = parameter.numel()
        full = torch.empty(numel, dtype=parameter.dtype, device=parameter.device)
        if overwrite or group is None:
            return full
        slices = cut(numel, self._size)
        self._sequence += 1
        step = max(1, _PIECE // self._size)
        for start in range(0, slices[0].numel, step):
            length = min(step, slices[0].numel - start)
            mine = torch.zeros(length, dtype=full.dtype, device="cpu")
            held = record.part[start : start + length]
            mine[: held.numel()].copy_(held)
            rows = torch.empty(self._size, length, dtype=full.dtype, device="cpu")
            group.all_gather(rows, mine, tag=self._sequence, label=record.place)
            for row, part in zip(rows, slices, strict=True):
                count = min(length, part.numel - start)
                if count > 0:
                    full.narrow(0, part.start + start, count).copy_(row[:count])
        return full

    def _sweep(self) -> None:
        """Register what came into modules by other ways."""
        for reference in list(self._modules.values()):
            module = reference()
            if module is not None and "_parameters" in vars(module):
                self._registered += [(module, item) for _, item in _own_parameters(module)]

    def _check_alone(self, parameter: UnplacedParameter, action: str) -> None:
        if self._size > 1:
            raise ParameterError(
                f"{_record_of(parameter).place}, a parameter of shape {tuple(parameter.shape)}, was built in shards over "
                f"{self._size} ranks and was used ({action}) before an engine took it over: give the model to "
                "ZeroEngine(model, optimizer, ZeroConfig(stage=3)), or do it inside zero_plugin.init_context, on every rank"
            )


class _Patches:
    """Wraps `__init__` of every module class, and `register_parameter`, until removed."""

    def __init__(self, build: ShardedBuild) -> None:
        self._build = build
        self._wrapped: list[tuple[type[nn.Module], Any]] = []
        self._register: Any = nn.Module.register_parameter
        self._subclass: Any = nn.Module.__dict__.get("__init_subclass__")
        register = self._register

        @functools.wraps(register)
        def register_parameter(module: nn.Module, name: str, param: Any) -> None:
            register(module, name, param)
            build.register(module, name, param)

        def init_subclass(cls: type[nn.Module], **options: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**options)
            self._wrap(cls)

        target: Any = nn.Module
        target.register_parameter = register_parameter
        target.__init_subclass__ = classmethod(init_subclass)
        seen: set[type] = set()
        waiting: list[type[nn.Module]] = [nn.Module]
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                self._wrap(cls)
                waiting += type.__subclasses__(cls)

    def remove(self) -> None:
        """Leave torch as it was."""
        for cls, original in self._wrapped:
            target: Any = cls
            target.__init__ = original
        self._wrapped.clear()
        module: Any = nn.Module
        module.register_parameter = self._register
        if self._subclass is None:
            del module.__init_subclass__
        else:
            module.__init_subclass__ = self._subclass

    def _wrap(self, cls: type[nn.Module]) -> None:
        original = cls.__dict__.get("__init__")
        if not isinstance(original, FunctionType):
            return
        build = self._build

        @functools.wraps(original)
        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            build.construct(self, lambda: original(self, *args, **kwargs))

        function: Any = wrapped
        function.zero_build = build
        target: Any = cls
        target.__init__ = wrapped
        self._wrapped.append((cls, original))


def current_build() -> ShardedBuild | None:
    """The context that modules are built in now, or None."""
    found: ShardedBuild | None = getattr(nn.Module.__init__, "zero_build", None)
    return found


class _silently:  # noqa: N801 - reads like a function
    """No gradients, no inference tensors, no torch functions of modes."""

    def __enter__(self) -> None:
        self._contexts = (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
        )
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _record_of(parameter: Tensor) -> Precut:
    record = precut_of(parameter)
    if record is None:
        raise ParameterError(
            f"a sharded parameter of shape {tuple(parameter.shape)} has lost its weights: it was taken over by an engine that "
            "is gone; build the model anew"
        )
    return record


def _builder_of(parameter: UnplacedParameter) -> ShardedBuild:
    builder = _record_of(parameter).builder
    if not isinstance(builder, ShardedBuild):
        raise TypeError(f"{type(builder).__name__} is not a ShardedBuild")
    return builder


def _place_of(parameter: Tensor) -> str:
    record = record_of(parameter)
    return "(unknown)" if record is None else record.place


def _show(parameter: nn.Parameter, full: Tensor) -> None:
    parameter.__class__ = nn.Parameter
    parameter.data = full


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _uses(parameter: Tensor) -> int:
    """How many tensors share a parameter's memory, itself included."""
    count: Any = getattr(torch._C, "_storage_Use_Count")  # noqa: B009 - private, and without a type
    return int(count(parameter.untyped_storage()._cdata))


def _digest(parameter: Tensor) -> int:
    """Of the values; 0 for a file mapping, which is not read for this."""
    if not parameter.untyped_storage().resizable():
        return 0
    raw: Any = parameter.data.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw) << 31 ^ zlib.adler32(raw)
