"""The CUDA backend on a recording fake: no race in any scenario, and a race without any one wait."""

from __future__ import annotations

import ast
import gc
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from runtime.cuda_scenarios import SCENARIOS, Held, Rig
from runtime.fake_cuda import FakeDriver, Machine, RecordingKernels

import zero_plugin.runtime.cuda as cuda_module
import zero_plugin.runtime.ticket as ticket_module
from zero_plugin.errors import LaneError
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.operations import Copy
from zero_plugin.runtime.ticket import Failure, ProgramOrder
from zero_plugin.trace import Ledger

SOURCE = Path(cuda_module.__file__).read_text(encoding="utf-8")

# Calls that order something: without any one of them some scenario must go wrong.
ORDERING = frozenset(
    {"wait_event", "record", "record_stream", "synchronize", "settle", "pass_gate", "block", "wait"}
)


def ordering_calls() -> list[tuple[int, str]]:
    """Line and text of every statement in cuda.py that is a call of an ordering method."""
    found = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ORDERING
    ]
    return sorted(found)


class _Remove(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self.line = line
        self.removed = 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.lineno == self.line and isinstance(node.value, ast.Call):
            self.removed += 1
            return ast.copy_location(ast.Pass(), node)
        return node


def without(line: int) -> ModuleType:
    """`zero_plugin.runtime.cuda` with the call at `line` removed."""
    remover = _Remove(line)
    tree = ast.fix_missing_locations(remover.visit(ast.parse(SOURCE)))
    assert remover.removed == 1
    module = ModuleType("zero_plugin.runtime.cuda_mutated")
    exec(compile(tree, "cuda_mutated.py", "exec"), module.__dict__)
    return module


def goes_wrong(module: ModuleType, name: str) -> bool:
    """Whether a scenario reports a race, or fails, under the module."""
    try:
        return bool(SCENARIOS[name](module).races)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any failure is a notice
        return True


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_has_no_race(name: str) -> None:
    assert SCENARIOS[name](cuda_module).races == []


def test_mutations_cover_every_kind_of_call() -> None:
    texts = " ".join(text for _, text in ordering_calls())
    for kind in ("wait_event", ".record(", "record_stream", "synchronize", "settle", "pass_gate"):
        assert kind in texts
    assert len(ordering_calls()) >= 15


@pytest.mark.parametrize(("line", "text"), ordering_calls(), ids=str)
def test_race_without(line: int, text: str) -> None:
    module = without(line)
    assert any(goes_wrong(module, name) for name in SCENARIOS), (
        f"nothing notices that line {line}, {text!r}, is gone"
    )


def test_detector_sees_a_program_that_forgets_to_wait() -> None:
    rig = Rig(cuda_module)
    gradient, shard = rig.device(), rig.host()
    gradient.fill_(3.0)
    down = rig.backend.lane("down", "device")
    down.submit(
        Copy(destinations=(shard,), sources=(gradient,)), after=[rig.backend.mark("backward")]
    )
    rig.machine.host_reads(shard)
    rig.backend.close()
    assert len(rig.machine.races) == 1


def test_host_memory_is_pinned_at_its_exact_size_and_unpinned_with_it() -> None:
    rig = Rig(cuda_module)
    memory = rig.backend.allocate(5 * 4096, "host")
    assert rig.driver.pinned == {memory.data_ptr(): 5 * 4096}
    part = memory[7:9]
    del memory
    gc.collect()
    assert len(rig.driver.pinned) == 1
    del part
    gc.collect()
    assert rig.driver.pinned == {}
    rig.backend.close()


def test_refused_pinning_falls_back_with_one_warning() -> None:
    machine = Machine()
    driver = FakeDriver(machine, refuse_pinning="out of memory")
    services = Services(kernels=RecordingKernels(machine), ledger=Ledger(), trace=None)
    backend = cuda_module.CudaBackend(services=services, device=torch.device("cpu"), driver=driver)
    with pytest.warns(RuntimeWarning, match="out of memory.*RLIMIT_MEMLOCK") as caught:
        memory = [backend.allocate(4096, "host") for _ in range(3)]
    assert len(caught) == 1
    assert all(part.eq(0).all() for part in memory)
    backend.close()


def test_submission_does_not_wait_for_a_host_operation() -> None:
    """The dispatcher thread does, and goes when the backend closes."""
    rig = Rig(cuda_module)
    held = Held()
    host, up = rig.backend.lane("host", "host"), rig.backend.lane("up", "device")
    ticket = host.submit(held)
    copies = [
        up.submit(Copy(destinations=(rig.device(),), sources=(rig.host(),)), after=[ticket])
        for _ in range(3)
    ]
    assert not any(copy.done for copy in copies)
    held.gate.set()
    for copy in copies:
        copy.wait()
    rig.backend.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("zero-lane")]


def test_two_threads_may_see_an_event_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket: cuda_module.DeviceTicket[None] = cuda_module.DeviceTicket(
        label="copy", lane="down", sequence=0, order=ProgramOrder("test")
    )
    assert ticket.start()

    def the_other_thread_was_first(**what: Any) -> Failure:
        monkeypatch.undo()
        ticket._end(RuntimeError("the device is lost"))
        return Failure(**what)

    monkeypatch.setattr(ticket_module, "Failure", the_other_thread_was_first)
    ticket._end(RuntimeError("the device is lost"))
    with pytest.raises(LaneError, match="the device is lost"):
        ticket.wait()
