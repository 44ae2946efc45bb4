"""The `calc` tool: exact integer arithmetic, bounded in length, depth and size.

Standard library only, Python 3.10: copied into the bundle beside `toolcall.py`.
"""

import ast
import operator
from collections.abc import Mapping

try:
    from tasks.environments.toolcall import ToolError
except ModuleNotFoundError:  # beside this file on the device
    from toolcall import ToolError  # type: ignore[import-not-found,no-redef]

MAX_CHARS = 200
MAX_DIGITS = 40
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates an integer expression with + - * and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_value(node.operand)
    else:
        raise ToolError("only integers, + - * and parentheses")
    if abs(result) >= 10**MAX_DIGITS:
        raise ToolError("number too large")
    return result


def evaluate(expression: str) -> int:
    """The exact value of an integer expression.

    Raises:
        ToolError: too long, not an expression, another operator, or a number too large.
    """
    if len(expression) > MAX_CHARS or not expression.isascii():
        raise ToolError(f"at most {MAX_CHARS} ASCII characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("not an expression") from None
    return _value(tree.body)


def calc(arguments: Mapping[str, object]) -> str:
    """Answer a `calc` call; raises `ToolError` where the arguments are wrong."""
    expression = arguments.get("expression")
    if set(arguments) != {"expression"} or not isinstance(expression, str):
        raise ToolError('expected {"expression": "…"}')
    return str(evaluate(expression))
