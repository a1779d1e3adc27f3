"""Command line of the feature matrix; the three scripts beside this folder call it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.feature_matrix import combined_scenarios, gh200_scenarios, upstream_scenarios
from scripts.feature_matrix.matrix import show
from scripts.feature_matrix.runs import Bench

GROUPS = {
    "upstream": ("attention", "manual-validation", "audio"),
    "gh200": ("diagnostic", "features"),
    "combined": ("backend", "manual-validation", "audio", "video"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="test_*_features.sh", description="Prints a matrix; exit code 1 if a test failed."
    )
    parser.add_argument("suite", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="keep model, caches and logs here (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the matrix")
    suite = arguments[0] if arguments else ""
    if suite == "combined":
        parser.add_argument("--backend", metavar="NAME", help="attention backend, such as flash_attn_3")
        parser.add_argument("--manual", "--manual-validation", dest="manual_validation", action="store_true")
        parser.add_argument("--audio", action="store_true")
        parser.add_argument("--video", action="store_true")
    else:
        for group in GROUPS.get(suite, ()):
            if group != "features":
                parser.add_argument(f"--{group}", action="store_true", help="only this group (default: all)")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> set[str]:
    """The groups that were named, or all of them."""
    named = {group for group in GROUPS[options.suite] if getattr(options, group.replace("-", "_"), None)}
    return named or set(GROUPS[options.suite])


def run(options: argparse.Namespace, folder: Path) -> int:
    bench = Bench(folder)
    if options.suite == "upstream":
        rows, notes = upstream_scenarios.UpstreamScenarios(bench).rows(chosen(options)), upstream_scenarios.NOTES
    elif options.suite == "gh200":
        rows, notes = gh200_scenarios.GH200Scenarios(bench).rows(chosen(options)), gh200_scenarios.NOTES
    else:
        scenarios = combined_scenarios.CombinedScenarios(bench, options.backend)
        rows, notes = scenarios.rows(chosen(options)), combined_scenarios.NOTES
    return show(rows, notes, as_json=options.json)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return run(options, options.folder.absolute())
    with tempfile.TemporaryDirectory(prefix="gh200-features-") as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
