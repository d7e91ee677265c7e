"""ZeRO-Offload's placement is the unique optimum of its graph."""

from __future__ import annotations

from zero_plugin.planner import dataflow


def test_the_papers_placement_is_the_only_optimum() -> None:
    cuts = dataflow.all_cuts()
    assert len(cuts) == 2**7 - 1
    (best,) = dataflow.best_cuts()
    assert best.on_host == {"g16", "p32", "m32", "v32", "update", "float2half"}
    assert best.traffic == 4
    assert best.device_bytes == 2


def test_no_cut_moves_less_than_4_bytes_a_parameter() -> None:
    cuts = dataflow.all_cuts()
    assert min(item.traffic for item in cuts) == 4
    assert {item.device_bytes for item in cuts if item.traffic == 4} == {2, 4, 14}


def test_a_split_fp32_node_costs_at_least_6() -> None:
    together = {"p32", "m32", "v32", "update", "float2half"}
    split = [
        item for item in dataflow.all_cuts() if item.on_host & together not in (set(), together)
    ]
    assert split
    assert min(item.traffic for item in split) >= 6


def test_weights_away_from_the_computation_cost_more() -> None:
    (best,) = dataflow.best_cuts()
    assert dataflow.cut({*best.on_host, "p16"}).traffic == 6
