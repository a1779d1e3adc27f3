"""GH1xx: what is installed, and what the environment tells it."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.allocator import INSTEAD, OUR_KEYS, split_options
from simpletuner_gh200.config.environment import ALLOCATOR, SWITCH, switched_off
from simpletuner_gh200.config.settings import our_variables, resolve
from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import ConfigError
from simpletuner_gh200.units import counted, format_seconds
from simpletuner_gh200.upstream.check import check_remembered
from simpletuner_gh200.upstream.source import folder_source, with_installed_accelerate
from simpletuner_gh200.upstream.tested import TESTED, held_back, setup_command, versions_in_words

_BINDINGS = {"cuda": "cuda-bindings", "pynvml": "nvidia-ml-py"}
OLDEST_SIMPLETUNER = Version("3.1.0")


@check("GH101", "torch build")
def torch_build(context: Context) -> CheckResult:
    """A CPU build of torch on a GPU machine trains on the CPU, or not at all, and says nothing about it."""
    torch = context.torch
    if torch is None:
        return failed("torch is not installed here", "pip install torch, from the index that has CUDA builds")
    if torch.cuda:
        return passed(f"torch {torch.version}, built for CUDA {torch.cuda}")
    if torch.hip:
        return warned(f"torch {torch.version} is built for AMD (HIP {torch.hip})", "what needs CUDA stays off here")
    if not context.nvidia_gpus:
        return passed(f"torch {torch.version}, a CPU build; no NVIDIA GPU here either")
    found = f"torch {torch.version} is a CPU build on a machine with an NVIDIA GPU ({', '.join(context.nvidia_gpus)})"
    return failed(found, _torch_fix(context.machine))


def _torch_fix(machine: str) -> str:
    if machine in {"aarch64", "arm64"}:
        return (
            "aarch64 wheels of torch 2.8 to 2.10 on the public index are CPU-only: pip install 'torch>=2.11', "
            "or take a CUDA wheel from PyTorch's own index (its start page gives the command)"
        )
    return "install torch's CUDA wheel: PyTorch's start page gives the command for your CUDA version"


@check("GH102", "CUDA allocator options")
def allocator_options(context: Context) -> CheckResult:
    """The use_uvm keys of earlier guides exist only in privately patched builds: stock torch raises at its first use
    of CUDA.
    """
    given = {name: context.environment[name] for name in ALLOCATOR if context.environment.get(name)}
    ours = sorted({key for text in given.values() for key, _value in split_options(text)} & OUR_KEYS.keys())
    if not ours:
        return passed("; ".join(f"{name}={text}" for name, text in given.items()) or "not set")
    carried = ", ".join(f"{key} -> {OUR_KEYS[key]}" for key in ours)
    return warned(
        f"stock torch alone would reject {', '.join(ours)}; with the extension on they are taken out before: {INSTEAD}",
        f'eval "$(gh200 env)" removes them; their meaning is carried by our own settings: {carried}',
    )


@check("GH103", "NVIDIA's Python bindings")
def python_bindings(context: Context) -> CheckResult:
    """Unified memory and GPU telemetry call the driver through them; stock torch has no such calls."""
    missing = [package for module, package in _BINDINGS.items() if context.package(module) is None]
    if not missing:
        return passed("cuda-bindings and nvidia-ml-py are installed")
    if not context.nvidia_gpus:
        return passed(f"not installed, and not needed without an NVIDIA GPU: {', '.join(missing)}")
    return failed(f"not installed: {', '.join(missing)}", "pip install 'simpletuner-gh200[cuda]'")


@check("GH104", "SimpleTuner version")
def simpletuner_version(context: Context) -> CheckResult:
    """The extension knows SimpleTuner from 3.1 on. Python 3.11 keeps pip from SimpleTuner 4."""
    found = context.version("simpletuner")
    if found is None:
        return failed("SimpleTuner is not installed here", setup_command())
    try:
        version = Version(found)
    except InvalidVersion:
        return warned(f"SimpleTuner {found}: not a release number", "gh200 upstream check tells what holds")
    if version < OLDEST_SIMPLETUNER:
        return failed(f"SimpleTuner {version} is older than {OLDEST_SIMPLETUNER}", setup_command())
    held = held_back(".".join(context.python.split(".")[:2]))
    if held is not None:
        fix = f"python{TESTED[0].pythons[0]} -m venv tuner, this package there, then gh200 setup"
        return warned(f"SimpleTuner {version}: {held}", fix)
    return passed(f"SimpleTuner {version}")


@check("GH105", "seams")
def seams(context: Context) -> CheckResult:
    """Each feature hooks SimpleTuner at a few places; where one has changed, what stands on it is off."""
    package = context.package("simpletuner")
    if package is None:
        return skipped("SimpleTuner is not installed here")
    verdict = check_remembered(with_installed_accelerate(folder_source(package.parent)))
    if verdict.ok:
        here = sum(row.status == "ok" for row in verdict.seams)
        missing = len(verdict.seams) - here
        others = f"; {counted(missing, 'other')} not needed in this release" if missing else ""
        return passed(f"{counted(here, 'seam')} hold{'s' if here == 1 else ''}{others}")
    lost = [name for name, status in verdict.features.items() if not status.on]
    broken = "; ".join(f"{row.name}: {row.found}" for row in verdict.broken)
    return failed(f"{broken}. Off because of it: {', '.join(lost)}", "use a release that `gh200 upstream check` passes")


@check("GH109", "SimpleTuner's import")
def simpletuner_imports(context: Context) -> CheckResult:
    """SimpleTuner leaves the versions of its packages open: newer ones can break its import, and so every run."""
    # For real, in a process of its own: what is installed may have the right versions and still not go together.
    if context.version("simpletuner") is None:
        return skipped("SimpleTuner is not installed here")
    verdict = context.simpletuner
    if verdict.version is None:  # files without the package
        return failed(str(verdict.cause), setup_command())
    versions = versions_in_words(verdict.version)
    if verdict.imports:
        return passed(f"SimpleTuner {verdict.version} imports, in {format_seconds(verdict.seconds)}; {versions}")
    if verdict.imports is None:
        fix = "see what takes long: python -X importtime -m simpletuner_gh200.seams.probe"
        return failed(f"not found out: {verdict.cause}; {versions}", fix)
    return failed(f"SimpleTuner {verdict.version}: {verdict.cause}; {versions}", setup_command(verdict.version))


@check("GH107", "environment variables")
def environment_variables(context: Context) -> CheckResult:
    """A misspelt access pattern or ratio would stop the run at its start."""
    ours = (SWITCH, *our_variables())
    given = {name: context.environment[name] for name in ours if name in context.environment}
    if switched_off(given):
        return warned(f"{SWITCH}=0: the extension is switched off, also for `gh200 train`", "unset it")
    try:
        resolve({}, given, source="the environment")
    except ConfigError as invalid:
        return failed("; ".join(str(problem) for problem in invalid.problems), 'unset them, or eval "$(gh200 env)"')
    if not given:
        return passed("none set; defaults hold")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()))
