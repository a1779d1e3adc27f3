"""What a release is tested with: the shipped constraints, and which of them an interpreter gets."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import tested
from simpletuner_gh200.upstream.tested import choose, constraints, find

RELEASES = tested.tested_releases()


@pytest.mark.parametrize("release", RELEASES)
def test_constraints_are_plain_pins_of_all_that_matters(release):
    for cpu in (True, False):
        pinned = tested.tested_versions(release, cpu=cpu)
        assert pinned["simpletuner"] == release
        assert {"torch", "torchvision", "torchaudio", "transformers", "diffusers", "accelerate", "numpy"} <= set(pinned)
        assert constraints(release, cpu=cpu) == "".join(f"{name}=={pin}\n" for name, pin in pinned.items())
        assert not {"pytest", "mypy", "simpletuner-gh200"} & set(pinned)


@pytest.mark.parametrize("release", RELEASES)
def test_cuda_adds_to_what_ci_tests_and_changes_none_of_it(release):
    with_cuda, without = tested.tested_versions(release), tested.tested_versions(release, cpu=True)
    assert {name: with_cuda[name] for name in without} == without
    assert {"bitsandbytes", "deepspeed"} <= set(with_cuda) - set(without)


@pytest.mark.releases
def test_they_are_the_versions_of_this_environment():
    pinned, found = tested.tested_versions(version("simpletuner"), cpu=True), tested.installed_distributions()
    assert {name: found.get(name) for name in pinned} == pinned


@pytest.mark.parametrize(
    ("python", "machine", "release"),
    [
        ("3.13", "aarch64", "4.10.1"),
        ("3.12", "x86_64", "4.10.1"),
        ("3.11", "x86_64", "3.1.6"),
    ],
)
def test_the_interpreter_decides(python, machine, release):
    assert choose(python, machine).release == release
    cuda = choose(python, machine).requirement(cpu=False)
    assert cuda == f"simpletuner[{'cuda' if release == '3.1.6' else 'cuda13'}]=={release}"


@pytest.mark.parametrize(("python", "machine"), [("3.14", "x86_64"), ("3.11", "aarch64"), ("3.13", "riscv64")])
def test_an_interpreter_that_no_release_is_tested_with_is_refused_with_those_that_are(python, machine):
    with pytest.raises(UsageError, match=rf"Python {python} on {machine} \(4.10.1: Python 3.13 or 3.12 on") as refused:
        choose(python, machine)
    assert refused.value.remedy


def test_an_unknown_release_is_refused_with_the_known():
    with pytest.raises(UsageError, match=r"'4.99' .*4.10.1, 3.1.6"):
        find("4.99")
