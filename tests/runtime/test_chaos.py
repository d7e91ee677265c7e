"""A read that does not wait is caught, and a program that waits is not disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime.probes import Gate

from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.chaos import ChaosOptions, poison
from zero_plugin.runtime.operations import Accumulate, Copy, Zero

Make = Callable[..., Backend]
LATE = ChaosOptions(max_delay=0.0, hold_seconds=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stale_read_of_an_offloaded_gradient_is_caught_every_time(
    make_backend: Make, dtype: torch.dtype
) -> None:
    caught = 0
    for seed in range(20):
        backend = make_backend("chaos", seed=seed, options=LATE)
        down = backend.lane("down", "device")
        gradient, shard = torch.ones(100), torch.zeros(100, dtype=dtype)
        ticket = down.submit(Copy(destinations=(shard,), sources=(gradient,)))
        stale = shard.clone()
        ticket.wait()
        caught += bool(stale.isnan().all())
        assert shard.eq(1.0).all()
        backend.close()
    assert caught == 20


def test_program_that_waits_is_right_for_200_seeds(make_backend: Make) -> None:
    """Copies down, accumulates, copies up, over three lanes and one reused slab."""
    options = ChaosOptions(max_delay=0.0005, hold_seconds=0.01)
    expected = torch.arange(64.0) * 3
    for seed in range(200):
        backend = make_backend("chaos", seed=seed, options=options)
        down, host, up = (
            backend.lane("down", "device"),
            backend.lane("host", "host"),
            backend.lane("up", "device"),
        )
        pool = SlabPool(
            name="staging",
            backend=backend,
            slab_bytes=64 * 2,
            slabs=1,
            memory="host",
            setting="host_limit",
        )
        gradient, total, weight = torch.arange(64.0), torch.ones(64), torch.zeros(64)
        added = host.submit(Zero(destinations=(total,)))
        for _ in range(3):
            lease = pool.acquire("gradient")
            staging = lease.tensor(torch.bfloat16, 64)
            copied = down.submit(Copy(destinations=(staging,), sources=(gradient,)), leases=[lease])
            added = host.submit(
                Accumulate(destination=total, source=staging), after=[copied], leases=[lease]
            )
            lease.release()
        up.submit(Copy(destinations=(weight,), sources=(total,)), after=[added]).on(backend.compute)
        assert torch.equal(weight, expected), f"seed {seed}"
        pool.close()
        backend.close()


def test_sources_and_pending_memory_are_not_poisoned(make_backend: Make) -> None:
    """A buffer that a pending operation still reads is poisoned when its writer's turn comes."""
    backend = make_backend("chaos", options=LATE)
    one, two = backend.lane("one", "host"), backend.lane("two", "host")
    buffer, out, fresh = torch.ones(8), torch.zeros(8), torch.full((8,), 2.0)
    gate = Gate()
    held = one.submit(gate)
    read = one.submit(Copy(destinations=(out,), sources=(buffer,)))
    write = two.submit(Copy(destinations=(buffer,), sources=(fresh,)), after=[read])
    assert buffer.eq(1.0).all()
    assert fresh.eq(2.0).all()
    assert out.isnan().all()
    gate.opened.set()
    held.wait()
    write.wait()
    assert out.eq(1.0).all()
    assert buffer.eq(2.0).all()


def test_copy_onto_itself_is_not_poisoned(make_backend: Make) -> None:
    backend = make_backend("chaos", options=LATE)
    buffer = torch.arange(8.0)
    ticket = backend.lane("one", "host").submit(
        Copy(destinations=(buffer[:4],), sources=(buffer[:4],))
    )
    assert torch.equal(buffer, torch.arange(8.0))
    ticket.wait()
    assert torch.equal(buffer, torch.arange(8.0))


def test_missing_order_between_lanes_is_caught(make_backend: Make) -> None:
    """The reader forgets `after`; some seeds run it first, and it then sees NaN."""
    wrong = 0
    for seed in range(40):
        backend = make_backend(
            "chaos", seed=seed, options=ChaosOptions(max_delay=0.01, hold_seconds=0.0)
        )
        one, two = backend.lane("one", "host"), backend.lane("two", "host")
        middle, out = torch.zeros(8), torch.zeros(8)
        one.submit(Copy(destinations=(middle,), sources=(torch.ones(8),)))
        two.submit(Copy(destinations=(out,), sources=(middle,)))
        backend.drain()
        wrong += bool(out.isnan().any())
        backend.close()
    assert wrong >= 5


def test_slab_used_after_release_is_poisoned(make_backend: Make) -> None:
    backend = make_backend("chaos")
    pool = SlabPool(
        name="p", backend=backend, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    lease = pool.acquire("a")
    kept = lease.tensor(torch.float32)
    assert kept.isnan().all()
    kept.fill_(1.0)
    lease.release()
    assert kept.isnan().all()
    pool.close()


def test_unawaited_operations_run_after_the_hold(make_backend: Make) -> None:
    backend = make_backend("chaos", options=ChaosOptions(max_delay=0.0, hold_seconds=0.02))
    ticket = backend.lane("one", "host").submit(Zero(destinations=(torch.ones(3),)))
    pause = Gate().opened
    for _ in range(1000):
        if ticket.done:
            break
        pause.wait(0.01)
    assert ticket.done


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (torch.zeros(3, dtype=torch.int64), -1),
        (torch.zeros(3, dtype=torch.uint8), 255),
        (torch.zeros(3, dtype=torch.bool), True),
        (torch.zeros(3, 2).t()[0], float("nan")),
        (torch.zeros(3, dtype=torch.float64), float("nan")),
    ],
    ids=str,
)
def test_poison_by_dtype(tensor: torch.Tensor, value: float) -> None:
    poison(tensor)
    expected = torch.full_like(tensor, value)
    assert torch.equal(tensor.nan_to_num(7.0), expected.nan_to_num(7.0))
