"""Models built straight into shards: plain values, bounded memory, the training of a plain model, and clear refusals."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TinyGPT, gpt_batch, make_gpt
from support.training import (
    adamw,
    assert_same_bits,
    config,
    engine_for,
    exact_sgd,
    ranks,
    snapshot,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zero_plugin
from zero_plugin.errors import ConfigError, ParameterError
from zero_plugin.sharding.guard import ReleasedParameter
from zero_plugin.sharding.init import current_build
from zero_plugin.sharding.layout import cut
from zero_plugin.sharding.precut import precut_of

SIZES = (1, 2, 3)


class Reader(nn.Module):
    """Writes and reads its own and its children's weights while it is built, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6, padding_idx=2)
        self.conv: Any = nn.Conv1d(3, 5, 3)
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(7)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.weight, std=0.3)
        self.first.bias.data.normal_()
        with torch.no_grad():
            self.second.weight[1:3] = 0.25
            self.second.weight[0].mul_(2.0)
            self.conv.weight += self.conv.bias.view(-1, 1, 1)
        view = self.table.weight.data
        nn.init.normal_(self.first.weight)
        view[4:6].fill_(3.0)
        del view
        self.second.reset_parameters()
        self.second.weight.data = self.second.weight.data * 0.5
        self.register_buffer("scale", self.first.weight.detach().abs().max())
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.alone = nn.Parameter(torch.randn(17))
        self.frozen = nn.Parameter(torch.randn(4, 5), requires_grad=False)
        self.count = nn.Parameter(torch.arange(5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.twin = nn.Linear(6, 9)
        self.twin.weight = self.first.weight
        self.copies = nn.ModuleList(copy.deepcopy(self.twin) for _ in range(2))
        self.spectral = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
        self.blocks = nn.ModuleList([nn.Linear(5, 4 + i) for i in range(3)])
        self.apply(self._reset)

    @staticmethod
    def _reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not parametrize.is_parametrized(module):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data.add_(1.0)


class Mixed(nn.Module):
    """A half model of bf16, made by conversion inside and by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(7, 11).to(torch.bfloat16)
        self.also = nn.Linear(11, 7, dtype=torch.bfloat16)
        self.high = nn.Linear(7, 5)
        self.half = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)).half()


def hugging_face(kind: str) -> Any:
    """A small Llama, or a small GPT-2 with its tied head; no dropout."""
    import transformers

    if kind == "gpt2":
        options: dict[str, Any] = {"n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 2}
        dropout: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=67, bos_token_id=0, eos_token_id=0, **options, **dropout
            )
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=67,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            pad_token_id=3,
        )
    )


def make(kind: str) -> Any:
    """The seeded model of a kind."""
    torch.manual_seed(7)
    makers: dict[str, Any] = {
        "gpt": TinyGPT,
        "reader": Reader,
        "mixed": Mixed,
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12), 3, enable_nested_tensor=False
        ),
    }
    return makers[kind]() if kind in makers else hugging_face(kind)


KINDS = ("gpt", "reader", "mixed", "encoder", "llama", "gpt2")


def stage3(**settings: Any) -> Any:
    return config(stage=3, params="host", **settings)


def built(kind: str, settings: Any) -> Any:
    with zero_plugin.init_context(settings):
        return make(kind)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Full weights and buffers of a built model, through an engine."""
    settings = stage3()
    with contextlib.closing(
        zero_plugin.ZeroEngine(model, exact_sgd(trainable(model)), settings)
    ) as engine:
        return engine.full_state_dict()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_cut(parameter: Any) -> bool:
    return precut_of(parameter) is not None


# Values ---------------------------------------------------------------------------------------------------------------


def build_and_gather(rank: int, size: int, kind: str) -> dict[str, Any]:
    del rank
    model = built(kind, stage3())
    cuttable = [p for p in model.parameters() if p.is_floating_point() and p.numel()]
    assert all(is_cut(parameter) for parameter in cuttable)
    for parameter in cuttable:
        record = precut_of(parameter)
        assert record is not None
        assert record.part.numel() == cut(parameter.numel(), size)[record.rank].numel
    after = torch.rand(3)
    return {"weights": whole(model), "after": after}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_plain_build(kind: str, size: int) -> None:
    plain = make(kind)
    expected = {"weights": snapshot(plain), "after": torch.rand(3)}
    found = ranks(size, build_and_gather, kind)
    assert_same_bits(found[0], expected)
    assert all(torch.equal(each["after"], expected["after"]) for each in found)


def build_with_other_seeds(rank: int, size: int) -> Any:
    del size
    with zero_plugin.init_context(stage3()):
        torch.manual_seed(7 + rank)
        model = TinyGPT()
        model.places.weight.data.fill_(float(rank + 1))
        model.register_buffer("mark", torch.full((3,), float(rank)))
    return whole(model)


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_wins_where_ranks_differ(size: int) -> None:
    torch.manual_seed(7)
    expected = TinyGPT()
    expected.places.weight.data.fill_(1.0)
    expected.register_buffer("mark", torch.zeros(3))
    assert_same_bits(ranks(size, build_with_other_seeds)[0], snapshot(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_identities_tying_and_flags(kind: str) -> None:
    plain, model = make(kind), built(kind, stage3())
    assert shape_of(model) == shape_of(plain)


def shape_of(model: nn.Module) -> list[Any]:
    numbers: dict[int, int] = {}
    return [
        (
            name,
            numbers.setdefault(id(item), len(numbers)),
            tuple(item.shape),
            item.dtype,
            item.requires_grad,
            item.device,
            item.numel(),
        )
        for name, item in model.named_parameters(remove_duplicate=False)
    ]


# Training -------------------------------------------------------------------------------------------------------------


def losses_of(model: Any, batch: Tensor) -> Tensor:
    if isinstance(model, TinyGPT):
        return model(batch)
    return model(input_ids=batch, labels=batch).loss


def train(rank: int, size: int, kind: str, in_shards: bool, settings: dict[str, Any]) -> Any:
    del size
    model = built(kind, stage3(**settings)) if in_shards else make(kind)
    notes: list[Any] = []
    with engine_for(model, adamw(model.parameters()), stage=3, params="host", **settings) as (
        engine,
        optimizer,
    ):
        if in_shards:
            assert all(isinstance(item, ReleasedParameter) for item in model.parameters())
        for step in range(4):
            loss = losses_of(model, gpt_batch(step, rank=rank))
            engine.backward(loss)
            notes.append(engine.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
            notes.append(loss.detach())
        weights = engine.full_state_dict()
        state = optimizer.state_dict()
    return {"notes": notes, "weights": weights, "state": state}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["gpt", "llama", "gpt2"])
def test_training_is_that_of_a_plain_model(kind: str, size: int) -> None:
    settings = {"backend": ("threads", "chaos", "inline")[size - 1], "optimizer": "host"}
    expected = ranks(size, train, kind, False, settings)
    found = ranks(size, train, kind, True, settings)
    for rank in range(size):
        assert_same_bits(found[rank], expected[rank], f"rank {rank}: ")


def test_low_precision_frozen_and_added_parameters() -> None:
    """bf16 weights with fp32 masters, a frozen layer, and an adapter that is added after the context, whole."""

    def script(model: Any) -> dict[str, Tensor]:
        model.blocks[0].up.requires_grad_(requires_grad=False)
        torch.manual_seed(1)
        model.blocks[1].adapter = nn.Linear(44, 44, dtype=torch.bfloat16)
        with engine_for(model, adamw(trainable(model)), stage=3, params="host") as (engine, _):
            for step in range(3):
                engine.backward(model(gpt_batch(step)))
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict()

    plain = make_gpt(torch.bfloat16)
    with zero_plugin.init_context(stage3()):
        model = make_gpt(torch.bfloat16)
    assert all(is_cut(item) and item.dtype == torch.bfloat16 for item in model.parameters())
    assert_same_bits(script(model), script(plain))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_optimizers_are_built_on_cut_parameters(name: str) -> None:
    def script(model: Any) -> dict[str, Tensor]:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        with engine_for(model, optimizer, stage=3, params="host") as (engine, _):
            engine.backward(model(gpt_batch(0)))
            engine.step()
            return engine.full_state_dict()

    expected = script(make("gpt"))
    model = built("gpt", stage3())
    assert_same_bits(script(model), expected)


# Inside the context -----------------------------------------------------------------------------------------------------


def test_a_conversion_of_the_whole_model_keeps_it_cut() -> None:
    with zero_plugin.init_context(stage3()):
        model = make("gpt").to(torch.bfloat16)
        assert model.norm.weight.dtype == torch.bfloat16
    assert all(is_cut(item) for item in model.parameters())
    assert_same_bits(whole(model), snapshot(make("gpt").to(torch.bfloat16)))
    after = built("gpt", stage3()).half()
    assert all(is_cut(item) for item in after.parameters())
    assert_same_bits(whole(after), snapshot(make("gpt").half()))


def test_the_default_dtype_is_heeded() -> None:
    def make_low() -> nn.Module:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return TinyGPT()
        finally:
            torch.set_default_dtype(before)

    with zero_plugin.init_context(stage3()):
        model = make_low()
    assert_same_bits(whole(model), snapshot(make_low()))


def test_meta_parameters_are_left_alone() -> None:
    with zero_plugin.init_context(stage3()), torch.device("meta"):
        model = TinyGPT()
    assert all(item.is_meta and not is_cut(item) for item in model.parameters())
    with pytest.raises(ParameterError, match="meta"):
        zero_plugin.ZeroEngine(model, adamw(model.parameters()), stage3())


def test_meta_parameters_that_get_memory_inside_are_cut() -> None:
    def fill(model: Any) -> None:
        torch.manual_seed(3)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    plain = make("gpt")
    fill(plain)
    with zero_plugin.init_context(stage3()):
        with torch.device("meta"):
            model = TinyGPT()
        model.to_empty(device="cpu")
        model.head.weight = model.tokens.weight
        fill(model)
    assert all(is_cut(item) for item in model.parameters())
    found = whole(model)
    found.pop("head.weight"), found.pop("tokens.weight")
    expected = snapshot(plain)
    assert_same_bits(found, {name: expected[name] for name in found})


def test_parameters_registered_after_init_are_cut() -> None:
    table = torch.arange(100.0)
    with zero_plugin.init_context(stage3()):
        model: Any = TinyGPT()
        model.register_parameter("late", nn.Parameter(torch.randn(33)))
        model.blocks[0].norm_1.weight = nn.Parameter(torch.full((44,), 2.0))
        model.shared = nn.Parameter(table)
        parametrize.register_parametrization(model.blocks[0].up, "weight", nn.Identity())
        del model.blocks[1].down
        model.blocks[1].down = nn.Linear(176, 44)
        table[:10] = -1.0
    for name, item in model.named_parameters():
        assert is_cut(item), name
    state = whole(model)
    assert torch.equal(state["blocks.0.norm_1.weight"], torch.full((44,), 2.0))
    assert torch.equal(state["shared"], table)
    assert "blocks.0.up.parametrizations.weight.original" in state


def test_load_state_dict_inside() -> None:
    plain = make_gpt(seed=5)
    with zero_plugin.init_context(stage3()):
        model = TinyGPT()
        model.load_state_dict(plain.state_dict())
    assert_same_bits(whole(model), snapshot(plain))


def test_lazy_modules_are_refused() -> None:
    with (
        pytest.raises(ParameterError, match=r"LazyLinear\.weight.*lazy module"),
        zero_plugin.init_context(stage3()),
    ):
        nn.LazyLinear(4)
    assert_torch_is_as_before()


def test_nested_contexts_are_one() -> None:
    settings = stage3()
    with zero_plugin.init_context(settings):
        first = nn.Linear(30, 30)
        with zero_plugin.init_context(stage3()):
            second = nn.Linear(30, 30)
        assert current_build() is not None
        third = nn.Linear(30, 30)
        with (
            pytest.raises(ConfigError, match="another config"),
            zero_plugin.init_context(stage3(prefetch_units=3)),
        ):
            pass
    assert all(is_cut(item.weight) for item in (first, second, third))
    assert_torch_is_as_before()


def test_an_exception_leaves_torch_as_it_was() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), zero_plugin.init_context(stage3()):
        Broken()
    assert_torch_is_as_before()
    with zero_plugin.init_context(stage3()):
        with contextlib.suppress(RuntimeError):
            Broken()
        model = nn.Linear(8, 8)
    assert is_cut(model.weight)
    assert_torch_is_as_before()


def assert_torch_is_as_before() -> None:
    assert current_build() is None
    assert "__init_subclass__" not in nn.Module.__dict__
    for cls in (nn.Module, nn.Linear, TinyGPT):
        assert not hasattr(cls.__init__, "__wrapped__")
    assert not hasattr(nn.Module.register_parameter, "__wrapped__")
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    model = nn.Linear(3, 3)
    assert type(model.weight) is nn.Parameter


def test_a_failed_write_changes_nothing() -> None:
    with zero_plugin.init_context(stage3()):
        model = make("gpt")
        with pytest.raises(RuntimeError), torch.no_grad():
            model.norm.weight.copy_(torch.zeros(45))
        with pytest.raises(ValueError, match="Fan in"):
            nn.init.xavier_normal_(model.norm.weight)
    assert_same_bits(whole(model), snapshot(make("gpt")))


def test_small_parameters_stay_whole() -> None:
    settings = stage3(persist_below=50)
    model = built("gpt", settings)
    for name, item in model.named_parameters():
        assert is_cut(item) == (item.numel() >= 50), name
    with pytest.raises(ConfigError, match=r"norm.*persist_below"):
        zero_plugin.ZeroEngine(*with_optimizer(built("gpt", stage3())), settings)


def with_optimizer(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, adamw(model.parameters())


# Outside the engine ------------------------------------------------------------------------------------------------------


def test_alone_a_built_model_computes_as_it_is() -> None:
    """One rank: its slice is the whole weight, so a use opens it at no cost."""
    plain, model = make("gpt"), built("gpt", stage3())
    assert torch.equal(model(gpt_batch(0)), plain(gpt_batch(0)))
    assert_same_bits(snapshot(model), snapshot(plain))
    assert_same_bits(whole(model), snapshot(plain))


def use_outside(rank: int, size: int) -> None:
    del rank, size
    model = built("gpt", stage3())
    for use in (
        lambda: model(gpt_batch(0)),
        model.state_dict,
        lambda: model.norm.weight.data,
        lambda: nn.init.zeros_(model.norm.weight),
        model.norm.weight.sum,
    ):
        with pytest.raises(ParameterError, match=r"(?s)shards over 2 ranks.*ZeroEngine"):
            use()
    assert "sharded" in repr(model.norm.weight)
    assert torch.equal(torch.zeros_like(model.norm.weight), torch.zeros(44))
    with pytest.raises(ConfigError, match=r"stage=3"):
        zero_plugin.ZeroEngine(model, adamw(model.parameters()), config(stage=2))
    assert_same_bits(whole(model), whole(built("gpt", stage3())))


def test_at_two_ranks_use_before_the_engine_is_refused() -> None:
    ranks(2, use_outside)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="stage=2"), zero_plugin.init_context(config(stage=2)):
        pass
    model = built("gpt", stage3())
    with pytest.raises(ConfigError, match="stage=3"):
        zero_plugin.ZeroEngine(model, adamw(model.parameters()))
    with zero_plugin.init_context(stage3()):
        inner = TinyGPT()
        optimizer = adamw(inner.parameters())
        with pytest.raises(ConfigError, match="after the context"):
            zero_plugin.ZeroEngine(inner, optimizer, stage3())


def built_before_the_ranks_met(rank: int, size: int) -> None:
    import torch.distributed as dist

    model = built("gpt", stage3())
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
    try:
        with pytest.raises(ConfigError, match=r"slice 0 of 1.*initialise torch\.distributed"):
            zero_plugin.ZeroEngine(model, adamw(model.parameters()), stage3())
    finally:
        dist.destroy_process_group()


def test_other_ranks_than_it_was_built_by_are_refused() -> None:
    ranks(2, built_before_the_ranks_met, store="none")


# Memory ------------------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 20
MATRIX = 4 * WIDTH * WIDTH
SLACK = 5 * 2**20
"""The allocator's, and the transport's buffers."""


class Big(nn.Module):
    """84 MB of linear layers, written to again after they are built, half of them with a read before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.apply(self._reset)

    @staticmethod
    def _reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data.mul_(0.5)

    def forward(self, features: Tensor) -> Tensor:
        features = self.first(features)
        for block in self.blocks:
            features = features + block(features)
        return features.square().mean()


def status(key: str) -> int:
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def forget_peak() -> int:
    """Start the peak anew; returns the present resident bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def warm_up() -> None:
    with zero_plugin.init_context(stage3()):
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].weight.data.mul_(0.5)
    with engine_for(model, adamw(model.parameters()), stage=3, params="host"):
        pass


def build_big(rank: int, size: int) -> dict[str, int]:
    del rank
    warm_up()
    before = forget_peak()
    with zero_plugin.init_context(stage3(bucket_bytes="4MiB")):
        model = Big()
    built_peak, kept = status("VmHWM") - before, status("VmRSS") - before
    optimizer = adamw(model.parameters())
    forget_peak()
    settings = {"stage": 3, "params": "host", "bucket_bytes": "4MiB"}
    with engine_for(model, optimizer, **settings) as (engine, _):
        engine_peak = status("VmHWM") - before
        memory = engine.memory()
        states = sum(memory[tier][kind] for tier in memory for kind in memory[tier])
        engine.backward(model(torch.ones(4, WIDTH)))
        engine.step()
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    return {
        "total": total,
        "shard": -(-total // size),
        "built_peak": built_peak,
        "kept": kept,
        "engine_peak": engine_peak,
        "states": states,
    }


@pytest.mark.parametrize("size", SIZES)
def test_peak_memory_is_a_shard_and_the_largest_submodule(size: int) -> None:
    for found in ranks(size, build_big):
        print(found)
        largest = MATRIX + 4 * WIDTH
        assert found["total"] > LAYERS * MATRIX
        assert found["kept"] <= found["shard"] + SLACK, found
        assert found["built_peak"] <= found["shard"] + largest + SLACK, found
        block = MATRIX + 4 * WIDTH
        assert found["engine_peak"] <= found["states"] + block + SLACK, found


# Checkpoints of Hugging Face ---------------------------------------------------------------------------------------------


def save(kind: str, folder: Any, **options: Any) -> Any:
    model = make(kind)
    model.save_pretrained(folder, **options)
    return model


def loaded(kind: str, folder: Any, **options: Any) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # Its monitor is a thread that stays.
    classes = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}
    return classes[kind].from_pretrained(folder, **options)


def load_and_gather(rank: int, size: int, kind: str, folder: str, options: dict[str, Any]) -> Any:
    del rank, size
    torch.manual_seed(11)
    with zero_plugin.init_context(stage3()):
        model, info = loaded(kind, folder, output_loading_info=True, **options)
    assert all(is_cut(parameter) for parameter in model.parameters())
    assert not model.training
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {"weights": whole(model), "tied": tied, "info": flat(info)}


def flat(info: dict[str, Any]) -> dict[str, list[str]]:
    return {key: sorted(map(str, value)) for key, value in info.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_from_pretrained(kind: str, size: int, max_shard_size: str, tmp_path: Any) -> None:
    save(kind, tmp_path, max_shard_size=max_shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == "10KB")
    expected, info = loaded(kind, tmp_path, output_loading_info=True)
    found = ranks(size, load_and_gather, kind, str(tmp_path), {})
    assert_same_bits(found[0]["weights"], snapshot(expected))
    assert all(each["info"] == flat(info) for each in found)
    assert all(each["tied"] == (kind == "gpt2") for each in found)


@pytest.mark.parametrize("size", [1, 2])
def test_from_pretrained_with_other_dtype_missing_and_unexpected_keys(
    size: int, tmp_path: Any
) -> None:
    from safetensors.torch import load_file, save_file

    save("llama", tmp_path)
    path = str(tmp_path / "model.safetensors")
    state = load_file(path)
    state.pop("model.layers.1.mlp.up_proj.weight")
    state["model.extra.weight"] = torch.zeros(3)
    save_file(state, path, metadata={"format": "pt"})
    torch.manual_seed(11)
    expected, info = loaded("llama", tmp_path, output_loading_info=True, dtype=torch.bfloat16)
    assert info["missing_keys"], info
    found = ranks(size, load_and_gather, "llama", str(tmp_path), {"dtype": torch.bfloat16})
    assert_same_bits(found[0]["weights"], snapshot(expected))
    assert all(each["info"] == flat(info) for each in found)


def load_big(rank: int, size: int, folder: str, dtype: Any) -> dict[str, int]:
    del rank
    import transformers

    warm_up()
    transformers.utils.logging.disable_progress_bar()
    classes = transformers.LlamaForCausalLM
    with torch.device("meta"):
        classes(transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1))
    forget_peak()
    before = status("RssAnon")
    sampler = Sampler()
    with zero_plugin.init_context(stage3()):
        model = classes.from_pretrained(folder, dtype=dtype)
    peak = sampler.stop() - before
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"total": total, "peak": peak, "shard": -(-total // size)}


class Sampler:
    """The most anonymous memory that was resident: pages of a mapped file are the system's to take back."""

    def __init__(self) -> None:
        self._most = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.0005):
            self._most = max(self._most, status("RssAnon"))

    def stop(self) -> int:
        self._ends.set()
        self._thread.join()
        return max(self._most, status("RssAnon"))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_streams(size: int, dtype: torch.dtype, tmp_path: Any) -> None:
    import transformers

    settings = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=3,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path, max_shard_size="20MB")
    for found in ranks(size, load_big, str(tmp_path), dtype):
        print(found)
        assert found["total"] >= 28 * 1024 * 1024 * dtype.itemsize
        assert found["peak"] <= found["shard"] + 2 * MATRIX + SLACK, found
