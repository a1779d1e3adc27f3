"""Reading folders, wheels and commits; releases through the user's own pip."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import source as sources
from simpletuner_gh200.upstream.source import select
from tests.unit.upstream.upstream_samples import run_git, write_wheel

PACKAGE = {"simpletuner/__init__.py": "__version__ = '3.7'\n", "simpletuner/helpers/a.py": "x = 1\n"}


def folder(root: Path) -> Path:
    for name, text in PACKAGE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_wheel_is_read_in_place(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "3.7", PACKAGE | {"../../escape.py": "bad = 1\n"})
    found = sources.path_source(wheel)
    assert found.read("simpletuner.helpers.a") == b"x = 1\n"
    assert found.read("simpletuner.helpers.b") is None
    assert found.version == "3.7"
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_member_that_inflates_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "simpletuner-3.7-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("simpletuner/big.py", b"0" * (sources.MAX_SOURCE_BYTES + 1))
    with pytest.raises(UsageError, match="claims"):
        sources.path_source(path).read("simpletuner.big")


def test_a_damaged_wheel_says_so(tmp_path: Path) -> None:
    path = tmp_path / "simpletuner-3.7-py3-none-any.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(UsageError, match="no readable wheel"):
        sources.path_source(path).read("simpletuner")


def test_a_checkout_and_the_package_folder_are_the_same(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for path in (root, root / "simpletuner"):
        assert sources.path_source(path).read("simpletuner.helpers.a") == b"x = 1\n"
    with pytest.raises(UsageError, match="no SimpleTuner in"):
        sources.path_source(root / "simpletuner" / "helpers")


def test_a_commit_is_read_as_it_was(tmp_path: Path) -> None:
    root = folder(tmp_path)
    run_git(root, "init", "-q")
    run_git(root, "add", ".")
    run_git(root, "commit", "-q", "-m", "one")
    run_git(root, "tag", "v1")
    (root / "simpletuner/helpers/a.py").write_text("x = 2\n", encoding="utf-8")
    run_git(root, "commit", "-q", "-a", "-m", "two")
    assert select(repository=root, ref="v1").read("simpletuner.helpers.a") == b"x = 1\n"
    assert select(repository=root).read("simpletuner.helpers.a") == b"x = 2\n"


def test_a_ref_is_never_an_option(tmp_path: Path) -> None:
    root = folder(tmp_path)
    run_git(root, "init", "-q")
    target = tmp_path / "written"
    for ref in (f"--output={target}", "-h", "--all", "nothing", ""):
        with pytest.raises(UsageError, match="no commit"):
            select(repository=root, ref=ref)
    assert not target.exists()


def test_only_one_place_may_be_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--version and --path"):
        select(version="3.1.6", path=tmp_path)
    with pytest.raises(UsageError, match="needs a repository"):
        select(ref="main")


def test_what_is_no_version_never_reaches_pip() -> None:
    with pytest.raises(UsageError, match="is no version"):
        select(version="--index-url=http://example.org")


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip configured, by its own environment, to know one folder only."""
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    write_wheel(tmp_path, "3.0.9", PACKAGE)
    write_wheel(tmp_path, "3.7", PACKAGE)
    write_wheel(tmp_path, "3.10", PACKAGE, requires_python=">=4.5")
    return tmp_path


def test_releases_come_through_the_users_pip_oldest_first(local_index: Path) -> None:
    assert sources.releases() == [Version("3.7"), Version("3.10")]


def test_a_wheel_for_another_python_is_fetched_once(local_index: Path, private_cache: Path) -> None:
    found = sources.wheel(Version("3.10"))
    assert sources.wheel_source(found)("simpletuner.helpers.a") == b"x = 1\n"
    assert private_cache in found.parents
    (local_index / "simpletuner-3.10-py3-none-any.whl").unlink()
    assert sources.wheel(Version("3.10")) == found


def test_a_release_that_is_not_there_leaves_nothing_behind(local_index: Path, private_cache: Path) -> None:
    with pytest.raises(UsageError, match="pip download"):
        sources.wheel(Version("3.8"))
    assert list((private_cache / "simpletuner-gh200" / "wheels").iterdir()) == []


def test_credentials_in_an_index_address_are_not_repeated() -> None:
    said = sources._last_error("ERROR: could not reach https://me:secret@index.example.org/simple\n")
    assert "secret" not in said
    assert "index.example.org" in said
