"""Functions of the libraries that we override or call: a release that lacks one is refused by name, and nothing else is asked of it."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.trainer_runs import arguments, llama, plain_process, ranks, select, trainer_for

from zero_plugin import _autoload, errors
from zero_plugin.integrations._huggingface import checks, entry, hooked
from zero_plugin.integrations._huggingface.selection import SWITCH


def of_accelerate(_rank: int, _size: int) -> None:
    from accelerate import Accelerator

    for name, parameters in checks._METHODS.items():
        lacking = type("Accelerator", (Accelerator,), {name: None if not parameters else _bare})
        if not parameters:
            lacking = type(
                "Accelerator",
                (),
                {n: getattr(Accelerator, n) for n in checks._METHODS if n != name},
            )
        with pytest.raises(errors.FrameworkError, match=rf"has no Accelerator\.{name}\("):
            checks.check_supported(lacking)
    checks.check_supported(Accelerator)
    # Every method of theirs that ours take the place of is looked for.
    from zero_plugin.integrations._huggingface.accelerator import ZeroAccelerator

    replaced = {
        name for name in vars(ZeroAccelerator) if inspect.isfunction(vars(Accelerator).get(name))
    }
    assert replaced <= set(checks._METHODS)
    made = Accelerator(cpu=True)
    checks.check_attributes(made)
    for name in checks._ATTRIBUTES:
        lacking = type(
            "Accelerator", (), {n: getattr(made, n) for n in checks._ATTRIBUTES if n != name}
        )
        with pytest.raises(errors.FrameworkError, match=rf"has no Accelerator\.{name}, which"):
            checks.check_attributes(lacking())


def _bare(self: Any) -> None:
    del self


def of_transformers(_rank: int, _size: int, folder: Path) -> None:
    from transformers import Trainer

    from zero_plugin.integrations._huggingface import trainer as ours

    plain_process()
    select({"stage": 1})
    made = trainer_for(llama(), arguments(folder))
    assert isinstance(made, ours.ZeroTrainer)
    for name, parameters in ours._METHODS.items():
        # A release whose method is there and takes nothing that we pass, or is not there.
        members = {name: _bare} if parameters else {}
        lacking: Any = type("Trainer", (Trainer,), members)
        if not parameters:
            lacking = type(
                "Trainer", (), {n: getattr(Trainer, n) for n in ours._METHODS if n != name}
            )
        stand_in = object.__new__(lacking)
        stand_in.__dict__.update(made.__dict__)
        with pytest.raises(errors.FrameworkError, match=rf"has no Trainer\.{name}\("):
            ours.adopt(stand_in)
    made.accelerator.free_memory()
    replaced = {n for n in vars(ours.ZeroTrainer) if inspect.isfunction(vars(Trainer).get(n))}
    assert replaced <= set(ours._METHODS)


@pytest.mark.dist
def test_a_release_of_accelerate_that_changed_is_named() -> None:
    ranks(1, of_accelerate)


@pytest.mark.dist
def test_a_release_of_transformers_that_changed_is_named(tmp_path: Path) -> None:
    ranks(1, of_transformers, tmp_path)


def without(module: Any, path: str) -> ModuleType:
    """A module as another release might have it: without what a path leads to."""
    first, _, rest = path.partition(".")
    made: Any = ModuleType(module.__name__)
    made.__dict__.update({k: v for k, v in vars(module).items() if k != first})
    if rest:

        def __init__(self: Any, *_: Any, **__: Any) -> None:  # noqa: N807 - a class gets it
            self.made = True

        members = {k: v for k, v in vars(getattr(module, first)).items() if k.startswith("_ask")}
        setattr(made, first, type(first, (), {**members, "__init__": __init__}))
    return made


def of_hooks(_rank: int, _size: int, name: str, switch: str) -> None:
    """Each name that an entrance needs, missing in turn."""
    import os

    os.environ[SWITCH] = switch
    module = import_module(name)
    for path in hooked.HOOKED[name]:
        if path.endswith("__init__"):
            continue  # every class has one
        lacking: Any = without(module, path)
        owner, _, _ = path.partition(".")
        for other in hooked.HOOKED[name]:
            # What else is looked for on the same class is there.
            first, _, rest = other.partition(".")
            if rest and other != path and first == owner and rest != "__init__":
                setattr(getattr(lacking, owner), rest, None)
        with pytest.raises(
            errors.FrameworkError, match=rf"has no {name}.{path}, where zero-plugin"
        ):
            entry.enter(lacking)
        user = getattr(lacking, hooked._USERS.get(name, ""), None)
        if user is None or user.__module__ == name:
            continue
        if switch == "true":
            with pytest.raises(errors.FrameworkError, match="where zero-plugin enters it"):
                user()
        else:
            assert user().made


@pytest.mark.dist
@pytest.mark.parametrize("switch", ["true", "false"])
def test_a_module_that_changed_is_named_and_stops_runs_of_ours(switch: str) -> None:
    names = {
        name
        for name in _autoload.TARGETS
        if name.partition(".")[0] in ("accelerate", "transformers")
    }
    assert set(hooked.HOOKED) == set(entry._ENTRANCES) == names
    for name in sorted(names):
        ranks(1, of_hooks, name, switch)
