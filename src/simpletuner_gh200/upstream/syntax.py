"""Reading upstream's source as syntax: where a name is defined, and its parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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


def string_keys(node: ast.AST | None) -> dict[str, ast.expr]:
    """The constant string keys of a dict display, with their values."""
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def value_of(node: ast.AST | None) -> ast.expr | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None


def unpacked(target: ast.expr) -> Iterator[ast.expr]:
    """What an assignment's target binds: itself, or the parts of a tuple."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from unpacked(element)
    else:
        yield target


def _definitions(block: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(block):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=targets):
                parts = (part for target in targets for part in unpacked(target))
                yield from ((part.id, node) for part in parts if isinstance(part, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.ExceptHandler() | ast.With():
                yield from _definitions(node)
            case _:
                continue
