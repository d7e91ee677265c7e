"""Reads and writes that fail, fall short or are put off: an error that names the place, never a wrong byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ENGINES = ("threads", "uring")
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ENODEV", "EFBIG", "ESTALE", "EINVAL", "EPERM")
ACTS = ("read", "write")
CURES = {
    "EIO": "dmesg",
    "ENOSPC": "free space",
    "EDQUOT": "raise it",
    "EROFS": "read-only",
    "ENODEV": "mount it again",
    "EFBIG": "ulimit -f",
    "ESTALE": "use a local disk",
    "EINVAL": "another one in nvme_path",
    "EPERM": "seccomp",
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux, to build what makes I/O fail")
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [
        compiler,
        "-O1",
        "-shared",
        "-fPIC",
        str(HERE / "fault_shim.c"),
        "-o",
        str(built),
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module", params=ENGINES)
def all_ran(
    request: pytest.FixtureRequest,
    shim: Path,
    tmp_path_factory: pytest.TempPathFactory,
    io_uring_refusal: str,
) -> dict[str, Any]:
    """All scenarios in one process, on one path and then on two."""
    if request.param == "uring" and io_uring_refusal:
        pytest.skip(io_uring_refusal)
    folders = [str(tmp_path_factory.mktemp("disk")) for _ in range(2)]
    done = subprocess.run(
        [sys.executable, str(HERE / "fault_scenarios.py"), str(shim), request.param, *folders],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"LD_PRELOAD": str(shim)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["1", "2"], ids=["one path", "two paths"])
def ran(request: pytest.FixtureRequest, all_ran: dict[str, Any]) -> dict[str, Any]:
    return all_ran[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_what_is_put_off_or_falls_short_is_gone_on_with(ran: dict[str, Any], act: str) -> None:
    names = [
        f"{act} {rest}"
        for rest in (
            "EINTR often",
            "EAGAIN often",
            "short 4096",
            "short 12288",
            "short 5000",
            "short 100",
        )
    ]
    names += [
        name
        for name in ran["outcomes"]
        if name.startswith(f"{act} enter E") and "EPERM" not in name
    ]
    for name in names:
        outcome = ran["outcomes"][name]
        assert outcome["error"] is None, name
        assert outcome["equal"], name
        assert "enter" in name or outcome["hits"] > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_path_place_and_cure(ran: dict[str, Any], act: str, name: str) -> None:
    for first in (1, 3, 41):
        outcome = ran["outcomes"][f"{act} {name} {first}"]
        message = outcome["error"]
        assert message is not None
        assert outcome["hits"] == 1
        assert f"{name} (" in message
        assert any(path in message for path in ran["paths"])
        assert f"{'reading' if act == 'read' else 'writing'} " in message
        assert "bytes at offset " in message
        assert " stopped after " in message
        assert CURES[name] in message
        assert outcome["right_after"]
        assert outcome["seconds"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_no_progress_is_an_error(ran: dict[str, Any], act: str) -> None:
    outcome = ran["outcomes"][f"{act} nothing moved"]
    expected = "the file ends there" if act == "read" else "wrote no further"
    assert expected in outcome["error"]
    assert outcome["right_after"]


@pytest.mark.slow
def test_endless_back_pressure_is_an_error(ran: dict[str, Any]) -> None:
    if len(ran["paths"]) > 1:
        return  # it takes seconds, and what is waited for is one operation
    outcome = ran["outcomes"]["EAGAIN for ever"]
    assert "EAGAIN (" in outcome["error"]
    assert "again and again" in outcome["error"]
    assert outcome["right_after"]


@pytest.mark.slow
def test_a_refused_system_call_is_an_error(ran: dict[str, Any]) -> None:
    found = [outcome for name, outcome in ran["outcomes"].items() if name.endswith("enter EPERM")]
    for outcome in found:
        assert "EPERM (" in outcome["error"]
        assert outcome["right_after"]


@pytest.mark.slow
def test_random_faults_give_the_bytes_or_an_error(ran: dict[str, Any]) -> None:
    outcomes = {name: o for name, o in ran["outcomes"].items() if name.startswith("random")}
    assert len(outcomes) == 60
    assert all(o["right_after"] and (o["error"] or o["equal"]) for o in outcomes.values())
    assert any(o["error"] for o in outcomes.values())
    assert any(o["hits"] and not o["error"] for o in outcomes.values())
