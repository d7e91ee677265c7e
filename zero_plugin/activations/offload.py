"""Inputs of activation checkpoints go to host memory or files during forward and come back before backward needs them.

Lanes carry both copies. While a segment is computed again in backward, the inputs of the one before it are already on their way
(ZeRO-Infinity, SC'21, sections 5.1.2 and 5.2.2): two segments' inputs are on the device, whatever the number of segments.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero_plugin.activations.checkpoints import checkpoint_inputs
from zero_plugin.activations.files import FileSpace, FileSpaces
from zero_plugin.activations.slabs import HostSlab, HostSlabs
from zero_plugin.budget import Budget
from zero_plugin.errors import EngineStateError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.operations import Copy
from zero_plugin.sharding.guard import storage_key
from zero_plugin.sharding.hooks import InputHooks, check_version, untraced
from zero_plugin.store.store import NvmeStore

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device: a copy of them costs more than it frees."""

_SEGMENTS_ON_THEIR_WAY = 2
"""How many segments' inputs may wait for their copy to the host, and so still take device memory."""

_SLABS_FOR_FILES = 3
"""How many slabs the bytes of files pass through: one is read or written, one copied, one free."""


class _Kept:
    """One tensor whose bytes lie in a host slab or in a file.

    Args:
        tensor: the tensor.
        number: names it in labels.
    """

    __slots__ = (
        "arrival",
        "device",
        "dtype",
        "handles",
        "identity",
        "label",
        "lead",
        "restored",
        "restored_version",
        "shape",
        "slab",
        "space",
        "span",
        "storage",
        "stored",
        "stride",
        "version",
        "witness",
    )

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.label = f"checkpoint input {number}"
        self.identity = _identity(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.span = _span_bytes(tensor)
        # The same alignment again: some kernels give other bits at other offsets.
        alignment = 64 if tensor.is_cpu else 256
        lead = tensor.data_ptr() % alignment
        self.lead = lead if lead % tensor.element_size() == 0 else 0
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version = tensor._version
        # Shares the version counter and, emptied, not the memory.
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.handles = 0
        self.slab: HostSlab | None = None
        self.space: FileSpace | None = None
        self.stored: Ticket[Any] | None = None
        self.restored: Tensor | None = None
        self.restored_version = 0
        self.arrival: Ticket[Any] | None = None

    def is_still(self, tensor: Tensor) -> bool:
        """Whether what it was made of is `tensor`, unchanged."""
        return not self.storage.expired() and self.version == tensor._version


class _Segment:
    """What one checkpoint keeps, in order."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[_Kept] = []


class _Handle:
    """What autograd saves in a tensor's place; the bytes are kept for as long as one exists."""

    __slots__ = ("_dropped", "kept", "segment")

    def __init__(
        self, kept: _Kept, segment: _Segment, dropped: deque[tuple[_Kept, _Segment]]
    ) -> None:
        self.kept = kept
        self.segment = segment
        self._dropped = dropped

    def __del__(self) -> None:
        # On any thread, in the middle of anything: only note it.
        self._dropped.append((self.kept, self.segment))


class ActivationOffload:
    """Keeps the inputs of checkpoints in host memory, or in files that host memory leads to.

    Args:
        model: whose forwards are watched; its parameters and buffers are never moved.
        backend: lanes and memory.
        budget: asked before host memory is made.
        store: the files, or None to keep everything in host memory.
    """

    def __init__(
        self, model: nn.Module, backend: Backend, budget: Budget, store: NvmeStore | None = None
    ) -> None:
        self._model = model
        self._backend = backend
        self.slabs = HostSlabs(backend, budget)
        """Where the bytes lie, or what they pass through on their way to files."""
        self._files = None if store is None else FileSpaces(store, budget)
        self._tier = "host" if store is None else "nvme"
        self._disk = backend.lane("activations nvme", "host")
        self._passing: deque[HostSlab] = deque()
        self._hooks = InputHooks(self)
        self._out = backend.lane("activations out", "device")
        self._in = backend.lane("activations in", "device")
        self._segments: list[_Segment] = []
        self._known: dict[tuple[Any, ...], _Kept] = {}
        self._dropped: deque[tuple[_Kept, _Segment]] = deque()
        self._leaving: deque[list[Ticket[Any]]] = deque()
        self._weights: frozenset[int] = frozenset()
        self._current: _Segment | None = None
        self._ahead: _Segment | None = None
        self._number = 0
        self._seen = self._moved = self._checked = False

    # The engine's side -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Watch the model's forwards."""
        self._hooks.attach(self._model)

    @contextmanager
    def context(self) -> Generator[None]:
        """Watch what runs inside, for checkpoints outside of any module's forward."""
        with self._hooks.active():
            yield

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, in use or kept for the next step."""
        return self.slabs.nbytes

    @property
    def nvme_bytes(self) -> int:
        """Bytes of files, in use or kept for the next step."""
        return 0 if self._files is None else self._files.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that came back before they were asked for."""
        self.collect()
        kept = {id(item): item for segment in self._segments for item in segment.kept}
        return sum(item.span for item in kept.values() if item.restored is not None)

    def check_seen(self) -> None:
        """After the first step: warn where nothing was moved, since the setting then has no effect."""
        if self._checked:
            return
        self._checked = True
        if not self._seen:
            warnings.warn(
                f"activations={self._tier!r} has no effect: no activation checkpoint was seen in the forward of the model or of a module "
                "in it (checkpoints under saved-tensor hooks of others or inside torch.compile are not). Turn checkpointing "
                "on, for example by model.gradient_checkpointing_enable() or torch.utils.checkpoint, or leave activations "
                "out",
                stacklevel=2,
            )
        elif not self._moved:
            warnings.warn(
                f"activations={self._tier!r} has no effect: every input of a checkpoint is smaller than "
                f"{SMALLEST_BYTES:,} bytes, is no floating-point tensor, or belongs to the model: leave activations out",
                stacklevel=2,
            )

    def close(self) -> None:
        """Take the hooks off and free the slabs; what a graph still holds goes with it."""
        self._hooks.remove()
        self.collect()
        while self._passing:
            self.slabs.give(self._passing.popleft())
        self.slabs.close()

    # The hooks' side ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An outermost forward begins."""
        self._weights = frozenset()

    def keep(self, tensor: Tensor, frame: FrameType | None) -> object | None:
        """Take a tensor that autograd is about to save.

        Args:
            tensor: the tensor.
            frame: where it is saved.

        Returns:
            What to save in its place, or None to leave it.

        Raises:
            BudgetError: the host has no room for it.
        """
        inputs = checkpoint_inputs(frame)
        if inputs is None:
            return None
        self._seen = True
        if not self._is_worth_it(tensor):
            return None
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self.collect()
            self._moved = True
            segment = self._segment_of(tensor, inputs)
            try:
                kept = self._find(tensor) or self._store(tensor)
            except BaseException:
                if not segment.kept:
                    self._forget(segment)
                raise
            kept.handles += 1
            segment.kept.append(kept)
            return _Handle(kept, segment, self._dropped)

    def give(self, handle: object) -> Tensor:
        """The tensor again, in memory of its own.

        Args:
            handle: what `keep` returned.

        Raises:
            RuntimeError: it was changed in place after it was saved, as in plain torch.
        """
        if not isinstance(handle, _Handle):
            raise TypeError(f"{handle!r} is not of this offloader")
        kept, segment = handle.kept, handle.segment
        check_version(kept.witness, kept.version, kept.shape)
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self.collect()
            if segment is not self._current:
                self._enter(segment)
            restored = self._bring(kept)
            if kept.arrival is not None:
                kept.arrival.on(self._backend.compute)
            if kept.handles == 1:
                kept.restored = kept.arrival = None
            return restored

    def collect(self) -> None:
        """Take back the slabs of what no graph needs any more."""
        while self._dropped:
            kept, segment = self._dropped.popleft()
            segment.kept.remove(kept)
            if not segment.kept:
                self._forget(segment)
            kept.handles -= 1
            if kept.handles == 0:
                self._let_go(kept)

    def _let_go(self, kept: _Kept) -> None:
        if self._known.get(kept.identity) is kept:
            del self._known[kept.identity]
        kept.restored = kept.arrival = None
        if kept.slab is not None:
            self.slabs.give(kept.slab)
        if kept.space is not None and self._files is not None:
            self._files.give(kept.space)
        kept.slab = kept.space = None

    # Forward -----------------------------------------------------------------------------------------------------

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.is_floating_point():
            return False
        if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_neg():
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < SMALLEST_BYTES or _span_bytes(tensor) > 2 * nbytes:
            return False
        if not self._weights:
            own = (*self._model.parameters(), *self._model.buffers())
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # A sharded weight may not be asked for its memory.
                self._weights = frozenset(storage_key(item) for item in own if _has_storage(item))
        return storage_key(tensor) not in self._weights

    def _segment_of(self, tensor: Tensor, inputs: list[Tensor]) -> _Segment:
        """The segment a tensor belongs to: a new one where none of the call's earlier inputs was kept."""
        worthy = next((item for item in inputs if self._is_worth_it(item)), None)
        if worthy is not tensor and self._segments:
            return self._segments[-1]
        while len(self._leaving) >= _SEGMENTS_ON_THEIR_WAY:
            for ticket in self._leaving.popleft():
                ticket.wait()
        self._leaving.append([])
        segment = _Segment()
        self._segments.append(segment)
        return segment

    def _find(self, tensor: Tensor) -> _Kept | None:
        kept = self._known.get(_identity(tensor))
        return kept if kept is not None and kept.is_still(tensor) else None

    def _store(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor, self._number)
        self._number += 1
        what = f"a checkpoint's input of shape {list(tensor.shape)} and {tensor.dtype}"
        files = self._files
        nbytes = kept.span if files is None else files.transfer_bytes(kept.span)
        slab = self.slabs.take(nbytes, what)
        try:
            start = int(tensor.storage_offset()) * tensor.element_size()
            source = _bytes_of(tensor, start, kept.span)
            after = [self._backend.mark(kept.label), *_tickets(slab.last)]
            kept.stored = self._out.submit(
                Copy(
                    destinations=(slab.memory[: kept.span],),
                    sources=(source,),
                    direction="device_to_host",
                    label=f"{kept.label} out",
                ),
                after=after,
            )
        except BaseException:
            self.slabs.give(slab)
            raise
        slab.last = kept.stored
        self._leaving[-1].append(kept.stored)
        if files is None:
            kept.slab = slab
        else:
            self._write(kept, slab, files, what)
        self._known[kept.identity] = kept
        return kept

    def _write(self, kept: _Kept, slab: HostSlab, files: FileSpaces, what: str) -> None:
        """Send a slab's bytes on to a file, and let the slab be used again after that."""
        try:
            space = files.take(kept.span, what)
            space.last = slab.last = kept.stored = self._disk.submit(
                Write(
                    store=files.store,
                    extent=space.extent,
                    offset=0,
                    source=slab.memory[: files.transfer_bytes(kept.span)],
                    label=f"{kept.label} to file",
                ),
                after=[*_tickets(kept.stored), *_tickets(space.last)],
            )
            kept.space = space
        finally:
            self._pass_through(slab)

    def _pass_through(self, slab: HostSlab) -> None:
        self._passing.append(slab)
        if len(self._passing) > _SLABS_FOR_FILES - 1:
            self.slabs.give(self._passing.popleft())

    # Backward ----------------------------------------------------------------------------------------------------

    def _enter(self, segment: _Segment) -> None:
        """A segment's turn has come: it must be here, and the one before it on its way."""
        if self._ahead is not None and self._ahead is not segment:
            for kept in self._ahead.kept:
                kept.restored = kept.arrival = None
        self._current, self._ahead = segment, None
        for kept in segment.kept:
            self._bring(kept)
        place = self._segments.index(segment)
        if place > 0:
            self._ahead = self._segments[place - 1]
            for kept in self._ahead.kept:
                self._bring(kept)

    def _bring(self, kept: _Kept) -> Tensor:
        """Start the copy back, unless it is under way or done."""
        restored = kept.restored
        if restored is not None and restored._version == kept.restored_version:
            return restored
        slab = self._read(kept)
        space = torch.empty(kept.lead + kept.span, dtype=torch.uint8, device=kept.device)
        place, source = space[kept.lead :], slab.memory[: kept.span]
        if self._backend.closed:
            for ticket in _tickets(kept.stored):
                ticket.wait()
            place.copy_(source)
            kept.arrival = None
        else:
            kept.arrival = slab.last = self._in.submit(
                Copy(
                    destinations=(place,),
                    sources=(source,),
                    direction="host_to_device",
                    label=f"{kept.label} in",
                ),
                after=[
                    self._backend.mark(kept.label),
                    *_tickets(slab.last),
                    *_tickets(kept.stored),
                ],
            )
        if slab is not kept.slab:
            self._pass_through(slab)
        restored = torch.empty(0, dtype=kept.dtype, device=kept.device)
        restored.set_(
            space.untyped_storage(),
            kept.lead // kept.dtype.itemsize,
            kept.shape,
            kept.stride,
        )
        kept.restored, kept.restored_version = restored, restored._version
        return restored

    def _read(self, kept: _Kept) -> HostSlab:
        """The slab a tensor's bytes are in, or are on their way to from a file."""
        if kept.slab is not None:
            return kept.slab
        space, files = kept.space, self._files
        if space is None or files is None:
            raise RuntimeError(f"{kept.label} was let go of and is asked for again")
        if self._backend.closed:
            raise EngineStateError(
                "a backward needs activations that were kept in the files of an engine that is closed: run backward before "
                "engine.close()"
            )
        slab = self.slabs.take(files.transfer_bytes(kept.span), f"{kept.label} on its way back")
        try:
            slab.last = space.last = self._disk.submit(
                Read(
                    store=files.store,
                    extent=space.extent,
                    offset=0,
                    destination=slab.memory[: files.transfer_bytes(kept.span)],
                    label=f"{kept.label} from file",
                ),
                after=[*_tickets(space.last), *_tickets(slab.last)],
            )
        except BaseException:
            self.slabs.give(slab)
            raise
        return slab

    def _forget(self, segment: _Segment) -> None:
        if segment in self._segments:
            self._segments.remove(segment)
        if segment is self._current:
            self._current = None
        if segment is self._ahead:
            self._ahead = None


def _span_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (reach + 1) * tensor.element_size()


def _bytes_of(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """A piece of a tensor's storage, in bytes, as a tensor without the version counter of the first."""
    piece = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return piece.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (
        storage_key(tensor),
        tensor._version,
        tensor.dtype,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _tickets(ticket: Ticket[Any] | None) -> tuple[Ticket[Any], ...]:
    return () if ticket is None else (ticket,)
