"""Verdicts in words: `proper_words < 50 or hash_signs / words > 0.1` over columns of signals.

Numbers, names, + - * /, comparisons, and, or, not, parentheses; nothing else is an expression. The text is parsed,
never run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]
_Evaluate = Callable[[Mapping[str, Column]], Any]

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LOGIC: dict[type, Callable[[Any, Any], Any]] = {ast.And: np.logical_and, ast.Or: np.logical_or}


@dataclass(frozen=True)
class Expression:
    """A verdict that can be judged.

    Attributes:
        text: as it was written.
        signals: names that it reads.
    """

    text: str
    signals: frozenset[str]
    _evaluate: _Evaluate

    def __call__(self, columns: Mapping[str, Column]) -> Column:
        """True where the verdict holds, bool [N]; 0 / 0 compares as false, x / 0 as infinite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self._evaluate(columns), bool)


def parse(text: str, resolve: Callable[[str], str | float]) -> Expression:
    """Read an expression.

    Args:
        resolve: the signal that a name stands for, or its value.

    Raises:
        ValueError: no such expression, or what `resolve` raises; tells what and where.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r}: {error.msg} at column {error.offset}") from None
    names: set[str] = set()
    evaluate = _compile(tree.body, text, resolve, names)
    if not isinstance(tree.body, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        raise ValueError(f"{text!r} is a number, not a verdict: compare it with something")
    return Expression(text, frozenset(names), evaluate)


def _compile(node: ast.expr, text: str, resolve: Callable[[str], str | float], names: set[str]) -> _Evaluate:
    def compiled(child: ast.expr) -> _Evaluate:
        return _compile(child, text, resolve, names)

    match node:
        case ast.Constant(value=bool() | str() | bytes() | complex() | None):
            pass
        case ast.Constant(value=(int() | float()) as value):
            return lambda columns: np.float64(value)
        case ast.Name() | ast.Attribute(value=ast.Name()):
            meant = resolve(ast.unparse(node))
            if isinstance(meant, float):
                return lambda columns: np.float64(meant)
            names.add(meant)
            return lambda columns: columns[meant]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            act, first, second = _ARITHMETIC[type(op)], compiled(left), compiled(right)
            return lambda columns: act(first(columns), second(columns))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _ARITHMETIC:
            act, first, second = _ARITHMETIC[type(op)], compiled(left), compiled(right)
            return lambda columns: act(first(columns), second(columns))
        case ast.BoolOp(op=op, values=values):
            act, parts = _LOGIC[type(op)], [compiled(v) for v in values]

            def fold(columns: Mapping[str, Column]) -> Any:
                result = parts[0](columns)
                for part in parts[1:]:
                    result = act(result, part(columns))
                return result

            return fold
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = compiled(operand)
            return lambda columns: np.logical_not(inner(columns))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = compiled(operand)
            return lambda columns: np.negative(inner(columns))
    raise ValueError(f"{text!r}: {ast.unparse(node)!r} is not allowed here; see docs/corpus.md, rulesets")
