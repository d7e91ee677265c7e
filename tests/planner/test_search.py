"""The choice against exhaustive simulation on machines that do not exist, and what limits and pins do to it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make_gpt

from zero_plugin import plan
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.cost import Choice, Load, price
from zero_plugin.planner.dry import DryModel, Footprint, meta_twin
from zero_plugin.planner.search import Limits, Search, Task, candidates, fits, peak_of
from zero_plugin.planner.simulate import simulate
from zero_plugin.planner.workload import Activity

CASES = 100


def drawn_hardware(rng: random.Random) -> Hardware:
    def rate(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    return Hardware(
        name="drawn",
        devices=rng.choice([1, 2, 4]),
        device_bytes=int(rate(1e5, 3e7)),
        host_bytes=int(rate(1e6, 1e9)),
        nvme_bytes=int(rate(1e8, 1e10)),
        flops=rate(1e9, 1e13),
        device_bandwidth=rate(1e9, 1e12),
        down=rate(1e8, 1e11),
        up=rate(1e8, 1e11),
        update=rate(1e8, 1e11),
        nvme_read=rate(1e7, 1e10),
        nvme_write=rate(1e7, 1e10),
        collective=rate(1e8, 1e12),
        network=1e9,
        launch_seconds=0.0,
    )


def drawn_task(rng: random.Random, dry: DryModel) -> Task:
    hardware = drawn_hardware(rng)
    psi = dry.trainable
    tokens = 2 ** rng.randint(0, 12)
    activity = Activity(
        tokens=tokens,
        forward_flops=2 * psi * tokens,
        kept=tokens * 400,
        checkpoints=tokens * 40,
        working=tokens * 100,
        output=tokens * 20,
    )
    load = Load(
        trainable=psi,
        parameters=psi,
        element=2,
        gradient=2,
        wire=4,
        states=3,
        units=4,
        accumulate=rng.choice([1, 1, 4]),
        activity=activity,
    )
    # Without the slack that is left for a device's runtime: these are small.
    limits = Limits(
        device=hardware.device_bytes, host=hardware.host_bytes, nvme=hardware.nvme_bytes
    )
    return Task(
        model=dry,
        load=load,
        buffers=dry.sizes(64 << 10, 4),
        hardware=hardware,
        limits=limits,
        settings={"nvme_path": "x", "bucket_bytes": "64KiB", "nvme_buffer_bytes": "1MiB"},
    )


def test_the_choice_is_within_5_percent_of_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = DryModel(meta_twin(make_gpt(torch.bfloat16, width=32, layers=2)))
    known: dict[Any, Footprint] = {}
    footprint = dry.footprint

    def remembered(config: ZeroConfig, world_size: int, *, accumulate: int = 1) -> Footprint:
        """A placement takes as much on every machine."""
        key = (config, world_size, accumulate)
        if key not in known:
            known[key] = footprint(config, world_size, accumulate=accumulate)
        return known[key]

    monkeypatch.setattr(dry, "footprint", remembered)
    # Fewer of the dimensions that change nothing about the states, so that all can be tried a hundred times.
    monkeypatch.setattr("zero_plugin.planner.search._PREFETCH", (1, 0))
    monkeypatch.setattr("zero_plugin.planner.search._LOSS_TILES", (1,))
    rng = random.Random(7)
    chosen = nothing = 0
    worst = 1.0
    for _ in range(CASES):
        task = drawn_task(rng, dry)
        best = float("inf")
        bounds = [(price(c, task.load, task.hardware).lower_bound, c) for c in candidates(task)]
        # A bound of any schedule: what is above the best found cannot be better.
        for bound, choice in sorted(bounds, key=lambda pair: pair[0]):
            if bound >= best:
                break
            seconds = simulate(choice, task.load, task.hardware)
            if seconds >= best:
                continue
            found_bytes = dry.footprint(
                task.config(choice), task.hardware.world_size, accumulate=task.load.accumulate
            )
            if fits(peak_of(choice, found_bytes, task.load), task.limits, task.hardware):
                best = seconds
        found = Search(task).run(1)
        assert bool(found) is (best < float("inf"))
        if not found:
            nothing += 1
            continue
        chosen += 1
        worst = max(worst, found[0].seconds / best)
        assert found[0].seconds <= 1.05 * best, (task.hardware, found[0])
        assert found[0].price.lower_bound <= found[0].seconds * 1.0001
    # The draw has both kinds of case.
    assert chosen >= 60
    assert nothing >= 1


def load_of(tokens: float, **changes: Any) -> Load:
    activity = Activity(
        tokens=tokens, forward_flops=2e9 * tokens, kept=0, checkpoints=0, working=0, output=0
    )
    values: dict[str, Any] = {
        "trainable": 1_000_000_000,
        "parameters": 1_000_000_000,
        "element": 2,
        "gradient": 2,
        "wire": 4,
        "states": 3,
        "units": 32,
        "accumulate": 1,
        "activity": activity,
        **changes,
    }
    return Load(**values)


def test_the_update_is_28_bytes_a_parameter_over_the_hosts_rate(desktop: Hardware) -> None:
    offload = Choice(stage=2, optimizer="host", gradients="host")
    update = price(offload, load_of(4096), replace(desktop, launch_seconds=0.0)).phases[2]
    assert update.seconds["update on the host"] == pytest.approx(28e9 / 40e9)
    assert update.seconds["host to device"] == pytest.approx(2e9 / 22e9)


def test_offload_moves_4_bytes_a_parameter_over_all_ranks(desktop: Hardware) -> None:
    for ranks in (1, 4):
        machine = replace(desktop, devices=ranks, launch_seconds=0.0)
        phases = price(
            Choice(stage=2, optimizer="host", gradients="host"), load_of(1), machine
        ).phases
        down = phases[1].seconds["device to host"] * machine.link_down * ranks
        up = phases[2].seconds["host to device"] * machine.link_up * ranks
        assert down == pytest.approx(2e9)
        assert up == pytest.approx(2e9)


def test_a_delayed_update_hides_behind_enough_tokens(desktop: Hardware) -> None:
    late = Choice(stage=2, optimizer="host", gradients="host", delayed=True)
    plain = replace(late, delayed=False)
    few, many = load_of(256), load_of(65536)
    assert price(late, few, desktop).bound_by == "update on the host"
    assert price(late, many, desktop).bound_by == "compute"
    assert price(late, many, desktop).hidden_update
    for load in (few, many):
        assert price(late, load, desktop).seconds < price(plain, load, desktop).seconds
        assert simulate(late, load, desktop) < simulate(plain, load, desktop)


@pytest.mark.parametrize("early", ["speculate", "update_in_backward"])
def test_an_update_inside_backward_hides_behind_it(desktop: Hardware, early: str) -> None:
    plain = Choice(stage=2, optimizer="host", gradients="host")
    inside = replace(plain, early=early)
    assert inside.settings()[early] is True
    for tokens, repeats in ((256, 1), (65536, 1), (65536, 4)):
        load = load_of(tokens, accumulate=repeats)
        parts = price(plain, load, desktop).phases
        update = parts[2].seconds["update on the host"]
        computed = parts[1].seconds["compute"]
        # Gradients on their way to the host take longer than computing few tokens.
        computed = max(computed, parts[1].seconds["device to host"])
        hidden = min(update, computed)
        shown = parts[2].seconds["host to device"]
        gained = simulate(plain, load, desktop) - simulate(inside, load, desktop)
        # Beside the last backward, and no more than it lasts; showing the weights was beside the update before, but for a block.
        assert 0 < gained <= hidden * 1.001
        assert gained >= min(update - shown, computed) * 0.93
        saved = price(plain, load, desktop).seconds - price(inside, load, desktop).seconds
        assert saved == pytest.approx(gained, rel=0.1)
        bound = price(inside, load, desktop).lower_bound
        assert bound == price(plain, load, desktop).lower_bound <= simulate(inside, load, desktop)
    # Where the same cores compute and update nothing is gained.
    cores = replace(desktop, device_is_host=True)
    assert simulate(inside, load_of(256), cores) == pytest.approx(
        simulate(plain, load_of(256), cores)
    )


def test_speculation_is_chosen_where_it_is_allowed_and_there_is_memory_for_it() -> None:
    model = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 8, "n_head": 16}
    options: dict[str, Any] = {"hardware": "rtx-4090", "batch": 4, "seq": 512, "stage": 2}
    options |= {"optimizer": "host", "device_fraction": 0.0, "alternatives": 0}
    plain = plan(model, **options)
    allowed = plan(model, **options, speculate=True)
    assert plain.best is not None
    assert allowed.best is not None
    assert allowed.config is not None
    assert not plain.best.choice.early
    assert allowed.config.speculate
    assert allowed.best.seconds < plain.best.seconds
    more = allowed.best.peak["host"] - plain.best.peak["host"]
    # What is undone with, and weights that wait for the step.
    assert 14 <= more / plain.load.trainable <= 14.2
    room = (plain.best.peak["host"] + more // 2) / 0.9
    short = plan(model, **options, speculate=True, host=int(room))
    assert short.config is not None
    assert not short.config.speculate


@pytest.mark.parametrize(("dtype", "moment"), [("fp32", 4), ("bf16", 2), ("int8", 17 / 16)])
def test_small_moments_are_priced_by_their_bytes(dtype: str, moment: float) -> None:
    model = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 8, "n_head": 16}
    options: dict[str, Any] = {"hardware": "rtx-4090", "stage": 2, "gradients": "host"}
    options |= {"device_fraction": 0.0, "moment_dtype": dtype, "checkpointing": False}
    cases: list[tuple[str, dict[str, Any]]] = [("host", {}), ("nvme", {"nvme_cache_bytes": 0})]
    for tier, more in cases:
        found = plan(model, **options, **more, optimizer=tier, nvme_size="1TB")
        assert found.best is not None
        psi = found.load.trainable
        update = found.best.price.phases[2].seconds
        rate = found.hardware.update / found.hardware.devices
        fixed = update["host to device"] - 2 * psi / found.hardware.link_up
        wanted = (2 + 8 + 4 * moment + 2) * psi / rate
        assert update["update on the host"] - fixed == pytest.approx(wanted)
        table = found.best.footprint.table[tier]
        assert table["moments"] == pytest.approx(2 * moment * psi, rel=0.002)
        if tier == "nvme":
            kept = (4 + 2 * moment) * psi
            assert update["disk writes"] == pytest.approx(
                kept / found.hardware.nvme_write + fixed, rel=1e-6
            )


def test_more_host_memory_is_never_slower() -> None:
    before = float("inf")
    for host in ("4GB", "16GB", "64GB"):
        found = plan(
            {"model_type": "gpt2", "n_embd": 2048, "n_layer": 12, "n_head": 16},
            batch=2,
            seq=512,
            hardware="rtx-4090",
            gpu="4GB",
            host=host,
            alternatives=0,
        )
        assert found.fits
        assert found.best is not None
        assert found.best.seconds <= before * 1.001
        before = found.best.seconds


def test_a_device_with_room_keeps_part_of_the_hosts_states() -> None:
    model = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 8, "n_head": 16}
    options: dict[str, Any] = {"hardware": "rtx-4090", "batch": 1, "seq": 128, "optimizer": "host"}
    found = plan(model, **options, gpu="3GB", alternatives=0)
    plain = plan(model, **options, gpu="3GB", alternatives=0, device_fraction=0.0)
    assert found.best is not None
    assert plain.best is not None
    assert found.config is not None
    fraction = found.best.choice.fraction
    assert 0 < fraction == found.config.device_fraction
    assert found.best.seconds < plain.best.seconds
    # What lies on the device does not lie on the host.
    moved = fraction * 14 * found.load.trainable
    host = plain.best.peak["host"] - found.best.peak["host"]
    assert 0.7 * moved <= host <= 1.3 * moved
    assert found.best.peak["device"] <= found.limits.device


def test_nothing_fits_is_said_with_what_would_help() -> None:
    found = plan(make_gpt(), batch=1, hardware="rtx-4090", gpu="632MB", host=1000, nvme_size=1000)
    assert not found.fits
    assert set(found.lacking) & {"device", "host", "nvme"}
    assert found.advice[0].startswith("lacking: ")
    assert len(found.advice) > 1


def test_pinned_choices_are_kept() -> None:
    found = plan(
        make_gpt(),
        hardware="dgx-2",
        stage=1,
        optimizer="host",
        nonfinite="raise",
        checkpointing=False,
    )
    assert found.config is not None
    assert (found.config.stage, found.config.optimizer, found.config.nonfinite) == (
        1,
        "host",
        "raise",
    )
    assert isinstance(found.config, ZeroConfig)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 1, "seq": -5}, "seq=-5"),
        ({"gpu": "-3GiB"}, "gpu='-3GiB'"),
        ({"host": -1}, "host=-1"),
        ({"hardware": "no-such-machine"}, "neither a file nor one of"),
        ({"hardware": "dgx-2", "world": 20}, "does not fill machines of 16"),
        ({"stage": 2, "params": "host"}, "needs stage=3"),
        ({"stage": 7}, "stage=7"),
        ({"stagee": 1}, "did you mean 'stage'"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"nvme": "/no/such/folder", "hardware": None}, "is not a folder"),
        ({"checkpointing": "yes"}, "must be True or False"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(TinyMLP(), **{"hardware": "rtx-4090", **options})


def test_inputs_give_operations_and_activations_of_any_module() -> None:
    features = torch.zeros(64, 7)
    found = plan(TinyMLP(), batch=64, hardware="rtx-4090", inputs=features)
    activity = found.load.activity
    assert activity.forward_flops == 2 * 64 * (7 * 13 + 13 * 5)
    # The hidden layer before and after tanh, and the output, at least; nothing like the weights or more.
    assert 64 * 13 * 4 <= activity.kept <= 20 * 64 * 13 * 4
