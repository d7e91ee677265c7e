"""The ledger and the event log."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zero_plugin.trace import LEDGER_KEYS, Ledger, Trace


def test_ledger_counts_from_many_threads() -> None:
    ledger = Ledger()

    def add() -> None:
        for _ in range(2000):
            ledger.add("nvme_read", 3)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.snapshot() == {**dict.fromkeys(LEDGER_KEYS, 0), "nvme_read": 24000}


def test_ledger_extras() -> None:
    ledger = Ledger(extras=("shared_with_device",))
    ledger.add("shared_with_device", 5)
    ledger.declare("again")
    ledger.declare("shared_with_device")
    assert ledger.snapshot()["shared_with_device"] == 5
    assert ledger.snapshot()["again"] == 0
    with pytest.raises(KeyError, match="unknown ledger key 'device_to_hots'; known are"):
        ledger.add("device_to_hots", 1)


def test_snapshot_is_a_copy() -> None:
    ledger = Ledger()
    ledger.snapshot()["all_gather"] = 7
    assert ledger.snapshot()["all_gather"] == 0


def test_chrome_trace_is_balanced_and_linked(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("forward"):
        trace.record("down", "copy", "issued", nbytes=8, sequence=0)
    trace.record("down", "copy", "begin", nbytes=8, sequence=0)
    trace.record("down", "copy", "end", nbytes=8, sequence=0)
    path = tmp_path / "trace.json"
    trace.write_chrome(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(rows) == {"program", "down"}
    for row in rows.values():
        depth = 0
        for event in events:
            if event["tid"] == row and event["ph"] in "BE":
                depth += 1 if event["ph"] == "B" else -1
                assert depth >= 0
        assert depth == 0
    flows = [(event["ph"], event["id"], event["tid"]) for event in events if event["ph"] in "sf"]
    assert flows == [("s", 0, rows["program"]), ("f", 0, rows["down"])]
    begin = next(event for event in events if event["ph"] == "B" and event["tid"] == rows["down"])
    assert begin["args"] == {"bytes": 8, "sequence": 0}
    stamps = [event["ts"] for event in events if "ts" in event]
    assert stamps == sorted(stamps)
    assert stamps[0] == 0


def test_empty_trace_and_clear(tmp_path: Path) -> None:
    trace = Trace()
    trace.record("a", "b", "issued")
    trace.clear()
    trace.write_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_trace_module_does_not_import_torch() -> None:
    code = "import sys, zero_plugin.trace; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
