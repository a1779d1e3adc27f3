"""A SimpleTuner of a few lines, installed into a folder beside packages that are only names and versions."""

from __future__ import annotations

from pathlib import Path

HIDDEN = "cannot import name 'Qwen3VLCausalLMOutputWithPast' from 'collections'"

LAZILY_BROKEN = """\
try:
    from collections import Qwen3VLCausalLMOutputWithPast
except ImportError as failure:
    raise RuntimeError("Could not import module 'BloomPreTrainedModel'.") from failure
"""
"""Fails as transformers' lazy imports do: the reason is behind another one."""


def write_site(site: Path, *, trainer: str, release: str = "4.10.1", **versions: str) -> Path:
    """``trainer`` is the source of its trainer, ``versions`` what else seems to be installed."""
    training = site / "simpletuner" / "helpers" / "training"
    training.mkdir(parents=True, exist_ok=True)
    for folder in (training, *list(training.parents)[:2]):
        (folder / "__init__.py").touch()
    (training / "trainer.py").write_text(trainer)
    for name, version in {"simpletuner": release, **versions}.items():
        for other in site.glob(f"{name}-*.dist-info/METADATA"):
            other.unlink()
            other.parent.rmdir()
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return site / "simpletuner"
