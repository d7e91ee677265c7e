"""Host memory that bytes of files pass through."""

from __future__ import annotations

from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.buffers import SlabPool


def grow_pool(
    pool: SlabPool | None, backend: Backend, name: str, slab_bytes: int, slabs: int
) -> SlabPool:
    """The pool itself where its slabs are large enough, else a new one in its place.

    Args:
        pool: the present one, or None. No slab of it may be held where it is too small.
        backend: allocates the memory.
        name: of the pool, in errors.
        slab_bytes: least bytes of a slab.
        slabs: of a new pool.
    """
    if pool is not None:
        if pool.slab_bytes >= slab_bytes:
            return pool
        pool.close()
    return SlabPool(
        name=name,
        backend=backend,
        slab_bytes=slab_bytes,
        slabs=slabs,
        memory="host",
        setting="nvme_buffer_bytes",
    )
