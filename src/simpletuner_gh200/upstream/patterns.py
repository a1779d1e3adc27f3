"""The language of the contract: a pattern of Python, and how often it is to be in upstream's source.

A pattern is Python's own syntax, so that moved lines, comments and formatting are no difference. In it ``_`` stands for
any expression, or any name behind a dot; ``...`` for any further arguments or statements; ``**_`` for any further
entries of a dict. Three things are wider than they are written: ``f(_, _)`` is a call with two arguments, by place or
by name; ``x = _`` is whatever binds ``x``; ``def f(self, x): ...`` is any function of that name and these parameters,
``def f(*_): ...`` of any.

    P; Q                each is there
    once P              exactly once
    no P                nowhere
    all P are Q; R      there, and never in another way than these
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from simpletuner_gh200.upstream.syntax import Function, parameters, unpacked

_UNSEEN = {"ctx", "type_comment", "returns", "decorator_list", "kind"}
_WORDS = ("once", "no", "all")


def trouble(statement: str, scope: ast.AST) -> str | None:
    """None where it is true of ``scope``, else what was found instead, in words."""
    word, _, rest = statement.partition(" ")
    if word not in _WORDS:
        missing = [ast.unparse(pattern) for pattern in _parsed(statement) if not count(pattern, scope)]
        return f"no `{'`, no `'.join(missing)}`" if missing else None
    rest, _, ways = rest.partition(" are")
    (pattern,) = _parsed(rest)
    found = count(pattern, scope)
    if word == "all":
        alike = sum(count(way, scope) for way in _parsed(ways))
        return None if found and found == alike else f"{found} `{rest}`, {alike} of them as `{_in_a_line(ways)}`,"
    return None if found == (word == "once") else f"{found} `{rest}`"


def count(pattern: ast.AST, scope: ast.AST) -> int:
    return sum(_same(pattern, node) for node in _nodes(scope).get(_kind(pattern), ()))


def _in_a_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.strip().splitlines())


@lru_cache(maxsize=512)
def _parsed(text: str) -> tuple[ast.AST, ...]:
    body = ast.parse(inspect.cleandoc(text)).body
    return tuple(one.value if isinstance(one, ast.Expr) else one for one in body)


@lru_cache(maxsize=16)
def _nodes(scope: ast.AST) -> Mapping[type, Sequence[ast.AST]]:
    """All below ``scope`` by kind. Remembered, because a dozen facts ask about the same long class."""
    found: dict[type, list[ast.AST]] = defaultdict(list)
    for node in ast.walk(scope):
        for seen in _bindings(node) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else (node,):
            found[_kind(seen)].append(seen)
    return found


def _kind(node: ast.AST) -> type:
    return ast.FunctionDef if isinstance(node, ast.AsyncFunctionDef) else type(node)


def _bindings(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.AST]:
    """The statement itself, where it is more than a binding, and ``x = value`` for each name that it binds."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (ast.Assign([part], statement.value) for part in unpacked(target))
        return
    yield statement
    if isinstance(statement, ast.AugAssign):
        yield ast.Assign([statement.target], ast.BinOp(statement.target, statement.op, statement.value))
    elif statement.value is not None:
        yield ast.Assign([statement.target], statement.value)


def _same(pattern: Any, node: Any) -> bool:
    match pattern:
        case ast.Name(id="_"):
            return isinstance(node, ast.expr)
        case ast.Attribute(value=owner, attr="_"):
            return isinstance(node, ast.Attribute) and _same(owner, node.value)
        case ast.Call(func=called, args=given, keywords=[]) if isinstance(node, ast.Call):
            return _in_turn(given, [*node.args, *(named.value for named in node.keywords)]) and _same(called, node.func)
        case ast.Dict(keys=[*_, None]) if isinstance(node, ast.Dict):
            there = list(zip(node.keys, node.values, strict=True))
            entries = list(zip(pattern.keys, pattern.values, strict=True))[:-1]
            return all(any(_same(key, k) and _same(value, v) for k, v in there) for key, value in entries)
        case ast.FunctionDef(name=name) if isinstance(node, Function):
            wanted = parameters(pattern)
            return node.name == name and wanted in (("*_",), parameters(node))
        case ast.AnnAssign(target=target, value=None):
            return isinstance(node, ast.AnnAssign) and _same(target, node.target)
        case ast.AST():
            return type(pattern) is type(node) and all(
                _same(getattr(pattern, name), getattr(node, name)) for name in pattern._fields if name not in _UNSEEN
            )
        case list():
            return isinstance(node, list) and _in_turn(pattern, node)
        case _:
            return type(pattern) is type(node) and pattern == node


def _in_turn(patterns: Sequence[ast.AST], nodes: Sequence[ast.AST]) -> bool:
    if not patterns:
        return not nodes
    first, *others = patterns
    if _is_dots(first):
        return any(_in_turn(others, nodes[start:]) for start in range(len(nodes) + 1))
    return bool(nodes) and _same(first, nodes[0]) and _in_turn(others, nodes[1:])


def _is_dots(pattern: ast.AST) -> bool:
    value = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(value, ast.Constant) and value.value is ...
