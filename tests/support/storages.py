"""Counts what torch allocates while code runs, from the operations themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Inside, the storages that operations return are followed until they are freed.

    Args:
        known: tensors that are there already and do not count.
        largest: bytes of one storage above which the operation raises MemoryError, as a fragmented arena would.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, largest: int | None = None) -> None:
        super().__init__()
        # Weak references also keep an address from being given to another storage.
        self._known = {
            tensor.untyped_storage()._cdata: StorageWeakRef(tensor.untyped_storage())
            for tensor in known
        }
        self._limit = largest
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        """Most bytes alive after any operation."""
        self.largest = 0
        """Bytes of the largest storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                self._follow(item)
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        if self._limit is not None and storage.nbytes() > self._limit:
            raise MemoryError(f"{storage.nbytes()} contiguous bytes of {self._limit}")
        self.largest = max(self.largest, storage.nbytes())
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
