"""The inputs of activation checkpoints go to the host in forward and come back before backward uses them: same bits, known bytes."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import gpt_batch
from support.training import assert_same_bits, engine_for, ranks, snapshot
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError
from zero_plugin.runtime.backend import HostCompute
from zero_plugin.runtime.io import Read
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Copy
from zero_plugin.runtime.threads import WorkerLane

WIDTH, ROWS = 64, 300
"""A checkpoint's input is [300, 64]: 75 KiB in fp32, above the smallest that moves."""
KINDS = ("reentrant", "non-reentrant")
pytestmark = pytest.mark.filterwarnings(
    # torch, of a reentrant checkpoint that runs without gradients.
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        for item in more:
            hidden = hidden + item
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Stack(nn.Module):
    """Blocks under checkpoints; `between` is called with each block's number and input."""

    def __init__(
        self, kind: str, layers: int = 4, *, dropout: float = 0.0, shared: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)
        self.shared = shared
        self.between: Callable[[int, Tensor], Any] = lambda *_: None

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        more = (hidden.sin(),) if self.shared else ()
        for number, block in enumerate(self.blocks):
            if self.kind == "none":
                output = block(hidden, *more)
            else:
                output = checkpoint(block, hidden, *more, use_reentrant=self.kind == "reentrant")
            self.between(number, hidden)
            hidden = output
        return self.last(hidden).square().mean()


def stack(kind: str, seed: int = 0, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(kind, **options)


def features(step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(step))


def offload(engine: ZeroEngine) -> Any:
    return engine._activations


def train(model: Any, steps: int = 4, *, rank: int = 0, **settings: Any) -> dict[str, Any]:
    """Two micro-batches a step."""
    losses: list[Tensor] = []
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            for micro in range(2):
                torch.manual_seed(2 * step + micro)
                loss = model(features(100 * rank + 2 * step + micro))
                engine.backward(loss)
                losses.append(loss.detach().clone())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return {"losses": losses, "weights": snapshot(model)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_without(kind: str, stage: int) -> None:
    options: dict[str, Any] = {"dropout": 0.2, "shared": stage % 2 == 0}
    expected = train(stack(kind, **options), stage=0, backend="inline")
    for number, backend in enumerate(("inline", "threads", "chaos")):
        params: dict[str, Any] = {"params": ("host", "device")[number % 2]} if stage == 3 else {}
        found = train(
            stack(kind, **options), stage=stage, backend=backend, activations="host", **params
        )
        assert_same_bits(found, expected, f"{backend}")


def hugging_face(kind: str, checkpoints: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=67,
                bos_token_id=0,
                eos_token_id=0,
                n_positions=16,
                n_embd=48,
                n_layer=3,
                n_head=2,
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=67,
                hidden_size=48,
                intermediate_size=56,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
    model.to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    return model


SEQUENCES, TOKENS, HIDDEN, LAYERS = 64, 12, 48, 3


def train_hugging_face(model: Any, steps: int, **settings: Any) -> dict[str, Any]:
    losses: list[float] = []
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            torch.manual_seed(step)
            tokens = gpt_batch(step, batch=SEQUENCES)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        moved = engine.ledger()
        with engine.full_params():
            return {"losses": losses, "weights": snapshot(model), "moved": moved}


@pytest.mark.parametrize(
    ("stage", "backend"), [(0, "chaos"), (1, "inline"), (2, "threads"), (3, "chaos")]
)
@pytest.mark.parametrize("checkpoints", KINDS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_have_the_same_bits(
    kind: str, checkpoints: str, stage: int, backend: str
) -> None:
    """GPT-2 with its dropout."""
    settings: dict[str, Any] = {"stage": stage, "backend": backend, "bucket_bytes": "1MiB"}
    expected = train_hugging_face(hugging_face(kind, checkpoints), 3, **settings)
    found = train_hugging_face(hugging_face(kind, checkpoints), 3, **settings, activations="host")
    for key in ("losses", "weights"):
        assert_same_bits(found[key], expected[key], key)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("checkpoints", KINDS)
def test_bytes_are_twice_two_for_each_hidden_value(checkpoints: str, stage: int) -> None:
    """2 b s h L down and as many up in a micro-step, in bf16 (ZeRO-Infinity, section 3, one block a checkpoint)."""
    steps = 2
    dtype = torch.bfloat16
    settings: dict[str, Any] = {"stage": stage, "bucket_bytes": "1MiB"}
    without = train_hugging_face(hugging_face("llama", checkpoints, dtype), steps, **settings)
    found = train_hugging_face(
        hugging_face("llama", checkpoints, dtype), steps, **settings, activations="host"
    )
    expected = 2 * SEQUENCES * TOKENS * HIDDEN * LAYERS * steps
    for key in ("device_to_host", "host_to_device"):
        assert found["moved"][key] - without["moved"][key] == expected, key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", ["host", "device"])
def test_inputs_leave_the_device_between_forward_and_backward(kind: str, tier: str) -> None:
    model, inputs = stack(kind), []
    model.between = lambda _, hidden: inputs.append(StorageWeakRef(hidden.untyped_storage()))
    with engine_for(model, activations=tier) as (engine, _):
        loss = model(features(0))
        engine.drain()
        gone = [item.expired() for item in inputs]
        assert gone == [tier == "host"] * len(model.blocks)
        engine.backward(loss)


@pytest.mark.parametrize("kind", KINDS)
def test_two_segments_are_back_at_one_time(kind: str) -> None:
    model, size = stack(kind, layers=5), ROWS * WIDTH * 4
    with engine_for(model, activations="host", backend="inline") as (engine, _):
        ahead: list[int] = []

        def note(*_: object) -> None:
            if torch._C._current_graph_task_id() != -1:
                ahead.append(engine.memory()["device"]["activations"])

        for block in model.blocks:
            block.register_forward_pre_hook(note)
        engine.backward(model(features(0)))
        # What is in use was handed over; one more is here.
        assert ahead == [size] * 4 + [0]
        assert engine.memory()["device"]["activations"] == 0


@pytest.mark.parametrize("backend", ["threads", "chaos"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_segment_before_is_on_its_way_when_one_is_used(
    kind: str, backend: str, tmp_path: Path
) -> None:
    layers = 4
    model = stack(kind, layers=layers)
    settings: dict[str, Any] = {"backend": backend, "trace": tmp_path / "trace.json"}
    with engine_for(model, activations="host", **settings) as (engine, _):
        trace: Any = engine._resources.trace
        used: list[tuple[int, list[str]]] = []

        def note(number: int) -> Callable[..., None]:
            def before(*_: object) -> None:
                if torch._C._current_graph_task_id() != -1:
                    labels = [e.label for e in trace.events() if e.phase == "issued"]
                    used.append((number, [item for item in labels if item.endswith(" in")]))

            return before

        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(note(number))
        engine.backward(model(features(0)))
        assert [number for number, _ in used] == list(reversed(range(layers)))
        for number, issued in used:
            expected = [f"checkpoint input {n} in" for n in range(layers - 1, -1, -1)]
            assert issued == expected[: layers - number + (number > 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_inputs_go_once(kind: str) -> None:
    model = stack(kind, shared=True)
    with engine_for(model, stage=0, optimizer="device", gradients="device", activations="host") as (
        engine,
        _,
    ):
        before = engine.ledger()
        engine.backward(model(features(0)))
        after = engine.ledger()
        expected = (len(model.blocks) + 1) * ROWS * WIDTH * 4
        for key in ("device_to_host", "host_to_device"):
            assert after[key] - before[key] == expected, key


def test_memory_is_used_again_and_counted() -> None:
    model = stack("non-reentrant")
    with engine_for(model, activations="host") as (engine, optimizer):
        slabs, counts = offload(engine).slabs, []
        for step in range(5):
            engine.backward(model(features(step)))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(slabs.allocations)
        assert counts == [4] * 5
        assert engine.memory()["host"]["activations"] == 4 * round_to_pages(ROWS * WIDTH * 4)


def test_memory_follows_the_largest_shape() -> None:
    model = stack("reentrant")
    with engine_for(model, activations="host") as (engine, optimizer):
        for rows in (300, 500, 280, 501, 499, 502, 300):
            engine.backward(model(features(0, rows)))
            optimizer.step()
            optimizer.zero_grad()
        assert engine.memory()["host"]["activations"] == 4 * round_to_pages(502 * WIDTH * 4)


def test_without_gradients_nothing_moves() -> None:
    model = stack("non-reentrant")
    with engine_for(model, activations="host") as (engine, _):
        before = engine.ledger()
        with torch.no_grad():
            model(features(0))
        with torch.inference_mode():
            model(features(0))
        assert engine.ledger() == before
        assert engine.memory()["host"]["activations"] == 0


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_forward_gives_the_memory_back(kind: str, stage: int) -> None:
    expected = train(stack(kind), stage=0, backend="inline", steps=1)
    model = stack(kind)

    def fail(number: int, _: Tensor) -> None:
        if number == 2:
            raise KeyError("the user's")

    with engine_for(model, stage=stage, activations="host", backend="chaos") as (engine, optimizer):
        for _ in range(3):
            model.between = fail
            with pytest.raises(KeyError, match="the user's"):
                model(features(0))
            model.between = lambda *_: None
        gc.collect()
        native: Any = torch._C
        assert native._autograd._top_saved_tensors_default_hooks(True) is None
        for micro in range(2):
            torch.manual_seed(micro)
            engine.backward(model(features(micro)))
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        assert offload(engine).slabs.allocations == 4
        with engine.full_params():
            assert_same_bits(snapshot(model), expected["weights"])


def outcome(use: Callable[[Any, Stack], Any], kind: str, **settings: Any) -> Any:
    """What `use` returns, and the weights after a step."""
    model = stack(kind, shared=True)
    with engine_for(model, **settings) as (engine, optimizer):
        returned = use(engine, model)
        optimizer.step()
        with engine.full_params():
            return returned, snapshot(model)


def twice(engine: Any, model: Stack) -> None:
    loss = model(features(0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def in_flight(engine: Any, model: Stack) -> None:
    losses = [model(features(number)) for number in range(3)]
    for number in (1, 2, 0):
        engine.backward(losses[number])


def one_is_dropped(engine: Any, model: Stack) -> None:
    losses = [model(features(number)) for number in range(3)]
    engine.backward(losses[2])
    losses[1] = None
    engine.backward(losses[0])


def evaluated_between(engine: Any, model: Stack) -> float:
    loss = model(features(0))
    with torch.no_grad():
        value = model(features(1)).item()
    engine.backward(loss)
    return value


def under_user_hooks(engine: Any, model: Stack) -> int:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(features(0))
    engine.backward(loss)
    engine.backward(model(features(1)))
    return len(packed) > 0


def with_user_hooks_inside(engine: Any, model: Stack) -> None:
    forward = model.blocks[1].forward

    def hooked(*args: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: (tensor.clone(),), lambda saved: saved[0]):
            return checkpoint(forward, *args, use_reentrant=False)

    model.blocks[1].forward = hooked
    engine.backward(model(features(0)))
    del model.blocks[1].forward


def unfinished(engine: Any, model: Stack) -> None:
    def fail(number: int, hidden: Tensor) -> None:
        if number == 2:
            hidden.register_hook(lambda _: 1 / 0)

    model.between = fail
    loss = model(features(0))
    model.between = lambda *_: None
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    del loss
    engine.backward(model(features(1)))


USES = [
    twice,
    in_flight,
    one_is_dropped,
    evaluated_between,
    under_user_hooks,
    with_user_hooks_inside,
    unfinished,
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_unusual_uses_give_the_same(use: Callable[..., Any], kind: str, stage: int) -> None:
    expected = outcome(use, kind, stage=stage)
    for backend in ("inline", "chaos"):
        found = outcome(use, kind, stage=stage, backend=backend, activations="host")
        assert_same_bits(found, expected, backend)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradient_penalties_give_the_same(stage: int) -> None:
    def penalty(engine: Any, model: Stack) -> Tensor:
        data = features(0).requires_grad_()
        loss = model(data)
        (slope,) = torch.autograd.grad(loss, data, create_graph=True)
        engine.backward(loss + slope.square().sum())
        return slope.detach()

    expected = outcome(penalty, "non-reentrant", stage=stage)
    found = outcome(penalty, "non-reentrant", stage=stage, backend="chaos", activations="host")
    assert_same_bits(found, expected)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_place_is_found(kind: str, stage: int, tier: str) -> None:
    model = stack(kind)

    def change(number: int, hidden: Tensor) -> None:
        if number == 1:
            with torch.no_grad():
                hidden.add_(1)

    model.between = change
    with engine_for(model, stage=stage, activations=tier) as (engine, _):
        loss = model(features(0))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[300, 64\]"):
            engine.backward(loss)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "middle": lambda x: x[3:-3, 5:-7],
    "every second": lambda x: x[:, ::2],
    "odd offset": lambda x: x.flatten()[1:],
    "channels last": lambda x: x.view(1, 4, -1, 100).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(300, -1),
    "sparse columns": lambda x: x[:, ::8],
    "double": lambda x: x.double(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_views_come_back_as_they_were(kind: str, shape: str) -> None:
    model = nn.Sequential(nn.Linear(7, 200), nn.Identity())
    seen: list[tuple[Any, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        place = tensor.data_ptr() % 64
        seen.append((tensor.stride(), tensor.shape, place, tensor.detach().clone()))
        return tensor.square().mean()

    with engine_for(model, activations="host") as (engine, _):
        with offload(engine).context():
            hidden = SHAPES[shape](model(features(0, 300)) + 0.5)
            loss = checkpoint(note, hidden, use_reentrant=kind == "reentrant")
        del hidden
        before = engine.ledger()["host_to_device"]
        engine.backward(loss)
        moved = engine.ledger()["host_to_device"] - before
    (*first, values), (*second, again) = seen
    assert first == second
    assert torch.equal(values, again)
    whole = 4 * 300 * 200
    assert (moved > whole // 3) == (shape not in ("expanded", "sparse columns"))


def test_weights_buffers_and_integers_stay() -> None:
    model = nn.Linear(300, 300)
    model.register_buffer("mask", torch.ones(300, 300))
    assert isinstance(model.mask, Tensor)
    with engine_for(model, stage=0, activations="host", gradients="device", optimizer="device") as (
        engine,
        _,
    ):
        before = engine.ledger()
        data, index = torch.randn(100, 300), torch.arange(300 * 300).view(300, 300)
        with offload(engine).context():
            loss = checkpoint(
                lambda x, w, mask, index: F.linear(x, w * mask + index * 0.0).sum(),
                data,
                model.weight.t(),
                model.mask.detach(),
                index,
                use_reentrant=False,
            )
        engine.backward(loss)
        moved = engine.ledger()["device_to_host"] - before["device_to_host"]
        assert moved == 4 * data.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_in_checkpoints_and_sequences(kind: str) -> None:
    reentrant = kind == "reentrant"

    class Nest(Stack):
        def forward(self, features: Tensor) -> Tensor:
            hidden = checkpoint_sequential(
                self.blocks[:2], 2, self.first(features), use_reentrant=reentrant
            )
            hidden = checkpoint(self.inner, hidden, use_reentrant=reentrant)
            return self.last(hidden).square().mean()

        def inner(self, hidden: Tensor) -> Tensor:
            for block in self.blocks[2:]:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return hidden

    def nest() -> Nest:
        torch.manual_seed(0)
        return Nest(kind)

    expected = train(nest(), stage=0, backend="inline")
    for stage in (0, 2, 3):
        found = train(nest(), stage=stage, backend="chaos", activations="host")
        assert_same_bits(found, expected, f"stage {stage}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_forward_need_not_be_called(kind: str) -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([stack(kind)])

    task = Task()
    with engine_for(task, activations="host") as (engine, _):
        loss = task.parts[0](features(0))
        assert engine.memory()["host"]["activations"] == 4 * round_to_pages(ROWS * WIDTH * 4)
        engine.backward(loss)


def test_the_limit_of_host_memory_is_named() -> None:
    model = stack("non-reentrant")
    with engine_for(model) as (engine, _):
        states = sum(engine.memory()["host"].values())
    model = stack("non-reentrant")
    room = 3 * round_to_pages(ROWS * WIDTH * 4) + round_to_pages(257 * WIDTH * 4)
    with engine_for(model, activations="host", host_limit=states + room) as (engine, optimizer):
        with pytest.raises(
            BudgetError, match=r"(?s)\[300, 64\].*host_limit.*smaller micro-batches"
        ):
            model(features(0))
        gc.collect()
        engine.backward(model(features(0, 257)))
        optimizer.step()
        assert sum(engine.memory()["host"].values()) <= states + room


def test_a_graph_outlives_its_engine() -> None:
    model = stack("non-reentrant")
    expected = torch.autograd.grad(model(features(0)), model.first.weight)
    with engine_for(model, backend="chaos", activations="host"):
        loss = model(features(0))
    assert_same_bits(torch.autograd.grad(loss, model.first.weight), expected)
    assert not model._forward_pre_hooks


def test_a_setting_without_effect_is_said_once() -> None:
    model = stack("none")
    with engine_for(model, activations="host") as (engine, optimizer):
        engine.backward(model(features(0)))
        with pytest.warns(UserWarning, match="no activation checkpoint was seen"):
            optimizer.step()
        optimizer.zero_grad()
        engine.backward(model(features(0)))
        optimizer.step()
    model = stack("reentrant")
    with engine_for(model, activations="host") as (engine, optimizer):
        engine.backward(model(features(0, rows=10)))
        with pytest.warns(UserWarning, match="smaller than 65,536 bytes"):
            optimizer.step()


def without_the_wait_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = HostCompute.follow

    def careless(self: HostCompute, ticket: Any) -> None:
        if ticket.lane != "activations in":
            follow(self, ticket)

    monkeypatch.setattr(HostCompute, "follow", careless)


def without_the_order_of_the_copies(
    monkeypatch: pytest.MonkeyPatch, lane: str = "activations in"
) -> None:
    submit = WorkerLane.submit

    def careless(self: WorkerLane, operation: Any, *, after: Any = (), leases: Any = ()) -> Any:
        after = () if self.name == lane else after
        return submit(self, operation, after=after, leases=leases)

    monkeypatch.setattr(WorkerLane, "submit", careless)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "careless", [None, without_the_wait_before_use, without_the_order_of_the_copies]
)
def test_a_missing_wait_is_caught(
    careless: Callable[..., None] | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if careless is not None:
        careless(monkeypatch)
    wrong = 0
    for seed in range(6):
        model = stack(kind, layers=2)
        settings: dict[str, Any] = {"backend": "chaos", "backend_seed": seed}
        with engine_for(model, stage=0, activations="host", **settings) as (engine, _):
            engine.backward(model(features(0)))
            wrong += not torch.isfinite(engine.clip_grad_norm_(1.0)).item()
    assert (wrong > 0) == (careless is not None)


@pytest.mark.parametrize("lane", ["activations nvme", "activations in", ""])
def test_a_missing_wait_for_a_file_is_caught(
    lane: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a write for its copy, of a copy back for its read; what is waited for is slow."""
    copy, read = Copy.run, Read.run

    def slow_copy(self: Copy, kernels: Any) -> None:
        time.sleep(0.02 if self.label.endswith(" out") else 0.0)
        copy(self, kernels)

    def slow_read(self: Read, kernels: Any) -> None:
        time.sleep(0.02)
        read(self, kernels)

    monkeypatch.setattr(Copy, "run", slow_copy)
    monkeypatch.setattr(Read, "run", slow_read)
    without_the_order_of_the_copies(monkeypatch, lane)
    norms: list[float] = []
    for seed in range(2):
        model = stack("reentrant", layers=4)
        settings: dict[str, Any] = {"backend": "chaos", "backend_seed": seed, "nvme_path": tmp_path}
        with engine_for(model, stage=0, activations="nvme", **settings) as (engine, _):
            engine.backward(model(features(0)))
            norms.append(engine.clip_grad_norm_(1.0).item())
    assert any(math.isnan(norm) for norm in norms) == bool(lane)


def rank_outcome(rank: int, size: int, kind: str, settings: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    return train(stack(kind, dropout=0.1), 2, rank=rank, **settings)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_same_bits(kind: str, stage: int) -> None:
    expected = ranks(2, rank_outcome, kind, {"stage": stage})
    found = ranks(2, rank_outcome, kind, {"stage": stage, "activations": "host"})
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_files_give_the_same_bits(kind: str, stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dropout": 0.2, "layers": 6, "shared": True}
    expected = train(stack(kind, **options), stage=0, backend="inline")
    settings: dict[str, Any] = {"activations": "nvme", "nvme_path": tmp_path, "nvme_checksum": True}
    for backend in ("inline", "threads", "chaos"):
        found = train(stack(kind, **options), stage=stage, backend=backend, **settings)
        assert_same_bits(found, expected, backend)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_unusual_uses_of_files(use: Callable[..., Any], tmp_path: Path) -> None:
    expected = outcome(use, "reentrant")
    found = outcome(use, "reentrant", backend="chaos", activations="nvme", nvme_path=tmp_path)
    assert_same_bits(found, expected)


def test_files_take_the_bytes_and_the_host_three_slabs(tmp_path: Path) -> None:
    model, size = stack("reentrant", layers=6), round_to_pages(ROWS * WIDTH * 4)
    with engine_for(model, activations="nvme", nvme_path=tmp_path) as (engine, optimizer):
        for step in range(1, 4):
            engine.backward(model(features(step)))
            optimizer.step()
            optimizer.zero_grad()
            moved, memory = engine.ledger(), engine.memory()
            assert moved["nvme_write"] == moved["nvme_read"] == 6 * step * size
            assert memory["host"]["activations"] == 3 * size
            assert 6 * size <= memory["nvme"]["activations"] <= 1.25 * 6 * size


def test_the_limit_of_files_is_named(tmp_path: Path) -> None:
    model = stack("non-reentrant")
    settings: dict[str, Any] = {"activations": "nvme", "nvme_path": tmp_path}
    with engine_for(model, **settings, nvme_limit=3 * round_to_pages(ROWS * WIDTH * 4)) as (
        engine,
        _,
    ):
        with pytest.raises(BudgetError, match="nvme_limit"):
            model(features(0))
        gc.collect()
        small = model(features(0, rows=10))
        engine.backward(small)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_outside_of_any_module(kind: str) -> None:
    block = Block(0.0)
    inputs = torch.ones(ROWS, WIDTH, requires_grad=True)
    for inside in (False, True):
        with engine_for(block, activations="host") as (engine, _):
            around = engine.forward_context() if inside else contextlib.nullcontext()
            with around:
                hidden = checkpoint(block, inputs * 1.0, use_reentrant=kind == "reentrant")
            moved = engine.memory()["host"]["activations"]
            engine.backward(hidden.square().mean())
        assert moved == (round_to_pages(ROWS * WIDTH * 4) if inside else 0)
    with engine_for(Block(0.0)) as (engine, _), engine.forward_context():
        pass
