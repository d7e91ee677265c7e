"""What the Trainer's `optim=` names become: a class that runs compiled, the library's own, or a refusal with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.errors import ConfigError
from zero_plugin.optim.lion import Lion

if TYPE_CHECKING:
    from torch.optim import Optimizer

_ADAMW = ("paged_adamw_32bit",)
_LION = ("lion_32bit", "paged_lion_32bit")

_OWN_BLOCKS = (
    "keeps its states in 8 bits or fewer in kernels of its own, which cannot be cut over ranks"
)
_BNB = "runs in CUDA kernels of bitsandbytes on whole tensors, which cannot be cut over ranks"
_MATRICES = "projects whole gradient matrices, and each rank has a slice"
_IN_BACKWARD = "updates the weights inside backward from whole gradients, and each rank has a slice"
_TWO_SETS = "keeps a second set of weights and swaps them in optimizer.train() and optimizer.eval()"
_SMALL_ADAMW = "use optim='adamw_torch' with moment_dtype='int8' in the plugin"
_ADAMW_INSTEAD = "use optim='adamw_torch', whose states lie in the tier that the plugin names"

_REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "adamw_bnb_8bit",
            "adamw_8bit",
            "paged_adamw_8bit",
            "adamw_torch_8bit",
            "adamw_torch_4bit",
        ),
        (_OWN_BLOCKS, _SMALL_ADAMW),
    ),
    **dict.fromkeys(
        ("lion_8bit", "paged_lion_8bit"),
        (_OWN_BLOCKS, "use optim='lion_32bit' with moment_dtype='int8' in the plugin"),
    ),
    **dict.fromkeys(
        (
            "ademamix",
            "ademamix_8bit",
            "paged_ademamix_32bit",
            "paged_ademamix_8bit",
        ),
        (_BNB, _ADAMW_INSTEAD),
    ),
    **dict.fromkeys(
        ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), (_BNB, "use optim='rmsprop'")
    ),
    **dict.fromkeys(
        (
            "galore_adamw",
            "galore_adamw_8bit",
            "galore_adafactor",
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
            "apollo_adamw",
            "apollo_adamw_layerwise",
        ),
        (_MATRICES, _ADAMW_INSTEAD),
    ),
    **dict.fromkeys(("lomo", "adalomo"), (_IN_BACKWARD, _ADAMW_INSTEAD)),
    **dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        (_TWO_SETS, _ADAMW_INSTEAD),
    ),
}


def choose(args: Any) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """The class and its arguments where the name's own package is not what runs.

    Args:
        args: the Trainer's arguments.

    Returns:
        None where transformers' own choice stays. Whether that runs compiled, falls back or is refused, the engine says.

    Raises:
        ConfigError: what the name asks for cannot run on shards.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name in _REFUSED:
        reason, cure = _REFUSED[name]
        raise ConfigError(f"optim={name!r} {reason}: {cure}")
    shared: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
    }
    if name in _LION:
        return Lion, shared
    if name in _ADAMW:
        return torch.optim.AdamW, {**shared, "eps": args.adam_epsilon}
    return None
