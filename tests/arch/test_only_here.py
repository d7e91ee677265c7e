"""What only one place may do: each rule names the owning files, and is checked on the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.sources import REPOSITORY, package_files

HOOKS = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_hook",
    "register_prehook",
    "register_multi_grad_hook",
    "register_post_accumulate_grad_hook",
    "queue_callback",
    "saved_tensors_hooks",
}


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` for that expression, "" for one that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def uses_of(module: str) -> Callable[[ast.AST], bool]:
    """Whether a node imports or names `module` or something in it."""
    parent, _, leaf = module.rpartition(".")

    def found(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(f"{alias.name}.".startswith(f"{module}.") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            from_module = f"{node.module}.".startswith(f"{module}.")
            from_parent = node.module == parent and any(alias.name == leaf for alias in node.names)
            return from_module or from_parent
        return isinstance(node, ast.Attribute) and dotted(node) == module

    return found


def any_of(*checks: Callable[[ast.AST], bool]) -> Callable[[ast.AST], bool]:
    return lambda node: any(check(node) for check in checks)


def is_hook(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in HOOKS


def is_print(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def is_a(*kinds: type[ast.AST]) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, kinds)


@dataclass(frozen=True)
class Rule:
    """`found` may be true only in files under `owners` (files or folders)."""

    name: str
    found: Callable[[ast.AST], bool]
    owners: tuple[str, ...]

    def breaks(self, source: str, path: Path) -> Iterator[str]:
        owned = any(path == Path(owner) or Path(owner) in path.parents for owner in self.owners)
        if not owned:
            for node in ast.walk(ast.parse(source)):
                if self.found(node):
                    yield f"{path}:{getattr(node, 'lineno', 0)} {self.name}"


RULES = [
    Rule("assert", is_a(ast.Assert), ()),
    Rule("global", is_a(ast.Global), ()),
    Rule("print", is_print, ("zero_plugin/cli.py",)),
    Rule("torch.cuda", uses_of("torch.cuda"), ("zero_plugin/runtime/cuda.py",)),
    Rule(
        "torch.distributed",
        uses_of("torch.distributed"),
        ("zero_plugin/sharding/group.py", "zero_plugin/checkpoint/dcp.py", "integrations"),
    ),
    Rule("hook", is_hook, ("zero_plugin/sharding/hooks.py",)),
    Rule(
        "environment",
        any_of(uses_of("os.environ"), uses_of("os.getenv"), uses_of("os.putenv")),
        ("integrations", "zero_plugin/_autoload.py"),
    ),
]

EXAMPLES = {
    "assert": "assert x",
    "global": "def f():\n    global x",
    "print": "print(1)",
    "torch.cuda": "from torch import cuda",
    "torch.distributed": "import torch.distributed as dist",
    "hook": "p.register_post_accumulate_grad_hook(f)",
    "environment": "os.environ['X'] = '1'",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_only_its_owners_do_it(rule: Rule) -> None:
    breaks = [
        found
        for path in package_files()
        for found in rule.breaks((REPOSITORY / path).read_text(), path)
    ]
    assert breaks == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_sees_a_break(rule: Rule) -> None:
    source = EXAMPLES[rule.name]
    assert list(rule.breaks(source, Path("zero_plugin/engine.py")))
    assert all(not list(rule.breaks(source, Path(owner))) for owner in rule.owners)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.cuda", True),
        ("torch.cuda.synchronize()", True),
        ("from torch.cuda import Stream", True),
        ("import torch\nx.is_cuda", False),
        ("import torch.cudafoo", False),
        ("device.type == 'cuda'", False),
    ],
)
def test_uses_of_a_module(source: str, expected: bool) -> None:
    rule = Rule("torch.cuda", uses_of("torch.cuda"), ())
    assert bool(list(rule.breaks(source, Path("zero_plugin/x.py")))) is expected
