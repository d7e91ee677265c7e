"""Layer-first accumulation: the bits of micro-batches run one after another, for the parameter traffic of one of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import BranchMLP, TinyMLP, features, gpt_batch, make, make_gpt, mlp_loss
from support.training import adamw, assert_same_bits, engine_for, exact_sgd, ranks, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_plugin.errors import ConfigError, EngineStateError, ParameterError

HOST: dict[str, Any] = {"stage": 3, "params": "host"}


class Checkpointed(nn.Module):
    """Blocks under activation checkpoints, root parameters, a tied head, a frozen weight and one that is never used."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.ones(7))
        self.frozen = nn.Parameter(torch.full((7,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.inlet = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)
        )
        self.head = nn.Linear(7, 7)
        self.head.weight = self.inlet.weight

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inlet(hidden * self.scale)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        # The weight of another module, outside of it.
        return F.linear(self.head(hidden) * self.frozen, self.inlet.weight) * self.scale


def gpt_loss(model: Any, number: int, rank: int) -> Tensor:
    return model(gpt_batch(number, rank=rank))


def square_loss(model: Any, number: int, rank: int) -> Tensor:
    return model(features(number, rank=rank)).square().mean()


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (lambda: make_gpt(width=12), gpt_loss),
    "gpt in bf16": (lambda: make_gpt(torch.bfloat16, width=12), gpt_loss),
    "checkpointed": (lambda: make(Checkpointed), square_loss),
}


def trained(
    kind: str,
    count: int,
    settings: dict[str, Any],
    *,
    together: bool,
    rank: int = 0,
    steps: int = 2,
    model: Any = None,
) -> dict[str, Any]:
    """Losses, gradients, weights and states after some steps of `count` micro-batches."""
    factory, loss_of = MODELS[kind]
    model = factory() if model is None else model
    found: dict[str, Any] = {"losses": [], "grads": [], "norms": []}
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            numbers = range(step * count, (step + 1) * count)
            if together:
                found["losses"] += engine.layer_first(
                    lambda number: loss_of(model, number, rank) / count, numbers
                )
            else:
                for number in numbers:
                    loss = loss_of(model, number, rank) / count
                    engine.backward(loss)
                    found["losses"].append(loss.detach())
            found["norms"].append(engine.clip_grad_norm_(0.5))
            with engine.full_grads():
                found["grads"].append(
                    {
                        name: None if p.grad is None else p.grad.clone()
                        for name, p in model.named_parameters()
                    }
                )
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            found["weights"] = snapshot(model)
        found["state"] = optimizer.state_dict()
    assert len(found["losses"]) == steps * count
    return found


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("gpt", 1),
        ("gpt", 2),
        ("gpt", 4),
        ("gpt in bf16", 3),
        ("checkpointed", 2),
        ("checkpointed", 4),
    ],
)
def test_one_process_has_the_bits_of_one_after_another(
    kind: str, count: int, tmp_path: Path
) -> None:
    expected = trained(kind, count, HOST, together=False)
    nvme = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "nvme_path": str(tmp_path)}
    for settings in (
        {"backend": "chaos", "prefetch_units": 0},
        {"backend": "threads", "bucket_bytes": 256, "prefetch_units": 2},
        {"debug_poison": True, "persist_below": 20, "gradients": "device"},
        {"stage": 3, **nvme},
    ):
        found = trained(kind, count, {**HOST, **settings}, together=True)
        assert_same_bits(found, expected, f"{settings}: ")
    assert own_threads() == []


def rank_trained(rank: int, size: int, kind: str, count: int, runs: list[Any]) -> list[Any]:
    return [
        trained(kind, count, settings, together=together, rank=rank) for together, settings in runs
    ]


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "count"), [("gpt", 2), ("checkpointed", 4), ("gpt in bf16", 3)])
def test_several_ranks_have_the_bits_of_one_after_another(kind: str, count: int) -> None:
    runs = [
        (False, HOST),
        (True, {**HOST, "bucket_bytes": 256, "backend": "threads"}),
        (True, {"stage": 3, "params": "device", "backend": "chaos", "prefetch_units": 2}),
    ]
    for expected, *others in ranks(2, rank_trained, kind, count, runs):
        for found in others:
            assert_same_bits(found, expected)


LEARNING = 3


def moved(count: int, *, together: bool, rank: int = 0, kind: str = "gpt") -> dict[str, int]:
    """Bytes of one step, once the order of units is known."""
    factory, loss_of = MODELS[kind]
    model = factory()
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    with engine_for(model, **HOST) as (engine, optimizer):
        for step in range(LEARNING + 1):
            engine.drain()
            before = engine.ledger()
            if together:
                engine.layer_first(lambda n: loss_of(model, n, rank), range(count))
            else:
                for number in range(count):
                    engine.backward(loss_of(model, number, rank))
            engine.drain()
            after = engine.ledger()
            if step < LEARNING:
                optimizer.step()
            optimizer.zero_grad()
    return {key: after[key] - before[key] for key in after}


@pytest.mark.parametrize("kind", ["gpt", "checkpointed"])
def test_parameter_traffic_is_that_of_one_micro_batch(kind: str) -> None:
    one = moved(1, together=False, kind=kind)
    assert one["host_to_device"] > 0
    for count in (2, 4):
        together = moved(count, together=True, kind=kind)
        assert together["host_to_device"] == one["host_to_device"]
        # A single rank adds the gradients up before they leave the device.
        assert together["device_to_host"] == one["device_to_host"]
        apart = moved(count, together=False, kind=kind)
        assert apart["host_to_device"] == count * one["host_to_device"]
        assert apart["device_to_host"] == count * one["device_to_host"]


class Uneven(nn.Module):
    """Makes more autograd nodes in each layer for some inputs than for others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))

    def forward(self, hidden: Tensor) -> Tensor:
        longer = 30 if hidden[0, 0] > 0 else 0
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            for _ in range(longer):
                hidden = hidden * 1.0
        return hidden


def test_graphs_of_other_lengths_go_backward_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without common numbers of autograd's nodes one micro-batch is units ahead of the other, and units come twice."""
    monkeypatch.setitem(MODELS, "uneven", (lambda: make(Uneven), square_loss))
    signs = [bool(features(number)[0, 0] > 0) for number in range(4)]
    assert True in signs
    assert False in signs
    one = moved(1, together=False, kind="uneven")
    assert moved(4, together=True, kind="uneven")["host_to_device"] == one["host_to_device"]


def rank_moved(rank: int, size: int) -> Any:
    return [
        moved(count, together=together, rank=rank)
        for count, together in ((1, False), (3, True), (3, False))
    ]


@pytest.mark.dist
def test_gathers_of_several_ranks_are_those_of_one_micro_batch() -> None:
    for one, together, apart in ranks(2, rank_moved):
        for key in ("all_gather", "host_to_device"):
            assert together[key] == one[key] > 0
            assert apart[key] == 3 * one[key]
        # Each micro-batch is reduced by itself, so that the sum has the same bits.
        assert together["reduce_scatter"] == apart["reduce_scatter"] == 3 * one["reduce_scatter"]


def test_full_weights_are_no_more_at_once_than_with_one_micro_batch() -> None:
    peaks: list[int] = []
    for count in (1, 4):
        model = make_gpt(width=12, layers=5)
        with engine_for(model, **HOST, prefetch_units=1) as (engine, optimizer):
            gatherer = gatherer_of(engine)
            for _ in range(3):
                gatherer.forget_peak()
                engine.layer_first(lambda n, model=model: gpt_loss(model, n, 0), range(count))
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(gatherer.peak_bytes)
            assert gatherer.gathered_bytes == 0
    assert peaks[0] == peaks[1] > 0


def test_reentrant_checkpoints_have_the_same_bits() -> None:
    model = make(lambda: Checkpointed(reentrant=True))
    expected = trained("checkpointed", 3, HOST, together=False, model=model)
    model = make(lambda: Checkpointed(reentrant=True))
    found = trained("checkpointed", 3, HOST, together=True, model=model)
    assert_same_bits(found, expected)


def test_each_micro_batch_draws_its_own_random_numbers() -> None:
    """The first goes on with the default generator; each other one begins at a seed drawn from it."""

    def build() -> Any:
        return make(
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5)) for _ in range(3))
            )
        )

    outcomes: list[Any] = []
    for together in (True, False):
        model = build()
        with engine_for(model, **HOST) as (engine, optimizer):
            torch.manual_seed(5)
            losses: list[Tensor] = []
            for _ in range(2):
                if together:
                    losses += engine.layer_first(lambda n: square_loss(model, n, 0), range(3))  # noqa: B023 - called at once
                else:
                    seeds = torch.randint(2**63 - 1, (2,)).tolist()
                    after: Any = None
                    for number in range(3):
                        if number:
                            torch.manual_seed(seeds[number - 1])
                        loss = square_loss(model, number, 0)
                        engine.backward(loss)
                        losses.append(loss.detach())
                        after = torch.get_rng_state() if number == 0 else after
                    torch.set_rng_state(after)
                optimizer.step()
                optimizer.zero_grad()
            with engine.full_params():
                outcomes.append((losses, snapshot(model), torch.rand(3)))
    assert_same_bits(outcomes[0], outcomes[1])


class Fragile(TinyMLP):
    """Fails in the middle of a forward whose inputs are large."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(features))
        if features.max() > 100:
            raise FloatingPointError("too large")
        return self.second(hidden)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_forward_that_fails_ends_all_and_training_goes_on(position: int) -> None:
    outcomes: list[Any] = []
    for fails in (True, False):
        model = make(Fragile)
        with engine_for(model, exact_sgd(model.parameters()), **HOST) as (engine, optimizer):
            gatherer = gatherer_of(engine)
            for step in range(3):
                if fails and step == 1:
                    batches = [features(number) for number in range(3)]
                    batches[position][0, 0] = 1000.0
                    with pytest.raises(FloatingPointError, match="too large"):
                        engine.layer_first(lambda batch: model(batch).square().mean(), batches)  # noqa: B023
                    assert own_threads() == []
                    assert gatherer.gathered_bytes == 0
                    assert not any(unit.holds for unit in gatherer.units)
                    assert not any(p.grad is not None for p in model.parameters())
                engine.layer_first(lambda n: mlp_loss(model, n), range(3))  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()
            with engine.full_params():
                outcomes.append(snapshot(model))
    assert_same_bits(outcomes[0], outcomes[1])


def test_a_backward_that_fails_drops_the_gradients_and_training_goes_on() -> None:
    model = make(TinyMLP)
    with engine_for(model, **HOST) as (engine, optimizer):

        def fail(grad: Tensor) -> Tensor:
            raise FloatingPointError("in backward")

        def loss_of(number: int) -> Tensor:
            loss = mlp_loss(model, number)
            if number == 1:
                loss.register_hook(fail)
            return loss

        with pytest.raises(FloatingPointError, match="in backward"):
            engine.layer_first(loss_of, range(3))
        assert not any(member.leaves for member in engine._roster.members)
        assert gatherer_of(engine).gathered_bytes == 0
        engine.layer_first(lambda number: mlp_loss(model, number), range(3))
        optimizer.step()


def test_micro_batches_in_other_units_are_an_error_that_names_both() -> None:
    model = make(BranchMLP)
    with engine_for(model, **HOST) as (engine, optimizer):
        for choices, named in (
            ([(0,), (0,), (2,)], ("experts.2", "experts.0", "micro-batch 2")),
            ([(0, 1), (0,)], ("its end", "experts.1", "micro-batch 1")),
            ([(0,), (0, 1)], ("experts.1", "its end", "micro-batch 1")),
        ):
            with pytest.raises(EngineStateError, match="same units") as raised:
                engine.layer_first(lambda chosen: mlp_loss(model, 0, *chosen), choices)
            assert all(text in str(raised.value) for text in named)
            assert not any(p.grad is not None for p in model.parameters())
            assert own_threads() == []
        engine.layer_first(lambda chosen: mlp_loss(model, 0, *chosen), [(0,), (0,)])
        optimizer.step()


def test_on_top_of_gradients_of_an_earlier_backward() -> None:
    outcomes: list[Any] = []
    for together in (True, False):
        model = make_gpt(torch.bfloat16, width=12)
        with engine_for(model, **HOST) as (engine, optimizer):
            engine.backward(gpt_loss(model, 9, 0))
            if together:
                engine.layer_first(lambda n: gpt_loss(model, n, 0), range(3))  # noqa: B023
            else:
                for number in range(3):
                    engine.backward(gpt_loss(model, number, 0))
            optimizer.step()
            with engine.full_params():
                outcomes.append(snapshot(model))
    assert_same_bits(outcomes[0], outcomes[1])


def test_what_a_user_keeps_of_a_graph_holds_no_weights() -> None:
    model = make(TinyMLP)
    kept: list[Tensor] = []

    def loss_of(number: int) -> Tensor:
        kept.append(model(features(number)))
        return kept[-1].square().mean()

    with engine_for(model, **HOST, debug_poison=False) as (engine, optimizer):
        storages = [p.untyped_storage()._cdata for p in _plain(model)]
        engine.layer_first(loss_of, range(2))
        optimizer.step()
        optimizer.zero_grad()
        assert [p.untyped_storage()._cdata for p in _plain(model)] == storages
        assert all(p.untyped_storage().nbytes() == 0 for p in _plain(model))
        assert all(output.grad_fn is not None for output in kept)


def gatherer_of(engine: Any) -> Any:
    return engine._sharded.gatherer


def own_threads() -> list[str]:
    """The threads of micro-batches; lanes have theirs."""
    return [item.name for item in threading.enumerate() if item.name.startswith("micro-batch")]


def _plain(model: nn.Module) -> list[Any]:
    """The parameters, to be asked for their memory although they are released."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.data for parameter in model.parameters()]


def test_autocast_and_saved_tensor_hooks_reach_the_forwards() -> None:
    model = make(TinyMLP)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def loss_of(number: int) -> Tensor:
        output = model(features(number))
        assert output.dtype == torch.bfloat16
        return output.float().square().mean()

    with (
        engine_for(model, **HOST) as (engine, _),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        engine.layer_first(loss_of, range(2))
    assert packed


def test_where_it_is_refused() -> None:
    model = make(TinyMLP)
    for settings, text in (({"stage": 2}, "stage=3"), ({"stage": 3}, "params='device'")):
        with engine_for(model, **settings) as (engine, _), pytest.raises(ConfigError, match=text):
            engine.layer_first(lambda n: mlp_loss(model, n), range(2))
    with engine_for(model, **HOST) as (engine, _):
        with pytest.raises(EngineStateError, match="at least one"):
            engine.layer_first(lambda n: mlp_loss(model, n), [])
        with torch.no_grad(), pytest.raises(EngineStateError, match="no_grad"):
            engine.layer_first(lambda n: mlp_loss(model, n), range(2))
        handle = model.first.weight.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(EngineStateError, match=r"first\.weight.*post-accumulate"):
            engine.layer_first(lambda n: mlp_loss(model, n), range(2))
        handle.remove()
        assert not any(member.leaves for member in engine._roster.members)


def test_a_write_to_a_weight_is_seen() -> None:
    model = make(TinyMLP)

    def write(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)  # pyright: ignore[reportCallIssue]

    with engine_for(model, **HOST) as (engine, _):
        model.first.register_forward_pre_hook(write)
        with pytest.raises(ParameterError, match=r"first\.weight.* was written to"):
            engine.layer_first(lambda number: mlp_loss(model, number), range(2))
        assert gatherer_of(engine).gathered_bytes == 0


def rank_ragged(rank: int, size: int) -> Any:
    """One micro-batch more on rank 0, together and one after another."""
    found = []
    for together in (True, False):
        model = make_gpt(width=12)
        with engine_for(model, **HOST, timeout_seconds=20.0) as (engine, optimizer):
            count = 3 - rank
            if together:
                engine.layer_first(lambda n: gpt_loss(model, n, rank), range(count))  # noqa: B023
            else:
                for number in range(3):
                    # Gathers are collective: the last forward runs on both ranks, and counts on one.
                    factor = 1.0 if number < count else 0.0
                    engine.backward(gpt_loss(model, number, rank) * factor)
            optimizer.step()
            with engine.full_params():
                found.append(snapshot(model))
    return found


@pytest.mark.dist
def test_ranks_may_have_other_numbers_of_micro_batches() -> None:
    for together, apart in ranks(2, rank_ragged):
        assert_same_bits(together, apart)


def test_options_of_the_update_work_beside() -> None:
    for settings in (
        {"delayed_update": True, "delayed_update_warmup": 1},
        {"speculate": True},
        {"loss_scale": 64.0},
    ):
        results = [
            trained("gpt", 2, {**HOST, **settings}, together=together) for together in (True, False)
        ]
        assert_same_bits(results[0], results[1], f"{settings}: ")


def test_an_optimizer_sees_no_other_parameters() -> None:
    """The leaves are the modules' during the forwards only, and their parameters come back."""
    model = make(TinyMLP)
    own = list(model.parameters())
    with engine_for(model, adamw(model.parameters()), **HOST) as (engine, _):
        inside: list[Any] = []

        def loss_of(number: int) -> Tensor:
            inside.append(list(model.parameters()))
            return mlp_loss(model, number)

        engine.layer_first(loss_of, range(2))
        assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
    assert all(a is not b for a, b in zip(inside[0], inside[1], strict=True))
