"""Makers of facts: the few kinds of statement about upstream's source that the contract is written in.

Each returns a predicate for ``Fact.holds``: given the parsed module, None when the statement is true, else what was
found instead, in words for the table.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection

from simpletuner_gh200.upstream import syntax

Predicate = Callable[[ast.Module], str | None]
Question = Callable[[ast.AST], str | None]
"""Asked of one definition; answers like a predicate."""


def inside(qualname: str, check: Question) -> Predicate:
    """``check`` applied to the definition of ``qualname``."""

    def holds(module: ast.Module) -> str | None:
        found = syntax.find(module, qualname)
        return f"no {qualname}" if found is None else check(found)

    return holds


def all_of(*predicates: Predicate) -> Predicate:
    """Every statement holds; reports the first that does not."""

    def holds(module: ast.Module) -> str | None:
        answers = (predicate(module) for predicate in predicates)
        return next((answer for answer in answers if answer is not None), None)

    return holds


def calls(qualname: str, callee: str, *, times: int | None = None, arguments: int | None = None) -> Predicate:
    """``callee`` is called in the body: at least once, or exactly ``times``; with ``arguments`` of them if given."""

    def check(scope: ast.AST) -> str | None:
        found = syntax.calls(scope, callee)
        if not found or (times is not None and len(found) != times):
            return f"{len(found)} calls of {callee} in {qualname}"
        wrong = [call for call in found if arguments is not None and len(call.args) + len(call.keywords) != arguments]
        return f"{ast.unparse(wrong[0])} in {qualname}" if wrong else None

    return inside(qualname, check)


def mentions(qualname: str, name: str) -> Predicate:
    """``name`` is used in the body, called or not."""
    return inside(qualname, lambda scope: None if syntax.mentions(scope, name) else f"{qualname} without {name}")


def looked_up_on_self(qualname: str) -> Predicate:
    """Some method of the class uses the method through ``self``, so that replacing it on the class has an effect."""
    owner, _, method = qualname.rpartition(".")
    return mentions(owner, f"self.{method}")


def defines(qualname: str) -> Predicate:
    return inside(qualname, lambda _found: None)


def assigns(qualname: str, name: str) -> Predicate:
    return inside(qualname, lambda scope: None if syntax.assignments(scope, name) else f"{qualname} never sets {name}")


def assigns_constant(qualname: str, name: str, value: object) -> Predicate:
    """``name`` is bound in the body, and only ever to the constant ``value``."""

    def check(scope: ast.AST) -> str | None:
        bound = [syntax.value_of(node) for node in syntax.assignments(scope, name)]
        if bound and all(isinstance(node, ast.Constant) and node.value == value for node in bound):
            return None
        return f"{name} = {[ast.unparse(node) if node else '?' for node in bound]} in {qualname}"

    return inside(qualname, check)


def signature(qualname: str, expected: tuple[str, ...]) -> Predicate:
    def check(found: ast.AST) -> str | None:
        if not isinstance(found, syntax.Function):
            return f"{qualname} is not a function"
        names = syntax.parameters(found)
        return None if names == expected else f"{qualname}({', '.join(names)})"

    return inside(qualname, check)


def methods(owner: str, expected: dict[str, tuple[str, ...]]) -> Predicate:
    """The class defines each method, with these parameters."""
    return all_of(*(signature(f"{owner}.{name}", names) for name, names in expected.items()))


def lacks(owner: str, names: Collection[str]) -> Predicate:
    """The class has none of these yet: we add them."""

    def check(scope: ast.AST) -> str | None:
        taken = sorted(
            node.name for node in syntax.nodes(scope) if isinstance(node, syntax.Function) and node.name in names
        )
        return f"{owner} has its own {', '.join(taken)}" if taken else None

    return inside(owner, check)


def dict_display(name: str, required: Collection[str], *, within: str | None = None) -> Predicate:
    """``name`` is bound to a dict display that has the ``required`` keys; ``within`` a function, or in the module."""

    def holds(module: ast.Module) -> str | None:
        scope = module if within is None else syntax.find(module, within)
        bound = [] if scope is None else syntax.assignments(scope, name)
        if not bound:
            return f"no {name}" + (f" in {within}" if within else "")
        value = syntax.value_of(bound[-1])
        if not isinstance(value, ast.Dict):
            return f"{name} is {ast.unparse(value) if value else 'unset'}, not a dict display"
        missing = sorted(set(required) - set(syntax.string_keys(value)))
        return f"{name} without {', '.join(missing)}" if missing else None

    return holds


def operand_only(qualname: str, attribute: str, operators: tuple[type[ast.operator], ...]) -> Predicate:
    """Each use of the dotted ``attribute`` in the body is the right operand of one of ``operators``."""

    def check(scope: ast.AST) -> str | None:
        above = syntax.parents(scope)
        for use in syntax.mentions(scope, attribute):
            parent = above[use]
            if not (isinstance(parent, ast.BinOp) and isinstance(parent.op, operators) and parent.right is use):
                return f"{ast.unparse(parent)} in {qualname}"
        return None

    return inside(qualname, check)


def with_block(qualname: str, context: str, *, times: int = 1) -> Predicate:
    """Exactly ``times`` with-blocks enter a call of ``context``, and nothing else calls it."""

    def check(scope: ast.AST) -> str | None:
        entered = [
            item
            for node in syntax.nodes(scope)
            if isinstance(node, ast.With | ast.AsyncWith)
            for item in node.items
            if isinstance(item.context_expr, ast.Call) and syntax.dotted(item.context_expr.func) == context
        ]
        total = len(syntax.calls(scope, context))
        if len(entered) == times == total:
            return None
        return f"{len(entered)} with-blocks of {context} and {total - len(entered)} other calls in {qualname}"

    return inside(qualname, check)


def contains(qualname: str, expression: str) -> Predicate:
    """The body has this expression or statement, however it is formatted."""
    wanted = ast.dump(_parsed(expression))

    def check(scope: ast.AST) -> str | None:
        for node in syntax.nodes(scope):
            if ast.dump(node) == wanted:
                return None
        return f"{qualname} without `{expression}`"

    return inside(qualname, check)


def passes(callee: str, name: str) -> Question:
    """``callee`` is called with the plain variable ``name`` as its first argument."""

    def check(scope: ast.AST) -> str | None:
        found = syntax.calls(scope, callee)
        if any(call.args and syntax.dotted(call.args[0]) == name for call in found):
            return None
        return f"{[ast.unparse(call) for call in found]}, none of which passes {name}"

    return check


def tolerated(qualname: str, callee: str) -> Predicate:
    """Each call of ``callee`` stands in a ``try`` whose handler for Exception does not raise again."""

    def check(scope: ast.AST) -> str | None:
        above = syntax.parents(scope)
        for call in syntax.calls(scope, callee):
            if not _is_swallowed(call, above):
                return f"what {callee} raises stops {qualname}"
        return None

    return inside(qualname, check)


def _is_swallowed(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while node in above:
        child, node = node, above[node]
        if isinstance(node, ast.Try) and child in node.body:
            broad = [
                h for h in node.handlers if h.type is None or syntax.dotted(h.type) in ("Exception", "BaseException")
            ]
            if any(not any(isinstance(part, ast.Raise) for part in ast.walk(handler)) for handler in broad):
                return True
    return False


def _parsed(text: str) -> ast.AST:
    statement = ast.parse(text).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement
