"""Peak host memory of `from_pretrained` into shards: a Llama of 500 million random parameters, safetensors, ranks of one machine.

    python benchmarks/load_pretrained.py [--ranks 2] [--dtype bf16] [--layers 36]

Writes the checkpoint to a temporary folder (or `--folder`), starts the ranks with torchrun, and prints for each the most memory that was
resident beyond what it had before, its shard, and the same of the stock loader. Two numbers: anonymous memory, which is the process's
own, and all resident memory with the pages of the mapped files, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

MIB = 1 << 20
BOUND = 200 * MIB


class Sampler:
    """The most that some lines of /proc/self/status show, every millisecond."""

    def __init__(self) -> None:
        self._names = ("RssAnon", "VmRSS")
        self._before = self._now()
        self._most = dict(self._before)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return {
            name: next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
            for name in self._names
        }

    def _note(self) -> None:
        for name, value in self._now().items():
            self._most[name] = max(self._most[name], value)

    def _run(self) -> None:
        while not self._ends.wait(0.001):
            self._note()

    def stop(self) -> dict[str, int]:
        """Bytes beyond those at the start."""
        self._ends.set()
        self._thread.join()
        self._note()
        return {name: self._most[name] - self._before[name] for name in self._names}


def load(folder: str, dtype: str, *, ours: bool) -> None:
    """One rank."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

    torch.set_num_threads(1)
    plugin: dict[str, Any] = (
        {"zero_plugin": ZeroOffloadPlugin(stage=3, params="host")} if ours else {}
    )
    accelerator = Accelerator(cpu=True, **plugin)
    with torch.device("meta"):
        LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1))
    sampler = Sampler()
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    )
    found = sampler.stop()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    share = accelerator.num_processes if ours else 1
    print(
        json.dumps(
            {
                "rank": accelerator.process_index,
                "weights": whole,
                "shard": -(-whole // share),
                **found,
            }
        ),
        flush=True,
    )
    accelerator.end_training()


def write(folder: Path, layers: int) -> None:
    """A checkpoint of bf16 weights in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="300MB")


def main() -> int:
    """Write, load on both sides, print."""
    parser = argparse.ArgumentParser(description="Peak host memory of from_pretrained into shards")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here")
    parser.add_argument("--load", choices=("ours", "stock"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(str(options.folder), options.dtype, ours=options.load == "ours")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            write(folder, options.layers)
        worst = 0
        for side in ("stock", "ours"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={options.ranks}", __file__, "--load", side]
            command += ["--folder", str(folder), "--dtype", options.dtype]
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            )
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    over = row["RssAnon"] - row["shard"]
                    worst = max(worst, over) if side == "ours" else worst
                    print(
                        f"{side} rank {row['rank']}: weights {row['weights'] / MIB:.0f} MiB, shard {row['shard'] / MIB:.0f}, peak "
                        f"anonymous {row['RssAnon'] / MIB:.0f} (shard {over / MIB:+.0f}), with file pages {row['VmRSS'] / MIB:.0f}"
                    )
    print(f"most beyond the shard: {worst / MIB:.0f} MiB, bound {BOUND // MIB}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
