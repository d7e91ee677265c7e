"""The extension as a file: no torch in it, a stub that fits, and a clear error where it cannot be loaded."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import REPOSITORY

from zero_plugin import _native


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_loads_and_works_without_torch():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
import array
total, more = array.array("f", [1.0] * 70), array.array("f", [2.0] * 70)
handle = native.Kernels(2, "auto")
handle.accumulate(total.buffer_info()[0], more.buffer_info()[0], 0, 70)
handle.close()
assert list(total) == [3.0] * 70
assert "torch" not in sys.modules and "numpy" not in sys.modules
print("worked")
"""
    done = run_python(code, str(_native.__file__))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "worked"


def test_it_needs_no_torch_library_or_symbol():
    data = Path(str(_native.__file__)).read_bytes()
    for name in (b"libtorch", b"libc10", b"at::Tensor", b"_ZN2at", b"_ZN3c10", b"libcudart"):
        assert name not in data
    assert b"libstdc++" in data  # the search does find names of libraries


def test_stub_is_up_to_date(tmp_path):
    pytest.importorskip("nanobind", reason="the stub is made by nanobind, a build requirement")
    # In a process of its own: to make a stub, every module in sight is imported.
    made = tmp_path / "_native.pyi"
    done = subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "zero_plugin._native", "-o", made],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    checked_in = (REPOSITORY / "zero_plugin" / "_native.pyi").read_text()
    # The formatter has its own view of blank lines.
    assert ast.dump(ast.parse(made.read_text())) == ast.dump(ast.parse(checked_in))


@pytest.mark.parametrize(
    "content", [None, b"\x7fELF\x02\x01\x01" + bytes(57)], ids=["missing", "foreign"]
)
def test_a_missing_or_foreign_extension_says_how_to_cure_it(tmp_path, content):
    # A package whose extension is absent, or is an object file of no machine.
    package = tmp_path / "zero_plugin"
    package.mkdir()
    for name in ("kernels.py", "errors.py"):
        (package / name).write_text((REPOSITORY / "zero_plugin" / name).read_text())
    (package / "__init__.py").write_text("")
    if content is not None:
        (package / Path(str(_native.__file__)).name).write_bytes(content)
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "scikit" not in repr(finder).lower()
                 and "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, sys.argv[1])
import zero_plugin
assert zero_plugin.__file__.startswith(sys.argv[1]), zero_plugin.__file__
import zero_plugin.errors
try:
    import zero_plugin.kernels
except zero_plugin.errors.NativeExtensionError as error:
    print(error)
"""
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compiled extension cannot be loaded" in done.stdout
    assert "reinstall the package on this machine with a C++20 compiler" in done.stdout


def test_the_module_is_found_where_the_package_says():
    spec = importlib.util.find_spec("zero_plugin._native")
    assert spec is not None
    assert spec.origin == _native.__file__
