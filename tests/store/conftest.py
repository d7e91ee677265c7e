"""What the store's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zero_plugin import _native
from zero_plugin.store.store import NvmeStore

ENGINES = ("threads", "uring")


@pytest.fixture(scope="session")
def io_uring_refusal() -> str:
    """Why io_uring cannot be had here, or ""."""
    engine = _native.IoEngine("auto", 1, 4096)
    reason = "" if engine.name == "uring" else engine.reason
    engine.close()
    return reason


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, io_uring_refusal: str) -> str:
    if request.param == "uring" and io_uring_refusal:
        pytest.skip(io_uring_refusal)
    return request.param


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """Three folders that stand for disks."""
    folders = [tmp_path / f"disk{place}" for place in range(3)]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def make_store(disks: list[Path]) -> Iterator[Callable[..., NvmeStore]]:
    """Makes stores on the first `count` disks and closes them after the test; nothing may be left then."""
    made: list[NvmeStore] = []

    def make(*, count: int = 1, **options: Any) -> NvmeStore:
        made.append(NvmeStore(disks[:count], **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
    assert [path for disk in disks if disk.exists() for path in disk.iterdir()] == []
