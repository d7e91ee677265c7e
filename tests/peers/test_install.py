"""Reports about installing: a compiler at run time, a foreign CUDA, libraries that are missing.

The number in a name or docstring is the case's number in docs/differences.md.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.sources import REPOSITORY

SECONDS = 90.0

# Runs in a fresh interpreter. After torch is imported, starting any process or looking for a compiler is an error.
TRAIN = """
import sys

import torch

FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}


def refuse(event, arguments):
    if event in FORBIDDEN:
        print(f"STARTED {event} {arguments!r}", flush=True)
        raise RuntimeError(f"{event} {arguments!r}")


sys.addaudithook(refuse)
from zero_plugin import Lion, ZeroConfig, ZeroEngine

options = {
    torch.optim.Adam: {}, torch.optim.AdamW: {}, torch.optim.Adagrad: {}, Lion: {},
    torch.optim.SGD: {"momentum": 0.9}, torch.optim.RMSprop: {},
}
for dtype in (torch.float32, torch.bfloat16):
    for make, more in options.items():
        model = torch.nn.Linear(5, 3).to(dtype)
        before = model.weight.detach().clone()
        optimizer = make(model.parameters(), lr=0.1, **more)
        with ZeroEngine(model, optimizer, ZeroConfig(threads=1)) as engine:
            engine.backward(model(torch.ones(2, 5, dtype=dtype)).square().mean())
            engine.clip_grad_norm_(1.0)
            engine.step()
        assert not torch.equal(before, model.weight)
print("TRAINED", len(options))
from zero_plugin import _native

print("LOADED", _native.__file__, open("/proc/self/maps").read().count("libaio"))
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter outside the checkout, with a deadline."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"HOME": "/", "OMP_NUM_THREADS": "1", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("entry", ["run_example.py", "run_tests.py"])
def test_1_a_missing_compiler_is_the_first_and_only_message(entry: str, tmp_path: Path) -> None:
    """1: the error seen first was `no attribute ds_opt_adam` from a destructor, the compiler's own was lost."""
    # Everything the set-up needs but a compiler.
    for name in ("sh", "env", "uname"):
        found = shutil.which(name)
        if found:
            (tmp_path / name).symlink_to(found)
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / entry), "--venv", str(tmp_path / "venv")],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "Error" not in done.stderr.replace("zero-plugin:", "")
    assert not (tmp_path / "venv").exists()


def test_1_a_missing_extension_names_the_cure() -> None:
    """1: the package without its compiled part says so where it is first used, and nothing else follows."""
    done = run_python(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'zero_plugin._native': raise ImportError('no _native here')\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import torch, zero_plugin\n"
        "from zero_plugin.errors import NativeExtensionError\n"
        "try:\n"
        "    zero_plugin.ZeroEngine\n"
        "except NativeExtensionError as error:\n"
        "    print('SAID', error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "no _native here" in done.stdout
    assert "reinstall the package" in done.stdout
    assert "compiler" in done.stdout
    assert done.stderr == ""


@dataclass(frozen=True)
class Hostile:
    """A run on a machine whose tools are all wrong."""

    output: subprocess.CompletedProcess[str]
    folder: Path
    nvcc_calls: Path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    """Trains with an nvcc of another version, compilers that fail, and nothing else on the search path."""
    folder = tmp_path_factory.mktemp("hostile")
    calls = folder / "called"
    tools = folder / "cuda" / "bin"
    tools.mkdir(parents=True)
    (folder / "extensions").mkdir()
    program(tools, "nvcc", f"echo run >> {calls}\necho 'Cuda compilation tools, release 9.1'")
    output = run_python(
        TRAIN,
        PATH=str(tools),
        CXX="/bin/false",
        CC="/bin/false",
        CUDA_HOME=str(folder / "cuda"),
        CUDA_PATH=str(folder / "cuda"),
        CUDACXX=str(tools / "nvcc"),
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
    )
    return Hostile(output=output, folder=folder, nvcc_calls=calls)


def test_2_a_cuda_toolkit_of_another_version_is_not_looked_at(
    hostile: Hostile, tmp_path: Path
) -> None:
    """2: a CPU optimizer refused to build since nvcc's version was not torch's."""
    assert "TRAINED" in hostile.output.stdout, hostile.output.stderr
    tools = hostile.folder / "cuda" / "bin"
    cmake = Path(sys.executable).with_name("cmake")
    assert cmake.exists(), "cmake comes with the dev extra"
    path = f"{tools}:{cmake.parent}:{os.environ['PATH']}"
    configured = subprocess.run(
        [
            *(str(cmake), "-S", str(REPOSITORY), "-B", str(tmp_path / "build")),
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        env={"HOME": str(tmp_path), "PATH": path, "CUDA_HOME": str(tools.parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert configured.returncode == 0, configured.stderr
    assert "CUDA" not in (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert not hostile.nvcc_calls.exists()


def test_4_5_6_the_extension_needs_no_io_library(hostile: Hostile) -> None:
    """4, 5, 6: an install failed for libaio's header, its version, or a libaio that was there but not found.

    This version has no NVMe tier, and its extension asks only for what every C++ program has.
    """
    loaded = [line for line in hostile.output.stdout.splitlines() if line.startswith("LOADED")]
    assert len(loaded) == 1
    _, extension, aio = loaded[0].split()
    assert aio == "0"
    text = Path(extension).read_bytes()
    assert not [name for name in (b"libaio.so", b"io_pgetevents", b"libtorch") if name in text]


def test_7_nothing_is_compiled_or_started_at_run_time(hostile: Hostile) -> None:
    """7: compiling began at the first step, took minutes, and failed there. Here not one process is started.

    No compiler could be found and every named one fails, so an attempt could not succeed unseen either.
    """
    assert "STARTED" not in hostile.output.stdout
    assert "TRAINED 6" in hostile.output.stdout, hostile.output.stderr
    assert list((hostile.folder / "extensions").iterdir()) == []
