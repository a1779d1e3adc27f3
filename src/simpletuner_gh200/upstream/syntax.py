"""Reading upstream's source as syntax: where a name is defined, its parameters, what happens inside it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find(module: ast.Module, qualname: str) -> ast.AST | None:
    """The definition ``qualname`` has once the module ran: the last one, ``if``, ``try`` and ``with`` looked into."""
    here: ast.AST = module
    for step in qualname.split("."):
        if not isinstance(here, ast.Module | ast.ClassDef):
            return None
        found = [node for name, node in _definitions(here) if name == step]
        if not found:
            return None
        here = found[-1]
    return here


def functions(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions of the module and methods of its classes, by qualified name."""
    for node in module.body:
        owner, parts = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        yield from ((owner + part.name, part) for part in parts if isinstance(part, Function))


def parameters(node: Function) -> tuple[str, ...]:
    """Parameter names in the order ``inspect.signature`` gives them, starred where they are."""
    spec = node.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    if spec.vararg is not None:
        names.append("*" + spec.vararg.arg)
    names.extend(argument.arg for argument in spec.kwonlyargs)
    if spec.kwarg is not None:
        names.append("**" + spec.kwarg.arg)
    return tuple(names)


def dotted(node: ast.AST) -> str | None:
    """``self.data_backend.torch_load`` for such an expression; None for anything that is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


@lru_cache(maxsize=16)
def nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes below ``scope``. Remembered, because a dozen facts ask about the same long class."""
    return tuple(ast.walk(scope))


def calls(scope: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in nodes(scope) if isinstance(node, ast.Call) and dotted(node.func) == name]


def mentions(scope: ast.AST, name: str) -> list[ast.AST]:
    # The last part first: it settles nearly every node of a long class without building its dotted name.
    last = name.rpartition(".")[2]
    ends_alike = (node for node in nodes(scope) if last in (getattr(node, "attr", None), getattr(node, "id", None)))
    return [node for node in ends_alike if dotted(node) == name]


def assignments(scope: ast.AST, name: str) -> list[ast.AST]:
    """Statements in ``scope`` that bind the dotted ``name``."""
    return [node for node in nodes(scope) if any(dotted(target) == name for target in _targets(node))]


def parents(scope: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in nodes(scope) for child in ast.iter_child_nodes(node)}


def string_keys(node: ast.AST | None) -> dict[str, ast.expr]:
    """The constant string keys of a dict display, with their values."""
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def value_of(node: ast.AST | None) -> ast.expr | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None


def _targets(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.Assign(targets=targets):
            return [part for target in targets for part in _unpacked(target)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target]
        case _:
            return []


def _unpacked(target: ast.AST) -> Iterator[ast.AST]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _unpacked(element)
    else:
        yield target


def _definitions(block: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(block):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign() | ast.AnnAssign():
                yield from ((target.id, node) for target in _targets(node) if isinstance(target, ast.Name))
            case ast.If() | ast.Try() | ast.ExceptHandler() | ast.With():
                yield from _definitions(node)
            case _:
                continue
