"""The kernels and their thread pool under the compiler's sanitizers, without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.sources import REPOSITORY

from zero_plugin.kernels import available_isas

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def cmake() -> str | None:
    """The cmake of the environment or of the system."""
    return shutil.which("cmake")


def instruction_sets(names: str) -> str:
    """What to compile kernels for beside the forms that every machine runs.

    Addresses differ with the width of a step, so each that this machine can run is tried. Threads share what the pool hands
    them, whatever a step's width is.
    """
    if names == "thread":
        return ""
    return ";".join(isa for isa in available_isas() if isa in {"avx2", "avx512"})


def has_sanitizer(names: str, folder: Path) -> bool:
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run(
        [str(COMPILER), f"-fsanitize={names}", str(source), "-o", str(folder / "probe")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    if built.returncode != 0:
        return False
    return (
        subprocess.run([folder / "probe"], capture_output=True, timeout=60, check=False).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("names", ["address,undefined", "thread"])
def test_native_test_is_clean(names, tmp_path):
    if COMPILER is None or cmake() is None:
        pytest.skip("needs a C++ compiler and CMake")
    if not has_sanitizer(names, tmp_path):
        pytest.skip(f"this compiler has no sanitizer for {names}")
    build = tmp_path / "build"
    configure = [
        str(cmake()),
        "-S",
        str(REPOSITORY),
        "-B",
        str(build),
        "-DCMAKE_BUILD_TYPE=None",
    ]
    configure += ["-DZERO_PLUGIN_PYTHON=OFF", "-DZERO_PLUGIN_TESTS=ON", "-DZERO_PLUGIN_WERROR=ON"]
    configure += [f"-DZERO_PLUGIN_SANITIZE={names}", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    configure.append(f"-DZERO_PLUGIN_ISAS={instruction_sets(names)}")
    for command in (configure, [str(cmake()), "--build", str(build), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=700, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    options = {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    for program in ("native_test", "io_test"):
        ran = subprocess.run(
            [build / "native_ext" / program],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | options | {"TSAN_OPTIONS": "halt_on_error=1"},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "all native tests passed" in ran.stdout
