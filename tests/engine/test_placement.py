"""ZeRO-Offload's placement is the unique optimum of its own cost model (ATC'21, section 3), by brute force.

The data-flow graph of mixed-precision training with Adam, M parameters: circles hold data (p16 and g16 of 2M bytes, p32,
m32 and v32 of 4M), boxes compute (FWD-BWD, update, float2half); an edge carries what one box hands over in a step.
"""

from __future__ import annotations

import itertools

import pytest

HALF, FULL = 2, 4
SIZES = {"p16": HALF, "g16": HALF, "p32": FULL, "m32": FULL, "v32": FULL}
NODES = (*SIZES, "forward-backward", "update", "float2half")
EDGES = (
    ("p16", "forward-backward", 2 * HALF),  # read by the forward and again by the backward
    ("forward-backward", "g16", HALF),
    ("g16", "update", HALF),
    ("p32", "update", FULL),
    ("update", "p32", FULL),
    ("m32", "update", FULL),
    ("update", "m32", FULL),
    ("v32", "update", FULL),
    ("update", "v32", FULL),
    ("p32", "float2half", FULL),
    ("float2half", "p16", HALF),
)


def placements() -> list[tuple[int, int, frozenset[str]]]:
    """(traffic, device bytes, nodes on the host) of every placement with the O(MB) work on the device; units of M."""
    free = [node for node in NODES if node != "forward-backward"]
    found: list[tuple[int, int, frozenset[str]]] = []
    for choice in itertools.product((False, True), repeat=len(free)):
        host = frozenset(node for node, there in zip(free, choice, strict=True) if there)
        traffic = sum(weight for a, b, weight in EDGES if (a in host) != (b in host))
        device = sum(size for node, size in SIZES.items() if node not in host)
        found.append((traffic, device, host))
    return found


OPTIMUM = frozenset({"g16", "p32", "m32", "v32", "update", "float2half"})


def test_the_papers_placement_is_the_unique_optimum() -> None:
    ranked = sorted(placements(), key=lambda item: (item[1], item[0]))
    offloading = [item for item in placements() if item[2]]
    least = min(traffic for traffic, _, _ in offloading)
    assert least == 4
    best = [item for item in offloading if item[0] == least]
    smallest = min(device for _, device, _ in best)
    assert [item for item in best if item[1] == smallest] == [(4, 2, OPTIMUM)]
    # No placement takes less device memory for the same traffic, and none has less of both.
    assert not [item for item in ranked if item[0] <= 4 and item[1] < 2]


def test_the_four_placements_of_least_traffic() -> None:
    # Section 3.4: 16M, 14M, 4M and 2M bytes of device memory, all with 4M of traffic (nothing offloaded: none).
    update = OPTIMUM - {"g16"}
    found = {host: (traffic, device) for traffic, device, host in placements()}
    assert found[frozenset()] == (0, 16)
    assert found[frozenset({"g16"})] == (4, 14)
    assert found[update] == (4, 4)
    assert found[OPTIMUM] == (4, 2)


@pytest.mark.parametrize("node", ["p32", "m32", "v32"])
def test_parting_an_fp32_node_from_the_update_costs_six_or_more(node: str) -> None:
    for traffic, _, host in placements():
        if (node in host) != ("update" in host):
            assert traffic >= 6


def test_the_default_config_is_that_placement() -> None:
    from zero_plugin.config import ZeroConfig

    config = ZeroConfig()
    tiers = (config.params, config.gradients, config.optimizer)
    assert tiers == ("device", "host", "host")
