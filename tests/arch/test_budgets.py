"""Size budgets: of the maximum, since it is the tail of large classes and functions that rots a code base."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import REPOSITORY, package_files

MAX_FILE_LINES = 750
MAX_CLASS_LINES = 600
MAX_FUNCTION_LINES = 65
MAX_METHODS = 48
"""The engine, the one class that all integrations talk to, is near this and the budget of a class."""
MAX_REASSIGNED_ATTRIBUTES = 12
"""Attributes of `self` assigned outside `__init__`: state that moves."""
MAX_NATIVE_FILE_LINES = 700

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def budget_breaks(source: str) -> Iterator[str]:
    """Each budget that `source` is over, as a sentence."""
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        yield f"file of {lines} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and (lines := length(node)) > MAX_FUNCTION_LINES:
            yield f"function {node.name} of {lines} lines"
        if isinstance(node, ast.ClassDef):
            yield from class_breaks(node)


def class_breaks(node: ast.ClassDef) -> Iterator[str]:
    methods = [item for item in node.body if isinstance(item, FUNCTIONS)]
    if (lines := length(node)) > MAX_CLASS_LINES:
        yield f"class {node.name} of {lines} lines"
    if len(methods) > MAX_METHODS:
        yield f"class {node.name} with {len(methods)} methods"
    moving = {
        target.attr
        for method in methods
        if method.name not in ("__init__", "__post_init__", "__new__")
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    if len(moving) > MAX_REASSIGNED_ATTRIBUTES:
        yield f"class {node.name} re-assigns {len(moving)} attributes: {sorted(moving)}"


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_file_is_within_the_budgets(path: Path) -> None:
    assert list(budget_breaks((REPOSITORY / path).read_text())) == []


def test_native_files_are_within_the_budget() -> None:
    sources = [p for p in (REPOSITORY / "native_ext").rglob("*") if p.suffix in (".cpp", ".h")]
    assert sources
    lengths = {path.name: path.read_text().count("\n") for path in sources}
    assert {name: n for name, n in lengths.items() if n > MAX_NATIVE_FILE_LINES} == {}


def test_the_check_sees_what_is_too_large() -> None:
    body = "\n".join(f"        self.a{i} = {i}" for i in range(MAX_FUNCTION_LINES + 1))
    source = f"class C:\n    def f(self):\n{body}\n"
    found = list(budget_breaks(source + "\n" * MAX_FILE_LINES))
    assert [text.split(" of ")[0].split(" re-")[0] for text in sorted(found)] == [
        "class C",
        "file",
        "function f",
    ]
