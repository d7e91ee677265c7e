"""The registration that needs no import: every import order, and a process that does not ask for us.

Most of it runs against stand-ins for torch and Lightning in plain subprocesses, which start in a fraction of a second
and can put torch's import anywhere. What stands for the real packages is in test_autoload_real.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zero_plugin import _autoload

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description="", **init_params):
        if name in self:
            raise ValueError(name)
        self[name] = {"strategy": strategy, "description": description, "init_params": init_params}
"""

# In every file TORCH says where this module imports torch: before its own code, after it, or not at all.
FILES = {
    "torch/__init__.py": "from zero_plugin._autoload import autoload\nautoload()\n",
    "lightning/__init__.py": "FIRST\n",
    "lightning/pytorch/__init__.py": "import lightning.pytorch.trainer\n",
    "lightning/pytorch/trainer.py": "from lightning.pytorch.strategies import StrategyRegistry as seen\n",
    "lightning/pytorch/strategies/__init__.py": "INSIDE\n"
    + REGISTRY
    + "StrategyRegistry = Registry()\nLATE\n",
    "lightning/fabric/__init__.py": "from lightning.fabric.strategies import STRATEGY_REGISTRY as seen\n",
    "lightning/fabric/strategies/__init__.py": "INSIDE\n"
    + REGISTRY
    + "STRATEGY_REGISTRY = Registry()\nLATE\n",
    "pytorch_lightning/__init__.py": "FIRST\nfrom pytorch_lightning.strategies import StrategyRegistry as seen\n",
    "pytorch_lightning/strategies/__init__.py": "INSIDE\n"
    + REGISTRY
    + "StrategyRegistry = Registry()\nLATE\n",
    "lightning_fabric/__init__.py": "FIRST\nfrom lightning_fabric.strategies import STRATEGY_REGISTRY as seen\n",
    "lightning_fabric/strategies/__init__.py": "INSIDE\n"
    + REGISTRY
    + "STRATEGY_REGISTRY = Registry()\nLATE\n",
}
NAMES = [
    *("zero_1", "zero_2", "zero_3", "zero_3_offload"),
    *("zero_auto", "zero_infinity", "zero_offload"),
]


def stand_ins(folder: Path, torch_in: str) -> Path:
    """Write the stand-in packages; `torch_in` is FIRST, INSIDE, LATE or nothing."""
    for name, template in FILES.items():
        text = template
        for place in ("FIRST", "INSIDE", "LATE"):
            text = text.replace(place, "import torch" if place == torch_in else "pass")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def python(
    code: str, *, path: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter with `path` in front of everything."""
    code = f"import sys\nsys.path.insert(0, {str(path)!r})\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed(code: str, **options: object) -> str:
    result = python(code, **options)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


ORDERS = {
    "torch, then lightning.pytorch": (
        "",
        "import torch",
        "lightning.pytorch.strategies:StrategyRegistry",
    ),
    "torch, then pytorch_lightning": (
        "",
        "import torch",
        "pytorch_lightning.strategies:StrategyRegistry",
    ),
    "torch, then lightning.fabric": (
        "",
        "import torch",
        "lightning.fabric.strategies:STRATEGY_REGISTRY",
    ),
    "torch, then lightning_fabric": (
        "",
        "import torch",
        "lightning_fabric.strategies:STRATEGY_REGISTRY",
    ),
    "lightning first, torch from its top": (
        "FIRST",
        "import lightning",
        "lightning.pytorch.strategies:StrategyRegistry",
    ),
    "pytorch_lightning first, torch from its top": (
        "FIRST",
        "import pytorch_lightning",
        "pytorch_lightning.strategies:StrategyRegistry",
    ),
    "lightning.pytorch first, torch from inside the target": (
        "INSIDE",
        "import lightning.pytorch",
        "lightning.pytorch.strategies:StrategyRegistry",
    ),
    "lightning_fabric first, torch at the target's end": (
        "LATE",
        "import lightning_fabric",
        "lightning_fabric.strategies:STRATEGY_REGISTRY",
    ),
    "the target itself first, torch from inside": (
        "INSIDE",
        "import pytorch_lightning.strategies",
        "pytorch_lightning.strategies:StrategyRegistry",
    ),
    "the target by from-import, torch from inside": (
        "INSIDE",
        "from lightning.fabric.strategies import STRATEGY_REGISTRY",
        "lightning.fabric.strategies:STRATEGY_REGISTRY",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_import_order_registers(order: str, tmp_path: Path) -> None:
    torch_in, first, target = ORDERS[order]
    module, registry = target.split(":")
    out = printed(
        f"""
        {first}
        import {module.rpartition(".")[0]}
        module = sys.modules[{module!r}]
        print(sorted(module.{registry}), type(module).__name__, module.{registry} is module.{registry})
        print(module.{registry}["zero_2"]["init_params"])
        print(sum(getattr(finder, "of_zero_plugin", False) for finder in sys.meta_path))
        """,
        path=stand_ins(tmp_path, torch_in),
    )
    assert out.splitlines() == [
        f"{NAMES} module True",
        "{'stage': 2, 'optimizer': 'device', 'gradients': 'device'}",
        "1",
    ]


def test_the_names_are_there_at_the_first_use_by_the_framework_itself(tmp_path: Path) -> None:
    """The module next in the chain already sees them, though torch was imported from inside the target."""
    out = printed(
        "import lightning.pytorch\nprint(sorted(lightning.pytorch.trainer.seen))",
        path=stand_ins(tmp_path, "INSIDE"),
    )
    assert out == str(NAMES)


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_switch_turns_it_off(value: str, tmp_path: Path) -> None:
    out = printed(
        """
        before = list(sys.meta_path)
        import torch, lightning.pytorch
        print(dict(lightning.pytorch.strategies.StrategyRegistry), sys.meta_path == before)
        print([name for name in sys.modules if name.startswith("zero_plugin.integrations")])
        """,
        path=stand_ins(tmp_path, ""),
        env={_autoload.SWITCH: value},
    )
    assert out.splitlines() == ["{} True", "[]"]


@pytest.mark.parametrize("when", ["before", "after", "twice"])
def test_register_is_the_explicit_route(when: str, tmp_path: Path) -> None:
    register = "import zero_plugin; zero_plugin.register()"
    out = printed(
        f"""
        {register if when != "after" else ""}
        import lightning.pytorch
        {register if when != "before" else ""}
        print(sorted(lightning.pytorch.strategies.StrategyRegistry))
        """,
        path=stand_ins(tmp_path, "FIRST"),
        env={_autoload.SWITCH: "0"},
    )
    assert out == str(NAMES)


def test_run_registers_here_and_in_children(tmp_path: Path) -> None:
    """A launcher starts the script itself again, without `-m zero_plugin.run`."""
    stand_ins(tmp_path, "")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import subprocess, sys
            import torch, helper, lightning.pytorch
            print(__name__, sys.argv[1:], sorted(lightning.pytorch.strategies.StrategyRegistry), flush=True)
            if sys.argv[1:] == ["--parent"]:
                subprocess.run([sys.executable, sys.argv[0], "child"], check=True)
            """
        )
    )
    (tmp_path / "helper.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-m", "zero_plugin.run", str(script), "--parent"],
        env={**os.environ, _autoload.SWITCH: "0", "PYTHONPATH": path_with(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"__main__ ['--parent'] {NAMES}",
        f"__main__ ['child'] {NAMES}",
    ]


def path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def test_run_takes_a_module(tmp_path: Path) -> None:
    stand_ins(tmp_path, "")
    (tmp_path / "entry.py").write_text(
        "import sys, lightning.pytorch.strategies as s\nprint(__name__, sys.argv[1:], sorted(s.StrategyRegistry))\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "zero_plugin.run", "-m", "entry", "a", "-b"],
        env={**os.environ, "PYTHONPATH": path_with(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.strip() == f"__main__ ['a', '-b'] {NAMES}", result.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m"], ["missing.py"]])
def test_run_says_how_it_is_called(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zero_plugin.run", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "usage: python -m zero_plugin.run" in result.stderr


def test_a_broken_package_breaks_no_import(tmp_path: Path) -> None:
    """Frameworks import as if we were not there, and one line of the log says what to do."""
    stand_ins(tmp_path, "")
    result = python(
        """
        sys.modules["zero_plugin.integrations"] = None  # any import below it now raises
        import torch, lightning.pytorch
        print(dict(lightning.pytorch.strategies.StrategyRegistry))
        """,
        path=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "{}"
    assert len(result.stderr.strip().splitlines()) == 1
    assert "reinstall it, or set ZERO_PLUGIN_AUTOLOAD=0" in result.stderr


def test_a_deleted_checkout_breaks_no_import(tmp_path: Path) -> None:
    """The copy beside the package, which the entry point names, needs nothing of the package to be there."""
    stand_ins(tmp_path, "")
    shutil.copyfile(str(_autoload.__file__), tmp_path / "_zero_plugin_autoload.py")
    (tmp_path / "torch/__init__.py").write_text(
        "from _zero_plugin_autoload import autoload\nautoload()\n"
    )
    result = python(
        """
        class Gone:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "zero_plugin":
                    raise FileNotFoundError(name)
        sys.meta_path.insert(0, Gone())
        import torch, pytorch_lightning
        print(dict(pytorch_lightning.strategies.StrategyRegistry))
        """,
        path=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "{}"
    assert "reinstall it, or set ZERO_PLUGIN_AUTOLOAD=0" in result.stderr


def test_register_raises_what_autoload_only_logs(tmp_path: Path) -> None:
    stand_ins(tmp_path, "")
    result = python(
        """
        import lightning.pytorch
        sys.modules["zero_plugin.integrations"] = None
        import zero_plugin
        zero_plugin.register()
        """,
        path=tmp_path,
    )
    assert result.returncode == 1
    assert "zero_plugin.integrations" in result.stderr.splitlines()[-1]


def test_a_name_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    stand_ins(tmp_path, "")
    target = tmp_path / "lightning/pytorch/strategies/__init__.py"
    target.write_text(target.read_text() + "StrategyRegistry.register('zero_2', print)\n")
    result = python(
        """
        import torch, lightning.pytorch
        print(lightning.pytorch.strategies.StrategyRegistry["zero_2"]["strategy"] is print)
        """,
        path=tmp_path,
    )
    assert result.stdout.strip() == "True"
    assert "'zero_2' is taken by" in result.stderr


def test_a_target_that_fails_to_import_is_not_registered_and_can_be_retried(tmp_path: Path) -> None:
    stand_ins(tmp_path, "INSIDE")
    target = tmp_path / "lightning/fabric/strategies/__init__.py"
    target.write_text(
        target.read_text()
        + "import os\nif os.environ.pop('FAIL', None): raise ValueError('first try')\n"
    )
    out = printed(
        """
        try:
            import lightning.fabric
        except ValueError as error:
            print(error)
        import lightning.fabric
        print(sorted(lightning.fabric.seen))
        """,
        path=tmp_path,
        env={"FAIL": "1"},
    )
    assert out.splitlines() == ["first try", str(NAMES)]


def test_importing_the_package_or_the_registration_imports_no_torch() -> None:
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            "import zero_plugin, zero_plugin._autoload, zero_plugin.integrations.registration, sys\n"
            "print([n for n in ('torch', 'lightning', 'numpy', 'logging', 'dataclasses') if n in sys.modules])",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, _autoload.SWITCH: "0"},
    )
    assert out.stdout.strip() == "[]"
