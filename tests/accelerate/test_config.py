"""`accelerate config` and `accelerate launch` with our block, and their twins in our own command."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import zero_plugin
from zero_plugin import ZeroConfig, cli, errors
from zero_plugin.integrations._huggingface import launch as ours
from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.integrations._huggingface.deepspeed import translate
from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH

zero_plugin.register()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SWITCH, SETTINGS):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, **values: Any) -> Path:
    place = folder / "config.yaml"
    plain = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    place.write_text(yaml.safe_dump({**plain, "num_processes": 1, **values}))
    return place


def read(place: Path) -> Any:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(place))


def launch_command() -> Any:
    return ours.enter_commands()


def answers(monkeypatch: pytest.MonkeyPatch, *, choices: list[Any], texts: list[str]) -> None:
    """Stand in for the user: menus give numbers, fields give lines."""
    from accelerate.commands.config import cluster, config

    given, typed = iter(choices), iter(texts)

    def options(_text: str, _options: Any = (), convert: Any = None, default: int = 0) -> Any:
        number = next(given)
        return convert(number) if convert else number

    monkeypatch.setattr("builtins.input", lambda _prompt="": next(typed))
    monkeypatch.setattr(config, "_ask_options", options)
    monkeypatch.setattr(cluster, "_ask_options", options)


def ask(
    monkeypatch: pytest.MonkeyPatch, place: Path, *, choices: list[Any], texts: list[str]
) -> str:
    from accelerate.commands.config import config

    answers(monkeypatch, choices=choices, texts=texts)
    config.config_command(argparse.Namespace(config_file=str(place)))
    return place.read_text()


def stock_answers() -> tuple[list[Any], list[str]]:
    """Answers of a CPU-only machine without anything; all defaults."""
    return [0, 0, 0], ["yes", "no", "no"]


def test_config_offers_what_measurements_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices, texts = stock_answers()
    place = tmp_path / "a.yaml"
    text = ask(monkeypatch, place, choices=[*choices, 3], texts=[*texts, "yes"])
    assert yaml.safe_load(text)[BLOCK] == {"auto": True}
    assert getattr(read(place), BLOCK) == {"auto": True}


def test_config_asks_and_writes_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choices, texts = stock_answers()
    text = ask(
        monkeypatch,
        tmp_path / "a.yaml",
        choices=[*choices, 2, 1, 2, 1],
        texts=[*texts, "perhaps", "yes", "", "/fast/disk"],
    )
    assert yaml.safe_load(text)[BLOCK] == {
        "stage": 3,
        "params": "host",
        "optimizer": "nvme",
        "nvme_path": "/fast/disk",
    }
    assert getattr(read(tmp_path / "a.yaml"), BLOCK)["params"] == "host"


def test_config_without_us_writes_what_it_wrote_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices, texts = stock_answers()
    text = ask(monkeypatch, tmp_path / "a.yaml", choices=choices, texts=[*texts, ""])
    assert "zero" not in text
    assert not hasattr(read(tmp_path / "a.yaml"), BLOCK)


def test_default_and_update_carry_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from accelerate.commands.config.default import write_basic_config
    from accelerate.commands.config.update import update_config

    plain, place = tmp_path / "plain.json", tmp_path / "ours.json"
    assert write_basic_config(save_location=str(plain))
    assert BLOCK not in json.loads(plain.read_text())
    monkeypatch.setenv(SWITCH, "true")
    monkeypatch.setenv(SETTINGS, '{"stage": 1}')
    assert write_basic_config(save_location=str(place))
    assert json.loads(place.read_text())[BLOCK] == {"stage": 1}
    update_config(argparse.Namespace(config_file=str(place)))
    assert json.loads(place.read_text())[BLOCK] == {"stage": 1}
    assert write_basic_config(save_location=str(place)) is False


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({BLOCK: {"stgae": 3}}, "in zero_plugin_config: unknown setting 'stgae'"),
        ({BLOCK: [3]}, "zero_plugin_config is a list"),
        ({BLOCK: {"stage": 2, "params": "host"}}, "needs stage=3"),
        ({BLOCK: {"stage": 2}, "deepspeed_config": {"zero_stage": 2}}, "selects DeepSpeed"),
        ({BLOCK: {"stage": 2}, "distributed_type": "FSDP"}, "selects FSDP"),
    ],
)
def test_wrong_blocks_are_named(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.ConfigError, match=reason):
        read(write(tmp_path, **values))


def launched(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], command: Any
) -> tuple[dict[str, str], Any]:
    """The environment and arguments at the moment Accelerate would start the script."""
    module = launch_command()
    seen: list[Any] = []

    def simple_launcher(args: Any) -> None:
        seen.append(({name: os.environ.get(name, "") for name in (SWITCH, SETTINGS)}, args))

    monkeypatch.setattr(module, "simple_launcher", simple_launcher)
    command(arguments)
    ((variables, args),) = seen
    return variables, args


def test_launch_hands_the_block_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = launch_command()
    place = write(tmp_path, **{BLOCK: {"stage": 3, "params": "host"}})

    def stock(arguments: list[str]) -> None:
        module.launch_command(module.launch_command_parser().parse_args(arguments))

    variables, args = launched(monkeypatch, ["--config_file", str(place), "s.py", "--x"], stock)
    assert variables[SWITCH] == "true"
    assert json.loads(variables[SETTINGS]) == {"stage": 3, "params": "host"}
    assert args.training_script == "s.py"
    assert SWITCH not in os.environ

    plain = write(tmp_path)
    variables, _ = launched(monkeypatch, ["--config_file", str(plain), "s.py"], stock)
    assert variables[SWITCH] == ""

    place = write(tmp_path, **{BLOCK: {"stage": 1}})
    with pytest.raises(errors.ConfigError, match="--use_fsdp was given"):
        stock(["--config_file", str(place), "--use_fsdp", "s.py"])


def test_our_launch_runs_the_script_through_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = write(tmp_path, **{BLOCK: {"stage": 1}})

    def own(arguments: list[str]) -> None:
        assert cli.main(["launch", *arguments]) == 0

    for script in (["s.py"], ["-m", "pkg.mod"]):
        arguments = ["--config_file", str(place), *script, "--lr", "1"]
        variables, args = launched(monkeypatch, arguments, own)
        assert json.loads(variables[SETTINGS]) == {"stage": 1}
        assert args.module
        assert [args.training_script, *args.training_script_args] == [
            "zero_plugin.run",
            *script,
            "--lr",
            "1",
        ]


DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "communication_data_type": "bf16",
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000000,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 10000,
        "zero_hpz_partition_size": 8,
        "brand_new_key": 7,
    },
    "aio": {"block_size": 1048576},
    "another_new_key": {},
}


def test_deepspeed_configs_are_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, place = tmp_path / "ds.json", tmp_path / "out.yaml"
    source.write_text(json.dumps(DEEPSPEED))
    arguments = ["config", "--from-deepspeed", str(source), "--config_file", str(place)]
    assert cli.main(arguments) == 0
    config = read(place)
    assert getattr(config, BLOCK) == {
        "stage": 3,
        "params": "host",
        "optimizer": "nvme",
        "nvme_path": "/nvme",
        "reduce_dtype": "bf16",
        "bucket_bytes": 4000000,
        "persist_below": 10001,
    }
    assert config.mixed_precision == "bf16"
    said = capsys.readouterr().out
    for key in ("zero_hpz_partition_size", "brand_new_key", "another_new_key"):
        assert f"{key}: no equal in zero-plugin" in said
    # every key is a setting or is named
    for key in ("gradient_clipping", "aio", "contiguous_gradients", "buffer_count", "pin_memory"):
        assert f"{key}: not needed" in said


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 1}, {"stage": 1, "optimizer": "device", "gradients": "device"}),
        ({"stage": 2, "cpu_offload": True}, {"stage": 2, "optimizer": "host", "gradients": "host"}),
        (
            {"stage": 2, "offload_param": {"device": "cpu"}},
            {"stage": 2, "optimizer": "device", "gradients": "device"},
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.7}},
            {
                "stage": 3,
                "optimizer": "host",
                "gradients": "host",
                "device_fraction": 0.3,
            },
        ),
    ],
)
def test_stages_and_tiers_of_deepspeed(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate({"zero_optimization": zero})
    assert found.settings == expected
    assert ZeroConfig(**found.settings)


def test_a_deepspeed_file_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.json"
    assert cli.main(["config", "--from-deepspeed", str(missing)]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    with pytest.raises(errors.ConfigError, match="without nvme_path"):
        translate({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
