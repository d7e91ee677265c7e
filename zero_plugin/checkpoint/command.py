"""`zero-plugin checkpoint`: look at a checkpoint, check it, export it, or make one from another system's. Needs no GPU and no training script."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from zero_plugin.checkpoint.export import Form
    from zero_plugin.cli import Say

_SOURCES = ("auto", "torch", "hf", "lightning", "deepspeed", "dcp")
_DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="show what a checkpoint holds")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--all", action="store_true", help="every parameter, not the first few")
    verify = actions.add_parser("verify", help="read every file and check its sum")
    verify.add_argument("directory", type=Path)
    export = actions.add_parser("export", help="write the weights for another program")
    export.add_argument("directory", type=Path)
    export.add_argument("target", type=Path, help="a new folder (hf) or file (torch, lightning)")
    export.add_argument(
        "--to",
        choices=("hf", "torch", "lightning"),
        default="hf",
        help="hf: a folder for from_pretrained; torch: a state dict; lightning: a file for load_from_checkpoint",
    )
    take = actions.add_parser(
        "import",
        help="make a checkpoint from another system's: torch, HF, Lightning, DeepSpeed, DCP",
    )
    take.add_argument("source", type=Path, help="a file or folder")
    take.add_argument("directory", type=Path, help="the new checkpoint")
    take.add_argument(
        "--from", dest="kind", choices=_SOURCES, default="auto", help="what wrote it; auto looks"
    )
    take.add_argument("--trust", action="store_true", help="run the pickle in a DCP checkpoint")
    export.add_argument("--dtype", choices=_DTYPES, help="of the weights; as trained without it")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Do it."""
    directory: Path = arguments.directory
    if arguments.action == "inspect":
        _inspect(directory, say, everything=arguments.all)
    elif arguments.action == "verify":
        _verify(directory, say)
    elif arguments.action == "import":
        from zero_plugin.checkpoint.imports import import_checkpoint

        made = import_checkpoint(
            arguments.source, directory, kind=arguments.kind, trust=arguments.trust
        )
        say(f"{made} can be loaded by engine.load_checkpoint")
    else:
        _export(arguments, say)
    return 0


def _inspect(directory: Path, say: Say, *, everything: bool) -> None:
    from zero_plugin.checkpoint.index import Catalog

    catalog = Catalog.open(directory)
    index = catalog.index
    total = sum(item["bytes"] for item in index["files"].values())
    placement = ", ".join(f"{key} {value}" for key, value in index["placement"].items())
    say(f"{catalog.path}")
    say(f"saved        {index['saved']} by {index['written_by']}")
    say(f"ranks        {index['world_size']} ({placement})")
    say(f"files        {len(index['files'])}, {total:,} bytes")
    for number, item in enumerate(index["optimizers"]):
        say(f"optimizer {number}  {item['class']}, {_groups(item)}")
    if not index["optimizers"]:
        say("optimizer    none: weights only")
    for line in index["pending"]:
        if line["held"]:
            say(f"delayed      the update of {len(line['held'])} parameters is not shown yet")
    if isinstance(index["extra"], dict):
        say(f"extra        {', '.join(index['extra']) or 'nothing'}")
    parameters: dict[str, Any] = index["parameters"]
    elements = sum(math.prod(item["shape"]) for item in parameters.values())
    say(f"parameters   {len(parameters)}, {elements:,} elements; {len(index['buffers'])} buffers")
    say("")
    width = max((len(name) for name in parameters), default=4)
    say(f"{'name':{width}}  {'shape':>18}  {'dtype':>5}  {'step':>8}  kinds")
    shown = list(parameters.items()) if everything else list(parameters.items())[:40]
    for name, item in shown:
        kinds = [
            kind
            for kind in ("master", "weight", *_states(index))
            if f"{kind}/{name}" in index["tensors"]
        ]
        shape = "x".join(map(str, item["shape"])) or "scalar"
        say(
            f"{name:{width}}  {shape:>18}  {item['dtype']:>5}  {item.get('step', '-'):>8}  "
            + ", ".join(kind.removeprefix("state.") for kind in kinds)
        )
    if len(shown) < len(parameters):
        say(f"... {len(parameters) - len(shown)} more: --all shows them")


def _groups(optimizer: dict[str, Any]) -> str:
    groups = optimizer["groups"]
    rates = ", ".join(str(group["options"].get("lr")) for group in groups)
    return f"{len(groups)} param group{'s' if len(groups) > 1 else ''}, lr {rates}"


def _states(index: Any) -> list[str]:
    return sorted({kind for item in index["optimizers"] for kind in item["states"]})


def _verify(directory: Path, say: Say) -> None:
    from zero_plugin.checkpoint.index import Catalog
    from zero_plugin.checkpoint.loading import verify

    catalog = Catalog.open(directory)
    verify(catalog)
    for key in catalog.index["tensors"]:
        catalog.entry(*key.split("/", 1))
    say(
        f"{catalog.path}: {len(catalog.index['files'])} files and {len(catalog.index['tensors'])} tensors are whole"
    )


def _export(arguments: argparse.Namespace, say: Say) -> None:
    import torch

    from zero_plugin.checkpoint.export import export

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    files = export(
        arguments.directory,
        arguments.target,
        form=cast("Form", arguments.to),
        dtype=dtypes[arguments.dtype],
    )
    for path in files:
        say(f"{path}  {path.stat().st_size:,} bytes")
