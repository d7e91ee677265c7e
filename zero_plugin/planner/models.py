"""A model on the meta device from a config, a checkpoint folder or a name: no weight is read.

The commonest decoders are built here, from plain torch modules of the same names and shapes, since importing
transformers alone takes longer than a plan may. Every other architecture is built by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_plugin.errors import ConfigError
from zero_plugin.planner.workload import Shape

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model to plan for.

    Attributes:
        name: for people.
        model: on the meta device.
        shape: a transformer's sizes, or None.
    """

    name: str
    model: nn.Module
    shape: Shape | None


def load(source: str | Path | Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> Source:
    """Build a model on the meta device.

    Args:
        source: a folder with a `config.json` (a checkpoint of any size), a config file, a config as a mapping, or a name that
            transformers knows.
        dtype: of its weights.

    Raises:
        ConfigError: there is no such model, or it cannot be built.
    """
    if isinstance(source, Mapping):
        return _from_config(dict(source), str(source.get("model_type", "model")), dtype)
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_config(_read(file), path.stem or str(path), dtype)
    if path.is_dir():
        raise ConfigError(
            f"{path} has no config.json: give a Hugging Face checkpoint folder or a config file"
        )
    return _from_hub(str(source), dtype)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a model's config: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a model's config: it holds a {type(found).__name__}")
    return found


def _from_config(config: dict[str, Any], name: str, dtype: torch.dtype) -> Source:
    family = config.get("model_type")
    shape = Shape.from_config(config)
    _check(config, shape, name)
    with torch.device("meta"):
        if family in _LLAMAS and not _is_odd(config):
            model: nn.Module = _Llama(config, str(family))
        elif family == "gpt2" and not config.get("add_cross_attention"):
            model = _GPT2(config)
        else:
            model = _by_transformers(config, name)
    return Source(name=name, model=model.to(dtype), shape=shape)


def _check(config: Mapping[str, Any], shape: Shape | None, name: str) -> None:
    if "model_type" not in config:
        raise ConfigError(
            f"{name}: the config has no 'model_type', so it is no Hugging Face config"
        )
    sizes = () if shape is None else (shape.layers, shape.hidden, shape.heads, shape.inner)
    if any(value < 1 for value in sizes):
        raise ConfigError(f"{name}: a size in the config is below 1 ({shape})")
    if shape is not None and "head_dim" not in config and shape.hidden % shape.heads:
        raise ConfigError(
            f"{name}: a hidden size of {shape.hidden} is no multiple of {shape.heads} heads: the config contradicts itself"
        )


def _by_transformers(config: dict[str, Any], name: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{name}: a model of type {config.get('model_type')!r} is built by transformers, which is not installed: "
            "pip install transformers"
        ) from error
    library: Any = transformers
    family = config["model_type"]
    try:
        known = library.AutoConfig.for_model(**config)
        classes = [getattr(library, item, None) for item in config.get("architectures") or ()]
        found = next((item for item in classes if item is not None), None)
        if found is not None:
            return found(known)
        if type(known) in library.AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public question
            return library.AutoModelForCausalLM.from_config(known)
        return library.AutoModel.from_config(known)
    except Exception as error:
        raise ConfigError(
            f"{name}: transformers {library.__version__} cannot build a model of type {family!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def _from_hub(name: str, dtype: torch.dtype) -> Source:
    try:
        import transformers

        library: Any = transformers
        config = library.AutoConfig.from_pretrained(name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name!r} is neither a folder with a config.json, nor a config file, nor a name that transformers can find "
            f"({reason})"
        ) from error
    return _from_config(config.to_dict(), name, dtype)


# The commonest decoders ------------------------------------------------------------------------------------------

_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")


def _is_odd(config: Mapping[str, Any]) -> bool:
    """Options that add parameters and that nobody's published model sets: left to transformers."""
    return bool(config.get("mlp_bias") or config.get("attention_bias"))


class _Linear(nn.Module):
    """A weight and a bias without values: filling them would load half of torch, even on the meta device."""

    def __init__(self, *shape: int, bias: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        if bias:
            self.bias = nn.Parameter(torch.empty(bias))


class _LlamaAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        shared = config.get("num_key_value_heads") or heads
        bias = int(family == "qwen2")
        self.q_proj = _Linear(heads * size, hidden, bias=bias * heads * size)
        self.k_proj = _Linear(shared * size, hidden, bias=bias * shared * size)
        self.v_proj = _Linear(shared * size, hidden, bias=bias * shared * size)
        self.o_proj = _Linear(hidden, heads * size)
        if family == "qwen3":
            self.q_norm, self.k_norm = _Linear(size), _Linear(size)


class _LlamaMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _Linear(inner, hidden)
        self.up_proj = _Linear(inner, hidden)
        self.down_proj = _Linear(hidden, inner)


class _LlamaBlock(nn.Module):
    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self_attn = _LlamaAttention(config, family)
        self.mlp = _LlamaMLP(hidden, config["intermediate_size"])
        self.input_layernorm = _Linear(hidden)
        self.post_attention_layernorm = _Linear(hidden)


class _Decoder(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class _Llama(nn.Module):
    """Names and shapes of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        super().__init__()
        needed = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        absent = [key for key in (*needed, "num_hidden_layers") if not config.get(key)]
        if absent:
            raise ConfigError(f"the config of a {family} model lacks {', '.join(absent)}")
        hidden, words = config["hidden_size"], config["vocab_size"]
        embedding = _Linear(words, hidden)
        count = config["num_hidden_layers"]
        self.model = _Decoder(
            embed_tokens=embedding,
            layers=nn.ModuleList(_LlamaBlock(config, family) for _ in range(count)),
            norm=_Linear(hidden),
        )
        self.lm_head = _Linear(words, hidden)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = embedding.weight


class _GPT2Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = _Linear(hidden, bias=hidden)
        self.attn = _Decoder(
            c_attn=_Linear(hidden, 3 * hidden, bias=3 * hidden),
            c_proj=_Linear(hidden, hidden, bias=hidden),
        )
        self.ln_2 = _Linear(hidden, bias=hidden)
        self.mlp = _Decoder(
            c_fc=_Linear(hidden, inner, bias=inner), c_proj=_Linear(inner, hidden, bias=hidden)
        )


class _GPT2(nn.Module):
    """Names and shapes of GPT2LMHeadModel."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, words = config.get("n_embd", 768), config.get("vocab_size", 50257)
        inner = config.get("n_inner") or 4 * hidden
        embedding = _Linear(words, hidden)
        self.transformer = _Decoder(
            wte=embedding,
            wpe=_Linear(config.get("n_positions", 1024), hidden),
            h=nn.ModuleList(_GPT2Block(hidden, inner) for _ in range(config.get("n_layer", 12))),
            ln_f=_Linear(hidden, bias=hidden),
        )
        self.lm_head = _Linear(words, hidden)
        if config.get("tie_word_embeddings", True):
            self.lm_head.weight = embedding.weight
