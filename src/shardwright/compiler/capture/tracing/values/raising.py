"""Proves from the source of a frame that one outcome of what it asks for ends the step with an error."""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from shardwright.common import trees
from shardwright.compiler.capture.tracing import sources

_SUPPRESS = ("suppress", "raises", "ignore", "catch")  # in the names of context managers that may end an error


@dataclass(frozen=True)
class Raises:
    """``outcome`` of what is asked leads to ``error`` with this text, by the line ``source``."""

    outcome: bool
    error: type[Exception]
    text: str
    source: str


def raises_of(
    frame: FrameType | None,
    until: CodeType,
    asked: Literal["jump", "call", "number"],
    error: type[Exception] | None = None,
) -> Raises | None:
    """Return to what error an outcome of what ``frame`` asks for leads, None where that is not certain.

    Args:
        until: the code of the frame from which on nobody may catch the error.
        asked: how: by a branch, by a call that returns a truth, or by one that returns a number to be compared.
        error: what the call raises by itself.
    """
    if frame is None or not sources.is_users(frame.f_code.co_filename):
        return None
    tree = _function(frame.f_code)
    node = None if tree is None else _asking(tree, frame, asked)
    if tree is None or node is None:
        return None
    source = sources.place_of(frame)
    if error is not None:
        return Raises(False, error, "", source) if _ends_the_step(frame, until, error) else None
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found = _number_in_test(node, parents) if asked == "number" else _decided(node, parents)
    if found is None:
        return None
    statement, outcome = found
    made = _error_of(statement, outcome, frame)
    if made is None or not _ends_the_step(frame, until, made[0]):
        return None
    return Raises(outcome, *made, source)


def _decided(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[ast.stmt, bool] | None:
    """Return the statement whose test an expression decides, and by which of its own outcomes, with an error there."""
    for outcome in (True, False):
        if (found := _climbed(node, outcome, parents)) is not None:
            statement, value = found
            raising = _raising(statement, value)
            if raising:
                return statement, outcome
    return None


def _climbed(node: ast.AST, outcome: bool, parents: dict[ast.AST, ast.AST]) -> tuple[ast.stmt, bool] | None:
    """Follow an outcome outwards to the test that it decides; None where other operands decide with it."""
    value, chained = outcome, isinstance(node, ast.Compare) and len(node.ops) > 1
    if chained and outcome:
        return None
    while True:
        parent = parents.get(node)
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            value = not value
        elif isinstance(parent, ast.BoolOp):
            if value != isinstance(parent.op, ast.Or) and parent.values[-1] is not node:
                return None
        elif isinstance(parent, ast.Call) and _is_bool(parent, node):
            pass
        elif isinstance(parent, (ast.If, ast.Assert)) and parent.test is node:
            return parent, value
        else:
            return None
        node = parent


def _is_bool(call: ast.Call, node: ast.AST) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "bool" and call.args == [node]


def _number_in_test(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[ast.stmt, bool] | None:
    """Return the same for a number that is compared, whose comparison is asked next."""
    parent = parents.get(node)
    return _decided(parent, parents) if isinstance(parent, ast.Compare) else None


def _raising(statement: ast.stmt, value: bool) -> bool:
    """Check that a statement ends in an error where its test has this value."""
    if isinstance(statement, ast.Assert):
        return not value
    assert isinstance(statement, ast.If)
    return _always_raises(statement.body if value else statement.orelse)


def _always_raises(body: list[ast.stmt]) -> bool:
    """Check that a block ends in a raise, and nothing before it leaves the block or goes round in it."""
    if not body or not isinstance(body[-1], ast.Raise) or body[-1].exc is None:
        return False
    return all(isinstance(each, (ast.Assign, ast.AnnAssign, ast.Expr)) for each in body[:-1]) and not any(
        isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)) for each in body for inner in ast.walk(each)
    )


def _error_of(statement: ast.stmt, outcome: bool, frame: FrameType) -> tuple[type[Exception], str] | None:
    """Return the class and the text of the error that a statement raises."""
    if isinstance(statement, ast.Assert):
        return AssertionError, "" if statement.msg is None else _text(statement.msg, frame)
    assert isinstance(statement, ast.If)
    block = statement.body if statement.body and isinstance(statement.body[-1], ast.Raise) else statement.orelse
    if _always_raises(statement.body) and _always_raises(statement.orelse):
        return None
    raised, scope = block[-1], dict(frame.f_locals)
    assert isinstance(raised, ast.Raise)
    assert raised.exc is not None
    for each in block[:-1]:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            scope[each.targets[0].id] = _text(each.value, frame, scope)
    called = raised.exc if isinstance(raised.exc, ast.Call) else None
    kind = _evaluated(raised.exc if called is None else called.func, frame)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    if called is None or not (called.args or called.keywords):
        return kind, ""
    if len(called.args) == 1 and not called.keywords:
        return kind, _text(called.args[0], frame, scope)
    return kind, ast.unparse(raised.exc)


class _Filled(ast.NodeTransformer):
    """Writes what f-strings show as it is now, and the source of what has no value yet."""

    def __init__(self, frame: FrameType, scope: Mapping[str, Any] | None) -> None:
        self._frame, self._scope = frame, scope

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        value = _evaluated(node.value, self._frame, self._scope)
        known = value is not _UNKNOWN and not _has_tensors(value)
        return node if known else ast.Constant(f"{{{ast.unparse(node.value)}}}")


_UNKNOWN = object()


def _text(expression: ast.expr, frame: FrameType, scope: Mapping[str, Any] | None = None) -> str:
    """Return a message as far as it is known while nothing has a value, else its source."""
    copied = ast.parse(ast.unparse(expression), mode="eval").body
    value = _evaluated(_Filled(frame, scope).visit(copied), frame, scope)
    return f"{value}" if value is not _UNKNOWN and not _has_tensors(value) else ast.unparse(expression)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in trees.tree_leaves(value)) or "Tensor(" in f"{value}"


def _evaluated(expression: ast.AST, frame: FrameType, scope: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an expression, by the variables of ``scope`` in place of the frame's own."""
    tree = ast.fix_missing_locations(ast.Expression(expression))  # type: ignore[arg-type]
    try:
        return eval(compile(tree, "<error>", "eval"), frame.f_globals, dict(frame.f_locals if scope is None else scope))
    except Exception:
        return _UNKNOWN


def _ends_the_step(frame: FrameType | None, until: CodeType, error: type[Exception]) -> bool:
    """Check that no frame catches an error of this class on its way out of the step."""
    while frame is not None and frame.f_code is not until:
        if sources.is_users(frame.f_code.co_filename):
            tree = _function(frame.f_code)
            if tree is None or any(_catches(each, error, frame) for each in _around(tree, frame.f_lineno)):
                return False
        elif frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith(
            "compiler/capture/tracing/functions.py"
        ):
            return False  # a forward that runs aside
        frame = frame.f_back
    return frame is not None


def _around(tree: ast.AST, line: int) -> Iterator[ast.Try | ast.With]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and _covers(node.body, line):
            yield node
        if isinstance(node, ast.With) and _covers(node.body, line):
            yield node


def _covers(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _catches(node: ast.Try | ast.With, error: type[Exception], frame: FrameType) -> bool:
    if isinstance(node, ast.With):
        return any(word in ast.unparse(item.context_expr).lower() for item in node.items for word in _SUPPRESS)
    for handler in node.handlers:
        kinds = Exception if handler.type is None else _evaluated(handler.type, frame)
        try:
            if issubclass(error, kinds):
                return True
        except TypeError:
            return True
    return any(isinstance(inner, ast.Return) for each in node.finalbody for inner in ast.walk(each))


def _asking(tree: ast.AST, frame: FrameType, asked: str) -> ast.expr | None:
    """Return the expression whose value a frame asks for now."""
    code, positions = frame.f_code, list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if asked == "jump" and "JUMP" in dis.opname[code.co_code[frame.f_lasti]]:
        # A branch stands where its statement does, and what it goes by where it was made, by the instruction before.
        before = [each.offset for each in dis.get_instructions(code) if each.offset < frame.f_lasti]
        at = before[-1] // 2
    line, end, column, end_column = positions[at]
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (line, end, column, end_column)
    ]
    return found[-1] if found else None


def _function(code: CodeType) -> ast.AST | None:
    """Return the source of a function as a tree; None where it cannot be read, or is another one by now."""
    lines = linecache.getlines(code.co_filename)
    return _parsed("".join(lines), code.co_name, code.co_firstlineno) if lines else None


@cache
def _parsed(text: str, name: str, first_line: int) -> ast.AST | None:
    """Return a function by its name and its first line.

    Cached by these and the whole text of the file, from which alone the tree follows; nobody changes the tree.
    """
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == first_line:
                return node
        if isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == first_line:
            return node
    return None


@cache
def _tree(text: str) -> ast.AST:
    """Return the tree of a file.

    Cached by its whole text, from which alone the tree follows; nobody changes it.
    """
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])
