"""Makers of questions: the few kinds of statement about upstream's source that the contract is written in.

Each returns a question for ``Fact``: given one definition, None when the statement is true of it, else what was found
instead, in words for the table. Where that was is added by the fact.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.spec import Question, signature_text


def calls(callee: str, *, times: int | None = None, arguments: int | None = None) -> Question:
    """``callee`` is called: at least once, or exactly ``times``; with ``arguments`` of them if given."""

    def ask(scope: ast.AST) -> str | None:
        found = syntax.calls(scope, callee)
        if not found or (times is not None and len(found) != times):
            return f"{len(found)} calls of {callee}"
        wrong = [call for call in found if arguments is not None and len(call.args) + len(call.keywords) != arguments]
        return ast.unparse(wrong[0]) if wrong else None

    return ask


def mentions(*names: str) -> Question:
    """Each name is used, called or not."""

    return lambda scope: missing_from(names, [name for name in names if syntax.mentions(scope, name)])


def exists(_found: ast.AST) -> str | None:
    """Nothing more than being there, which is asked of every definition before."""
    return None


def assigns(name: str) -> Question:
    return lambda scope: None if syntax.assignments(scope, name) else f"nothing that sets {name}"


def assigns_constant(name: str, value: object) -> Question:
    """``name`` is bound, and only ever to the constant ``value``."""

    def ask(scope: ast.AST) -> str | None:
        bound = [syntax.value_of(node) for node in syntax.assignments(scope, name)]
        if bound and all(isinstance(node, ast.Constant) and node.value == value for node in bound):
            return None
        return f"{name} = {[ast.unparse(node) if node else '?' for node in bound]}"

    return ask


def methods(*signatures: str) -> Question:
    """The class defines each, ``name(parameters)``."""

    def ask(owner: ast.AST) -> str | None:
        there = (part for part in getattr(owner, "body", ()) if isinstance(part, syntax.Function))
        return missing_from(signatures, {part.name + signature_text(syntax.parameters(part)) for part in there})

    return ask


def lacks(*names: str) -> Question:
    """The class has none of these yet: we add them."""

    def ask(scope: ast.AST) -> str | None:
        taken = {node.name for node in syntax.nodes(scope) if isinstance(node, syntax.Function)} & set(names)
        return f"its own {', '.join(sorted(taken))}" if taken else None

    return ask


def declares(*names: str) -> Question:
    """The class declares each of these, with a type."""

    def ask(scope: ast.AST) -> str | None:
        declarations = (node for node in syntax.nodes(scope) if isinstance(node, ast.AnnAssign))
        return missing_from(names, {syntax.dotted(node.target) for node in declarations})

    return ask


def dict_display(*required: str, name: str | None = None) -> Question:
    """It is, or ``name`` inside it is bound to, a dict display that has the ``required`` keys."""

    def ask(scope: ast.AST) -> str | None:
        bound = [scope] if name is None else syntax.assignments(scope, name)
        value = syntax.value_of(bound[-1]) if bound else None
        if not isinstance(value, ast.Dict):
            return f"{ast.unparse(value) if value else 'nothing'}, no dict display,"
        return missing_from(required, syntax.string_keys(value))

    return ask


def dict_entry(key: str, value: str) -> Question:
    """Exactly one dict display in it has this text under this key."""

    def ask(scope: ast.AST) -> str | None:
        values = [syntax.string_keys(node).get(key) for node in syntax.nodes(scope)]
        count = sum(isinstance(found, ast.Constant) and found.value == value for found in values)
        return None if count == 1 else f"{count} times {key}: {value!r}"

    return ask


def operand_only(attribute: str, operators: tuple[type[ast.operator], ...]) -> Question:
    """Each use of the dotted ``attribute`` is the right operand of one of ``operators``."""

    def ask(scope: ast.AST) -> str | None:
        above = syntax.parents(scope)
        for use in syntax.mentions(scope, attribute):
            parent = above[use]
            if not (isinstance(parent, ast.BinOp) and isinstance(parent.op, operators) and parent.right is use):
                return ast.unparse(parent)
        return None

    return ask


def with_block(context: str) -> Question:
    """Exactly one with-block enters a call of ``context``, and nothing else calls it."""

    def ask(scope: ast.AST) -> str | None:
        blocks = [node for node in syntax.nodes(scope) if isinstance(node, ast.With | ast.AsyncWith)]
        entered = [item.context_expr for block in blocks for item in block.items]
        found = syntax.calls(scope, context)
        if len(found) == 1 and found[0] in entered:
            return None
        return f"{len(found)} calls of {context}, {len(set(found) & set(entered))} of them with-blocks"

    return ask


def contains(expression: str) -> Question:
    """It has this expression or statement, however it is formatted."""
    statement = ast.parse(expression).body[0]
    wanted = ast.dump(statement.value if isinstance(statement, ast.Expr) else statement)

    def ask(scope: ast.AST) -> str | None:
        return None if any(ast.dump(node) == wanted for node in syntax.nodes(scope)) else f"no `{expression}`"

    return ask


def tolerated(callee: str) -> Question:
    """Each call of ``callee`` stands in a ``try`` whose handler for Exception does not raise again."""

    def ask(scope: ast.AST) -> str | None:
        above = syntax.parents(scope)
        stops = [call for call in syntax.calls(scope, callee) if not _is_swallowed(call, above)]
        return f"{callee}, whose errors are not caught," if stops else None

    return ask


def _is_swallowed(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while node in above:
        child, node = node, above[node]
        if isinstance(node, ast.Try) and child in node.body and any(map(_swallows, node.handlers)):
            return True
    return False


def _swallows(handler: ast.ExceptHandler) -> bool:
    broad = handler.type is None or syntax.dotted(handler.type) in ("Exception", "BaseException")
    return broad and not any(isinstance(part, ast.Raise) for part in ast.walk(handler))


def missing_from(wanted: Collection[str], found: Collection[object]) -> str | None:
    missing = [name for name in wanted if name not in found]
    return f"no {', '.join(missing)}" if missing else None
