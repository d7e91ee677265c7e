"""Models from configs: the same names and shapes as transformers builds, tied where they are, without a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_plugin.errors import ConfigError
from zero_plugin.planner import models
from zero_plugin.sharding.units import plan_units

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "tie_word_embeddings": True, "head_dim": 32},
    {"model_type": "mistral", **SMALL},
    {"model_type": "qwen2", **SMALL},
    {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 90},
]


def described(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((name, tuple(p.shape)) for name, p in model.named_parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_the_quick_build_is_what_transformers_builds(config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    ours = models.load(config)
    known = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(known)
    assert described(ours.model) == described(theirs)
    mine, other = (plan_units(model, persist_below=0) for model in (ours.model, theirs))
    assert [unit.name for unit in mine.units] == [unit.name for unit in other.units]
    assert {p.device.type for p in ours.model.parameters()} == {"meta"}
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}


def test_other_families_are_built_by_transformers() -> None:
    pytest.importorskip("transformers", reason="the family is built by it")
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    found = models.load({**config, "intermediate_size": 64, "architectures": ["BertForMaskedLM"]})
    assert type(found.model).__name__ == "BertForMaskedLM"
    assert found.shape is not None
    assert (found.shape.layers, found.shape.hidden, found.shape.inner) == (1, 32, 64)


def test_a_folder_is_read_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0]))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    assert described(models.load(tmp_path).model) == described(models.load(CONFIGS[0]).model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a model's config"),
        ("[1]", "it holds a list"),
        ("{}", "no 'model_type'"),
        ('{"model_type": "llama"}', "lacks hidden_size"),
        (json.dumps({**CONFIGS[0], "hidden_size": 63}), "is no multiple of 4 heads"),
        (json.dumps({**CONFIGS[0], "num_hidden_layers": -2}), "below 1"),
        ('{"model_type": "no-such-family"}', "cannot build a model of type 'no-such-family'"),
    ],
)
def test_a_bad_config_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        models.load(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        models.load(tmp_path)
