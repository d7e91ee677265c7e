"""Reports about memory: killed without a message, pinning that fails, copies that double the peak.

The number in a name or docstring is the case's number in docs/differences.md.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make, mlp_loss
from support.training import engine_for
from torch import nn

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.errors import BudgetError, ConfigError

SECONDS = 100.0


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What one fresh interpreter measured and met under limits; first word of a line to the others."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}
    assert "STEP" in lines, done.stderr
    return lines


# 9: killed without a message ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "device"])
def test_9_states_that_do_not_fit_are_refused_before_anything_is_allocated(tier: str) -> None:
    """9: a model of 6.7 billion parameters on a host of 31 GB was killed without a message.

    The states need 16 bytes a parameter (master, two moments, fp32 gradient); the limit leaves a little less.
    """
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    before = threading.active_count()
    # On the device the fp32 weights are the master: 12 bytes, beside the 4 of the weights themselves.
    settings: dict[str, Any] = {"optimizer": tier, "gradients": tier, f"{tier}_limit": 15_900_000}
    with pytest.raises(BudgetError, match=rf"{tier}_limit is 15,900,000") as caught:
        ZeroEngine(model, optimizer, ZeroConfig(threads=1, **settings))
    assert "16," in str(caught.value), "the bytes needed are named"
    assert "raise it" in str(caught.value)
    assert threading.active_count() == before
    # The model and optimizer are as they were: the same two train once there is room.
    settings[f"{tier}_limit"] = "64MB"
    with ZeroEngine(model, optimizer, ZeroConfig(threads=1, **settings)) as engine:
        engine.backward(model(torch.ones(1, 1000)).sum())
        engine.step()
        assert sum(engine.memory()[tier].values()) <= 64_000_000


def test_9_memory_the_system_refuses_is_an_error_that_python_sees(
    printed: dict[str, list[str]],
) -> None:
    """9: the same when the system itself has no room (RLIMIT_AS); nothing is left behind."""
    assert printed["REFUSED"][0] == "BudgetError"
    assert "bytes" in printed["REFUSED"]
    assert printed["THREADS"] == ["1"]


# 10: pinning --------------------------------------------------------------------------------------------------------


def test_10_a_limit_on_locked_memory_stops_nothing(printed: dict[str, list[str]]) -> None:
    """10: allocating pinned memory failed on WSL2 and small hosts. Here RLIMIT_MEMLOCK is 0.

    (What happens when CUDA refuses to pin is tests/runtime/test_cuda_fake.py: pageable memory, with one warning.)
    """
    assert printed["UNLOCKED"] == ["trained", "warnings:0"]


# 12, 13: peaks ------------------------------------------------------------------------------------------------------

MEASURE = """
import gc, resource, threading, warnings
import torch
from zero_plugin import ZeroConfig, ZeroEngine

torch.set_num_threads(1)


def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024


def now():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024


def reset():
    open("/proc/self/clear_refs", "w").write("5")


def train(model, engine, width):
    engine.backward(model(torch.ones(1, width, dtype=torch.bfloat16)).square().mean())


small = torch.nn.Linear(64, 64).bfloat16()
with ZeroEngine(small, torch.optim.AdamW(small.parameters()), ZeroConfig(threads=1)) as engine:
    train(small, engine, 64)
    engine.step()

width, layers = 1000, 20
model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
gc.collect()
reset()
start = now()
engine = ZeroEngine(model, optimizer, ZeroConfig(threads=1, bucket_bytes="4MiB"))
table = engine.memory()
print("INIT", peak() - start, now() - start, sum(table["host"].values()), table["device"]["staging"])
for _ in range(2):
    train(model, engine, width)
    engine.step()
    engine.zero_grad()
train(model, engine, width)
engine.clip_grad_norm_(1.0)
reset()
start = now()
engine.step()
print("STEP", peak() - start, now() - start, 2 * width * width * layers)
engine.close()

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small = torch.nn.Linear(64, 64).bfloat16()
    with ZeroEngine(small, torch.optim.AdamW(small.parameters()), ZeroConfig(threads=2)) as engine:
        for _ in range(2):
            train(small, engine, 64)
            engine.step()
            engine.zero_grad()
print("UNLOCKED", "trained", f"warnings:{len(caught)}", flush=True)

used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, used + 200_000_000))
model = torch.nn.Linear(5000, 5000, bias=False)
before = threading.active_count()
try:
    ZeroEngine(model, torch.optim.AdamW(model.parameters()), ZeroConfig(threads=1))
except MemoryError as error:
    print("REFUSED", type(error).__name__, error)
print("THREADS", 1 + threading.active_count() - before)
"""


def test_12_and_13_neither_start_nor_step_needs_room_for_a_second_copy(
    printed: dict[str, list[str]],
) -> None:
    """12: a step copied the whole fp32 partition to the device first. 13: pinning doubled the peak at the start.

    Real memory of the process (VmHWM), 20 million bf16 parameters.
    """
    peak, kept, host, staging = map(int, printed["INIT"])
    slack = 24 * 2**20
    assert host >= 14 * 20_000_000, "master, two moments and a bf16 gradient"
    assert kept <= host + staging + slack
    assert peak <= host + staging + slack, "nothing is allocated twice on the way"
    peak, kept, weights = map(int, printed["STEP"])
    assert peak <= 0.1 * weights + 2**20
    assert kept <= 2**20


# 16: a fraction of the states ---------------------------------------------------------------------------------------


def test_16_a_fraction_moves_by_blocks_and_is_never_exceeded() -> None:
    """16: `ratio` moved in two jumps only."""
    kept: list[int] = []
    for tenths in range(11):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10)))
        settings = {"bucket_bytes": 256, "device_fraction": tenths / 10}
        with engine_for(model, **settings) as (engine, _):
            kept.append(engine.memory()["device"]["moments"])
    assert kept == [tenths * 64 * 8 for tenths in range(11)]


def test_16_other_spellings_of_a_fraction_are_refused() -> None:
    """16: nothing is rounded or left out quietly."""
    for value in (0.5, "50%", {"host": 0.5}):
        with pytest.raises(ConfigError, match="optimizer="):
            ZeroConfig(optimizer=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown setting 'ratio'"):
        ZeroConfig.from_dict({"ratio": 0.5})


def test_16_what_memory_says_is_exact() -> None:
    """16: bytes of a tier are those of its states, whatever the number of blocks; padding is below 64 bytes each."""
    for bucket in (64, 256, 2**20):
        model = make(TinyMLP)
        with engine_for(model, bucket_bytes=bucket) as (engine, optimizer):
            engine.backward(mlp_loss(model, 0))
            optimizer.step()
            table = engine.memory()["host"]
        elements = sum(p.numel() for p in model.parameters())
        assert 4 * elements <= table["master"] < 4 * elements + 64 * 4
        assert table["moments"] == 2 * table["master"]
