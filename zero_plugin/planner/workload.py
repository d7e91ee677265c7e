"""What one micro-batch of a model costs on one rank: operations and activation bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_plugin.errors import ConfigError

_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim"),
    "vocabulary": ("vocab_size",),
}
"""Under which keys the configs of Hugging Face keep each number."""

_GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A transformer's sizes.

    Attributes:
        layers: number of blocks.
        hidden: width.
        heads: attention heads.
        inner: width of the feed-forward network.
        vocabulary: rows of the embedding and of the output; 0 for neither.
        gated: whether the feed-forward network has a gate (three matrices).
        tied: whether the output reads the embedding's weights.
    """

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    gated: bool
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape | None:
        """The shape that a Hugging Face config describes, or None where it is no plain transformer."""
        # Vision and text models in one keep the text's numbers one level down.
        inner = config.get("text_config")
        if isinstance(inner, Mapping):
            config = {**config, **inner}
        found: dict[str, int] = {}
        for name, keys in _NAMES.items():
            value = next((config[key] for key in keys if config.get(key)), None)
            if isinstance(value, int):
                found[name] = value
        if not {"layers", "hidden", "heads"} <= found.keys():
            return None
        return cls(
            layers=found["layers"],
            hidden=found["hidden"],
            heads=found["heads"],
            inner=found.get("inner", 4 * found["hidden"]),
            vocabulary=found.get("vocabulary", 0),
            gated=config.get("model_type") in _GATED,
            tied=bool(config.get("tie_word_embeddings", True)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One micro-batch on one rank.

    Attributes:
        tokens: of a micro-batch; samples where there are no tokens.
        forward_flops: operations of a forward.
        kept: bytes that a forward keeps for the backward without checkpoints.
        checkpoints: bytes of the inputs of checkpoints, one for each unit.
        working: bytes at work between two checkpoints.
        output: bytes at the end of the forward: logits, in their dtype and in fp32.
        known: False where activations are not known and count as 0.
    """

    tokens: float
    forward_flops: float
    kept: float
    checkpoints: float
    working: float
    output: float
    known: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step is made of.

    Attributes:
        batch: samples of a micro-batch on one rank.
        sequence: tokens of a sample, or None.
        accumulate: micro-batches of a step.
    """

    batch: int
    sequence: int | None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        given = {"batch": self.batch, "seq": self.sequence, "accumulate": self.accumulate}
        for name, value in given.items():
            if name == "seq" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number above 0")


def transformer_activity(
    shape: Shape, parameters: int, batch: Batch, *, element: int, eager: bool = False
) -> Activity:
    """Operations and activations of a transformer.

    A block keeps 8 h and two or three widths of its feed-forward network for a token: 16 h for h to 4h, as in equation (5)
    of ZeRO-Infinity. The heads' term, 2 heads s, is there only where attention is not fused.

    Args:
        shape: its sizes.
        parameters: all of them.
        batch: of a rank.
        element: bytes of an activation's element.
        eager: whether attention keeps its scores.
    """
    sequence = batch.sequence or 1
    tokens = batch.batch * sequence
    table = shape.vocabulary * shape.hidden
    # A lookup costs nothing; an output does.
    multiplied = parameters if shape.tied else max(0, parameters - table)
    attention = 4 * shape.layers * tokens * sequence * shape.hidden / 2
    block = 8 * shape.hidden + (3 if shape.gated else 2) * shape.inner
    scores = 2 * shape.heads * sequence if eager else 0
    one = element * tokens * (block + scores)
    return Activity(
        tokens=tokens,
        forward_flops=2 * multiplied * tokens + attention,
        kept=one * shape.layers,
        checkpoints=element * tokens * shape.hidden * shape.layers,
        working=one,
        output=tokens * shape.vocabulary * (element + 4),
    )


def unknown_activity(parameters: int, batch: Batch) -> Activity:
    """Of a module nothing is known about but its parameters: each is used once a token."""
    tokens = batch.batch * (batch.sequence or 1)
    return Activity(
        tokens=tokens,
        forward_flops=2 * parameters * tokens,
        kept=0,
        checkpoints=0,
        working=0,
        output=0,
        known=False,
    )
