"""Example of an environment with tools: the policy may call a calculator, and its final response is rewarded."""

import ast
import operator
from collections.abc import Callable

from rl_algorithms.environments.matching import normalised_match
from rl_algorithms.environments.reward_function import RewardFunctionEnvironment
from rl_algorithms.environments.tools import ToolEnvironment

__all__ = ["calculate", "environment"]

OPERATIONS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARACTERS = 200


def environment(*, max_calls: int = 4) -> ToolEnvironment:
    """Allow `max_calls` calculations in a conversation, then compare the final response with the row's answer."""
    reward = RewardFunctionEnvironment(reward=normalised_match)
    return ToolEnvironment([calculate], reward=reward, max_calls=max_calls)


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression of numbers, + - * / and parentheses, such as (3 + 4) * 2.

    Args:
        expression: the expression.

    Raises:
        ValueError: it is not such an expression; the policy gets the message.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    return f"{_value(ast.parse(expression, mode='eval').body):g}"


def _value(node: ast.expr) -> float:
    """Evaluate numbers and the operations above: no names, no calls, no powers, whose size is unbounded."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses can be calculated")
