"""sdist, wheel and editable install work, need no torch to be built, and put only our names in site-packages."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.distributions import (
    FreshEnvironment,
    copy_checkout,
    environment_without_torch,
    must_run,
)

# Each test may build the extension, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(400)]

INSTALLED = {"zero_plugin", "_zero_plugin_autoload.py"}

USE = """
import zero_plugin, torch, pathlib
from zero_plugin.kernels import Kernels
kernels = Kernels(threads=2)
source = torch.arange(1001, dtype=torch.float32)
target = torch.empty(1001, dtype=torch.bfloat16)
kernels.copy(target, source)
kernels.close()
assert torch.equal(target, source.bfloat16())
assert 'zero_offload' in __import__('lightning.pytorch.strategies').pytorch.strategies.StrategyRegistry
print(pathlib.Path(zero_plugin.__file__).parent, zero_plugin.__version__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributions")


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    checkout = copy_checkout(folder / "checkout")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        folder,
        checkout,
    ]
    must_run([*command], cwd=folder, environment=environment_without_torch(folder))
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(folder / "unpacked", filter="data")
        else:
            archive.extractall(folder / "unpacked")
    source = next((folder / "unpacked").iterdir())
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        source,
    ]
    must_run([*command], cwd=folder, environment=environment_without_torch(folder))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel_environment(folder: Path, wheel: Path) -> FreshEnvironment:
    environment = FreshEnvironment(folder / "from_wheel")
    environment.pip_install(wheel)
    return environment


def test_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "CMakeLists.txt",
        "native_ext/CMakeLists.txt",
        "zero_plugin/py.typed",
        "integrations/__init__.py",
        "README.md",
    } <= names
    assert [name for name in names if name.endswith((".so", ".whl", ".pyc"))] == []


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == INSTALLED
    assert {"zero_plugin/py.typed", "zero_plugin/integrations/__init__.py"} <= set(names)
    assert (
        len([name for name in names if name.startswith("zero_plugin/_native.") and ".so" in name])
        == 1
    )


def test_native_module_has_the_abi_of_the_wheels_tag(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    is_abi3 = any(name.endswith("_native.abi3.so") for name in names)
    assert is_abi3 is ("-abi3-" in wheel.name)


def test_native_module_does_not_link_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if "/_native." in name and name.endswith(".so"))
    content = archive.read(name)
    assert [
        word for word in (b"libtorch", b"libc10", b"at::Tensor", b"_ZN2at") if word in content
    ] == []


def test_wheel_runs_outside_the_checkout(
    wheel_environment: FreshEnvironment, tmp_path: Path
) -> None:
    assert wheel_environment.own_entries() == INSTALLED
    shown = must_run([wheel_environment.python, "-c", USE], cwd=tmp_path).split()
    assert Path(shown[0]) == wheel_environment.site_packages / "zero_plugin"
    assert shown[1] == "0.1.0"


def test_doctor_of_the_wheel(wheel_environment: FreshEnvironment, tmp_path: Path) -> None:
    output = must_run([wheel_environment.programs / "zero-plugin", "doctor"], cwd=tmp_path)
    assert "threads" in output
    assert "problem" not in output


def test_editable_install(folder: Path, sdist: Path, tmp_path: Path) -> None:
    assert sdist.exists()  # the checkout's copy is made by then
    checkout = shutil.copytree(folder / "checkout", folder / "editable_checkout")
    environment = FreshEnvironment(folder / "editable")
    environment.pip_install(
        *("--no-build-isolation", "-C", f"build-dir={folder / 'editable_build'}"),
        # What every machine can run is enough here, and compiled in a third of the time.
        *("-C", "cmake.define.ZERO_PLUGIN_ISAS=", "-e", checkout),
        environment=environment_without_torch(folder),
    )
    for cwd in (tmp_path, checkout):
        shown = must_run([environment.python, "-c", USE], cwd=cwd).split()
        assert Path(shown[0]) == checkout / "zero_plugin"

    # a file that comes later is found without installing again
    (checkout / "integrations" / "newcomer.py").write_text("VALUE = 7\n")
    code = "import zero_plugin.integrations.newcomer as n; print(n.VALUE)"
    assert must_run([environment.python, "-c", code], cwd=tmp_path).strip() == "7"

    # and a checkout that is gone must not take `import torch` with it
    shutil.rmtree(checkout)
    code = "import torch; print(torch.ones(2).sum().item())"
    assert must_run([environment.python, "-c", code], cwd=tmp_path).strip() == "2.0"
