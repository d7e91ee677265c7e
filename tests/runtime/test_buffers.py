"""Slab pools and leases."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime.probes import Fail, Gate, Note

from zero_plugin.errors import BudgetError, LeaseError
from zero_plugin.runtime.backend import Backend, Memory
from zero_plugin.runtime.buffers import LEASE_MOVES, LeaseState, SlabPool
from zero_plugin.runtime.memory import PAGE, allocate_host, page_aligned

Make = Callable[..., SlabPool]


@pytest.fixture
def make_pool(backend: Backend) -> Make:
    def make(*, slabs: int = 2, slab_bytes: int = 1000, memory: Memory = "host") -> SlabPool:
        return SlabPool(
            name="staging",
            backend=backend,
            slab_bytes=slab_bytes,
            slabs=slabs,
            memory=memory,
            setting="pinned_limit",
        )

    return make


# ------------------------------------------------------------------ memory


def test_slabs_are_exact_aligned_and_apart(make_pool: Make) -> None:
    pool = make_pool(slabs=3, slab_bytes=5000)
    leases = [pool.acquire("x") for _ in range(3)]
    tensors = [lease.tensor(torch.uint8) for lease in leases]
    assert [tensor.numel() for tensor in tensors] == [5000] * 3
    assert [tensor.data_ptr() % PAGE for tensor in tensors] == [0] * 3
    spans = sorted((t.data_ptr(), t.data_ptr() + 5000) for t in tensors)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert pool.nbytes == 3 * 2 * PAGE
    for lease in leases:
        lease.release()
    pool.close()


def test_slabs_are_the_same_memory_for_ever(make_pool: Make) -> None:
    pool = make_pool(slabs=2)
    seen = set()
    for _ in range(10):
        lease = pool.acquire("x")
        seen.add(lease.tensor(torch.float32).data_ptr())
        lease.release()
    assert len(seen) <= 2
    pool.close()


def test_device_pool(make_pool: Make) -> None:
    pool = make_pool(memory="device", slabs=1)
    with_tensor = pool.acquire("x")
    assert with_tensor.tensor(torch.bfloat16, 10).shape == (10,)
    with_tensor.release()
    pool.close()


@pytest.mark.parametrize("nbytes", [0, 1, 63, PAGE, 8 * PAGE, 8 * PAGE + 1, 3 << 20])
def test_allocation_is_exact_zeroed_and_aligned(backend: Backend, nbytes: int) -> None:
    memory = backend.allocate(nbytes, "host")
    assert (memory.shape, memory.dtype) == ((nbytes,), torch.uint8)
    assert memory.eq(0).all()
    assert nbytes == 0 or memory.data_ptr() % 64 == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def test_host_memory_is_resident_before_use_and_gone_after() -> None:
    size = 64 << 20
    gc.collect()
    before = resident_bytes()
    memory = allocate_host(size)
    assert resident_bytes() - before >= 0.95 * size
    view = memory[5:].view(torch.uint8)
    del memory
    assert resident_bytes() - before >= 0.95 * size
    del view
    assert resident_bytes() - before < 0.2 * size


def test_page_aligned() -> None:
    buffer = torch.empty(3 * PAGE, dtype=torch.uint8)
    for shift in (0, 1, 100):
        assert page_aligned(buffer[shift:]).data_ptr() % PAGE == 0


def test_pool_without_slabs_is_refused(make_pool: Make) -> None:
    with pytest.raises(BudgetError, match=r"'staging' was given 0 slabs .* raise 'pinned_limit'"):
        make_pool(slabs=0)
    with pytest.raises(BudgetError, match="slabs of 0 bytes"):
        make_pool(slab_bytes=0)


# ------------------------------------------------------------------ leases


def test_tensor_views(make_pool: Make) -> None:
    pool = make_pool(slab_bytes=1000)
    lease = pool.acquire("x")
    assert lease.tensor(torch.float32).shape == (250,)
    assert lease.tensor(torch.bfloat16, 7).shape == (7,)
    assert lease.tensor(torch.int64).shape == (125,)
    with pytest.raises(
        LeaseError, match=r"251 elements .* \(1004 bytes\) do not fit .* \(1000 bytes\)"
    ):
        lease.tensor(torch.float32, 251)
    lease.release()
    pool.close()


def test_lease_in_flight_refuses_access(deferred: Backend) -> None:
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    gate = Gate(label="write block 3")
    lane = deferred.lane("lane", "host")
    lease = pool.acquire("a")
    ticket = lane.submit(gate, leases=[lease])
    assert lease.state is LeaseState.IN_FLIGHT
    with pytest.raises(LeaseError, match="'p' held by 'a' is in flight: 'write block 3' has not"):
        lease.tensor(torch.float32)
    second = lane.submit(Note([], "next"), leases=[lease])
    gate.opened.set()
    ticket.wait()
    second.wait()
    assert lease.state is LeaseState.HELD
    lease.tensor(torch.float32)
    lease.release()
    pool.close()


def test_released_lease_refuses_everything(make_pool: Make, backend: Backend) -> None:
    pool = make_pool()
    lease = pool.acquire("a")
    lease.release()
    assert lease.state is LeaseState.RELEASED
    for use in (
        lambda: lease.tensor(torch.float32),
        lease.release,
        lambda: backend.lane("lane", "host").submit(Note([], "x"), leases=[lease]),
    ):
        with pytest.raises(LeaseError, match="'staging' held by 'a' was already released"):
            use()
    pool.close()


def test_acquire_waits_for_a_lease_that_can_return(deferred: Backend) -> None:
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    gate, lane = Gate(), deferred.lane("lane", "host")
    first = pool.acquire("a")
    ticket = lane.submit(gate, leases=[first])
    first.release()
    assert first.state is LeaseState.RETURNING
    assert pool.free == 0
    gate.open_soon()
    second = pool.acquire("b")
    assert ticket.done
    second.release(after=lane.submit(Note([], "x")))
    pool.acquire("c").release()
    pool.close()


def test_acquire_waits_when_the_operation_failed_too(backend: Backend, make_pool: Make) -> None:
    pool = make_pool(slabs=1)
    lease = pool.acquire("a")
    ticket = backend.lane("lane", "host").submit(Fail(), leases=[lease])
    lease.release(after=[ticket])
    pool.acquire("b").release()
    pool.close()
    backend.settle()


def test_exhausted_pool_names_pool_holders_and_setting(make_pool: Make) -> None:
    pool = make_pool(slabs=3)
    leases = [pool.acquire(holder) for holder in ("unit 1", "unit 2", "unit 1")]
    with pytest.raises(
        BudgetError,
        match=r"'unit 4' asked a slab of pool 'staging', but all 3 of 1000 bytes are held, "
        r"by 'unit 1' \(2\), 'unit 2', and none was released; raise 'pinned_limit'",
    ):
        pool.acquire("unit 4")
    for lease in leases:
        lease.release()
    assert pool.free == 3
    pool.close()


def test_lease_in_flight_but_not_released_cannot_return(deferred: Backend) -> None:
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    gate = Gate()
    lease = pool.acquire("a")
    deferred.lane("lane", "host").submit(gate, leases=[lease])
    with pytest.raises(BudgetError):
        pool.acquire("b")
    gate.opened.set()
    lease.release()
    pool.close()


def test_many_threads_share_a_pool(deferred: Backend) -> None:
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=4, memory="host", setting="host_limit"
    )
    lane = deferred.lane("lane", "host")
    errors: list[Exception] = []

    def work(value: float) -> None:
        try:
            for _ in range(25):
                lease = pool.acquire(f"thread {value}")
                tensor = lease.tensor(torch.float32)
                tensor.fill_(value)
                assert tensor.eq(value).all()
                lease.release(after=lane.submit(Note([], "x"), leases=[lease]))
        except Exception as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert errors == []
    pool.close()


def test_close_waits_for_operations(deferred: Backend) -> None:
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    gate = Gate()
    lease = pool.acquire("a")
    ticket = deferred.lane("lane", "host").submit(gate, leases=[lease])
    lease.release()
    gate.open_soon()
    pool.close()
    assert ticket.done


def test_close_complains_of_unreturned_leases_and_revokes_them(make_pool: Make) -> None:
    pool = make_pool()
    lease = pool.acquire("unit 7")
    with pytest.raises(LeaseError, match="'staging' was closed while 'unit 7' had not released"):
        pool.close()
    pool.close()
    with pytest.raises(LeaseError, match="already released"):
        lease.tensor(torch.float32)
    with pytest.raises(LeaseError, match="'staging', which is closed"):
        pool.acquire("x")


def test_what_an_interrupted_holder_lost_is_taken_back(make_pool: Make) -> None:
    pool = make_pool(slabs=2)
    lost, released = pool.acquire("lost"), pool.acquire("released")
    released.release()
    pool.take_back()
    assert lost.state is LeaseState.RELEASED
    again = [pool.acquire("again"), pool.acquire("again")]
    for lease in again:
        lease.release()
    pool.take_back()
    pool.close()


def test_close_frees_the_memory(make_pool: Make) -> None:
    gc.collect()
    before = resident_bytes()
    pool = make_pool(slabs=16, slab_bytes=4 << 20)
    assert resident_bytes() - before >= 60 << 20
    pool.close()
    gc.collect()
    assert resident_bytes() - before < 12 << 20


def test_every_illegal_lease_move_is_refused(make_pool: Make) -> None:
    pool = make_pool()
    for state in LeaseState:
        for target in LeaseState:
            lease = pool.acquire("x")
            lease._state = state
            if target in LEASE_MOVES[state]:
                lease._move(target)
                assert lease._state is target
            else:
                with pytest.raises(LeaseError, match=f"from {state.value} to {target.value}"):
                    lease._move(target)
            lease._state = LeaseState.RELEASED
    pool.close()
