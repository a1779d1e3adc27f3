"""The shape of the house: its size, names that stand once, and what is done in one place."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

from tests.unit.test_docs_fresh import ROOT

PACKAGE = ROOT / "src" / "simpletuner_gh200"
MOST_LINES = 32_120
MOST_FILES = 325
"""With the caching pass, checkpoints behind the run, and weights and gradients in Grace. Both only ever go down:
30,000 lines are where they are going."""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def files_of(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def lines_of_code(text: str) -> int:
    """Without blanks, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_what_counts_as_a_line_of_code() -> None:
    said, body = '"""Says what it is."""', "def double(\n    number: int,\n) -> int:\n"
    text = f'{said}\n\n# why\n{body}    """Twice."""\n    return 2 * number\n'
    assert lines_of_code(text) == 4


def test_the_house_has_not_grown_beyond_its_size() -> None:
    source, tests = files_of(PACKAGE), files_of(ROOT / "tests")
    lines = sum(map(lines_of_code, source.values()))
    assert lines <= MOST_LINES
    assert len(source) <= MOST_FILES
    assert sum(map(lines_of_code, tests.values())) <= lines, "tests are not longer than what they test"


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for path, text in files_of(PACKAGE).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_switch_is_spelled_in_one_place() -> None:
    named = [
        path.name
        for path, text in files_of(PACKAGE).items()
        if any(
            isinstance(node, ast.Constant) and node.value == "SIMPLETUNER_GH200" for node in ast.walk(ast.parse(text))
        )
    ]
    assert named == ["environment.py"]


def test_no_variable_is_looked_up_outside_the_configuration() -> None:
    """Others hand the environment on, to a child say, or put a variable of torch's back as it was."""
    found = {
        str(path.relative_to(PACKAGE))
        for path, text in files_of(PACKAGE).items()
        if any(map(looks_up_a_variable, ast.walk(ast.parse(text))))
    }
    assert found <= {"config/environment.py", "seams/points/torch.py"}


def looks_up_a_variable(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {"os.getenv", "os.environ.get"}


def test_svg_is_drawn_in_one_room() -> None:
    tag = re.compile(r"<(svg|rect|polyline|circle)\b")
    rooms = {path.relative_to(PACKAGE).parts[0] for path, text in files_of(PACKAGE).items() if tag.search(text)}
    assert rooms == {"draw"}
