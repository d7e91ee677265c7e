"""The two scripts of the README: what they find missing, what they reuse, what they run."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.sources import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
PROJECT = """\
[project]
dependencies = ["torch>=2"]
[project.optional-dependencies]
dev = [
  "ruff==1",  # a comment
]
other = ["other"]
[tool.ruff]
line-length = 100
"""
ENTRIES = ("run_example.py", "run_tests.py")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import environment

    return environment


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small stand-in of the repository: what the stamps are made from."""
    for name in (
        *("pyproject.toml", "constraints.txt", "CMakeLists.txt", "README.md"),
        *(
            "examples/data-packages.txt",
            "native_ext/src/a.cpp",
            "zero_plugin/a.py",
            "integrations/a.py",
        ),
    ):
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "repository" / "pyproject.toml").write_text(PROJECT)
    return tmp_path / "repository"


def machine(environment: ModuleType, **changes: object) -> object:
    good = {
        "python": (3, 11),
        "modules": frozenset({"venv", "ensurepip"}),
        "compiler": "/usr/bin/c++",
        "compiler_error": "",
        "free_bytes": 100 * 1024**3,
    }
    return environment.Machine(**{**good, **changes})


def recipe(environment: ModuleType, folder: Path, *, editable: bool = True) -> object:
    return environment.Recipe(folder=folder, extras=("dev",), editable=editable)


# ------------------------------------------------------------------ what is missing


def test_nothing_is_missing_on_a_good_machine(environment: ModuleType) -> None:
    assert environment.missing(machine(environment)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": (3, 9)}, "Python 3.10 or newer is needed, this is 3.9"),
        ({"modules": frozenset({"venv"})}, "no module ensurepip.*python3-venv"),
        ({"modules": frozenset()}, "no module venv and no module ensurepip"),
        ({"compiler": None}, r"no C\+\+ compiler was found.*c\+\+, g\+\+, clang\+\+"),
        (
            {"compiler_error": "error: bad -std"},
            r"cannot build a C\+\+20 program \(error: bad -std\)",
        ),
        ({"free_bytes": 1024**3}, "1.0 GiB of disk space are free and 4 GiB are needed"),
    ],
)
def test_each_missing_thing_is_named(
    environment: ModuleType, changes: dict[str, object], message: str
) -> None:
    problems = environment.missing(machine(environment, **changes))
    assert len(problems) == 1
    assert re.search(message, problems[0])


def test_everything_missing_is_said_at_once(environment: ModuleType) -> None:
    nothing = machine(environment, python=(3, 8), modules=frozenset(), compiler=None, free_bytes=0)
    assert len(environment.missing(nothing)) == 4


def test_compiler_is_found_by_variable_then_by_name(
    environment: ModuleType, tmp_path: Path
) -> None:
    for name in ("g++", "special"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path)
    assert environment.find_compiler({"PATH": path}) == str(tmp_path / "g++")
    assert environment.find_compiler({"PATH": path, "CXX": "special -m64"}) == str(
        tmp_path / "special"
    )
    assert environment.find_compiler({"PATH": path, "CXX": "absent"}) is None


def test_a_compiler_that_fails_is_reported(environment: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'no such standard' >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    assert environment.compiler_error(str(broken)) == "no such standard"


def test_this_machines_compiler_works(environment: ModuleType) -> None:
    # the tests themselves need the extension, so a compiler was there
    assert environment.compiler_error(environment.find_compiler(os.environ)) == ""


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_a_compiler_nothing_is_done(entry: str, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / entry), "--venv", str(folder)],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "zero-plugin: this machine lacks something:\n- no C++ compiler was found" in done.stderr
    assert not folder.exists()


def test_without_an_index_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    nowhere = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "run_tests.py"), "--venv", str(folder)],
        env=nowhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip cannot get packages from its index" in done.stderr
    assert not folder.exists()


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_old_python_is_told(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (SCRIPTS / entry).read_text()
    ast.parse(source, feature_version=(3, 6))
    monkeypatch.setattr(sys, "version_info", (3, 8, 0))
    with pytest.raises(SystemExit, match=r"zero-plugin needs Python 3.10 or newer, this is 3.8"):
        runpy.run_path(str(SCRIPTS / entry))


# ------------------------------------------------------------------ what is out of date


def test_stamp_is_the_same_for_the_same_files(environment: ModuleType, checkout: Path) -> None:
    one = recipe(environment, checkout / "venv")
    assert environment.wanted_stamp(one, checkout) == environment.wanted_stamp(one, checkout)


@pytest.mark.parametrize(
    ("file", "editable", "dependencies", "package"),
    [
        ("constraints.txt", True, True, False),
        ("examples/data-packages.txt", True, True, False),
        ("native_ext/src/a.cpp", True, False, True),
        ("zero_plugin/a.py", True, False, False),
        ("zero_plugin/a.py", False, False, True),
        ("integrations/a.py", False, False, True),
    ],
)
def test_stamp_changes_with_what_it_stands_for(
    environment: ModuleType,
    checkout: Path,
    file: str,
    editable: bool,
    dependencies: bool,
    package: bool,
) -> None:
    one = recipe(environment, checkout / "venv", editable=editable)
    before = environment.wanted_stamp(one, checkout)
    (checkout / file).write_text("changed")
    after = environment.wanted_stamp(one, checkout)
    assert (before.dependencies != after.dependencies) is dependencies
    assert (before.package != after.package) is package


@pytest.mark.parametrize(
    ("old", "new", "dependencies"),
    [
        ("ruff==1", "ruff==2", True),
        ("torch>=2", "torch>=3", True),
        ('["other"]', '["another"]', False),  # an extra that this environment does not have
        ("line-length = 100", "line-length = 99", False),
    ],
)
def test_only_requirements_make_an_environment_anew(
    environment: ModuleType, checkout: Path, old: str, new: str, dependencies: bool
) -> None:
    one = recipe(environment, checkout / "venv")
    before = environment.wanted_stamp(one, checkout)
    (checkout / "pyproject.toml").write_text(PROJECT.replace(old, new))
    after = environment.wanted_stamp(one, checkout)
    assert (before.dependencies != after.dependencies) is dependencies
    assert before.package != after.package


def test_an_environment_that_is_up_to_date_is_reused(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = environment.Recipe(folder=tmp_path / "venv", extras=("dev",), editable=True)
    one.python.parent.mkdir(parents=True)
    one.python.touch()
    environment.write_stamp(one, environment.wanted_stamp(one))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(environment, "run", refuse)
    environment.prepare(one, refuse)
    # and one whose stamp differs is not
    environment.write_stamp(one, environment.Stamp("old", "old"))
    with pytest.raises(AssertionError, match="something was run"):
        environment.prepare(one, refuse)


def test_an_unfinished_environment_has_no_stamp(environment: ModuleType, tmp_path: Path) -> None:
    one = recipe(environment, tmp_path)
    assert environment.present_stamp(one) is None


# ------------------------------------------------------------------ what is installed


def test_requirements_are_read_as_toml_has_them(environment: ModuleType) -> None:
    # tomli comes with pytest where Python has no tomllib yet
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = (REPOSITORY / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    expected = {"": project["dependencies"], **project["optional-dependencies"]}
    assert environment.project_table(text) == expected


def test_torch_comes_first_and_from_the_index_asked_for(environment: ModuleType) -> None:
    one = environment.Recipe(
        folder=Path("venv"),
        extras=("examples",),
        editable=False,
        torch_index="https://example.org/cpu",
    )
    commands = environment.dependency_commands(one)
    with_index = [command for command in commands if "--index-url" in command]
    assert with_index == [commands[1]]
    assert commands[1][-1] == "torch"
    assert "constraints.txt" in " ".join(commands[1])
    assert "--no-deps" in commands[-1]


# ------------------------------------------------------------------ README and CI


def test_readme_names_the_commands_and_ci_runs_the_second() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert "python3 scripts/run_example.py" in readme
    assert "python3 scripts/run_tests.py" in readme
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert "exec python3 scripts/run_tests.py\n" in ci
    assert shutil.which("bash")
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & stat.S_IXUSR


def test_a_folder_of_somebody_elses_is_left_alone(environment: ModuleType, tmp_path: Path) -> None:
    precious = tmp_path / "mine" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("chapter 1")
    recipe = environment.Recipe(folder=precious.parent, extras=("dev",), editable=True)
    with pytest.raises(environment.SetupError, match="was not made by this script"):
        environment.make(recipe)
    assert precious.read_text() == "chapter 1"
