"""The releases we run on are said once, in `zero_plugin.versions`; files that have to repeat them agree."""

from __future__ import annotations

import re

from support.sources import REPOSITORY

from zero_plugin.versions import RANGES, cure, release


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text()


def test_the_package_admits_the_oldest() -> None:
    bounds = re.findall(r'"([a-z-]+)(?:\[[a-z]+\])?>=([0-9.]+)"', text_of("pyproject.toml"))
    ours = [(name, bound) for name, bound in bounds if name in RANGES]
    assert {name for name, _ in ours} == set(RANGES)
    for name, bound in ours:
        assert bound == RANGES[name].oldest, name


def test_the_readme_says_both_ends() -> None:
    rows = re.findall(
        r"^\| ([a-z]+) \| ([0-9.]+) \| ([0-9.]+) \|", text_of("README.md"), re.MULTILINE
    )
    assert dict.fromkeys(RANGES) == {name: None for name, _, _ in rows}
    for name, oldest, newest in rows:
        assert (oldest, newest) == (RANGES[name].oldest, RANGES[name].newest), name


def test_what_continuous_integration_installs_is_in_range() -> None:
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)$", text_of("constraints.txt"), re.MULTILINE))
    assert set(RANGES) - set(pins) == {"numpy"}
    for name in set(RANGES) & set(pins):
        assert release(RANGES[name].oldest) <= release(pins[name]) <= release(RANGES[name].newest)


def test_a_cure_names_both_ends() -> None:
    assert cure("accelerate").startswith("install accelerate>=1.15 (the tests have run on it up to")
    assert cure("pytorch-lightning").startswith("install pytorch-lightning>=2.6 ")
