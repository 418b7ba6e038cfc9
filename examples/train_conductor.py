"""Train a conductor: a small model that leads three larger ones with different strengths, and a
calculator.

    export CODER_URL=http://localhost:8001/v1 READER_URL=http://localhost:8002/v1
    MATH_URL=http://localhost:8003/v1
    accelerate launch --quiet examples/train_conductor.py --config examples/configs/conductor.yaml

Without these variables all workers are asked at `OPENAI_BASE_URL`, or at OpenAI. The page is
docs/howto/workers.md.
"""

from __future__ import annotations

import ast
import operator
import os
import sys
from collections.abc import Callable

from agentic_prompting import OpenAIChat, Worker, Workers
from agentic_prompting.cli.script import run_script
from agentic_prompting.cli.train_program import main

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets.

    An exception is text for the agent.
    """

    def evaluate(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](evaluate(node.operand))
        raise ValueError("only numbers, + - * / and brackets")

    return str(evaluate(ast.parse(expression.strip(), mode="eval").body))


def chat(name: str, variable: str) -> OpenAIChat:
    """A worker's model at the address in an environment variable."""
    return OpenAIChat(
        os.environ.get(f"{variable}_MODEL", name), base_url=os.environ.get(f"{variable}_URL")
    )


def environment() -> Workers:
    """The pool: three models of 7B to 14B with different strengths, and a tool.

    Prices are those of your servers.
    """
    pool = {
        "coder": Worker(
            chat("Qwen/Qwen2.5-Coder-7B-Instruct", "CODER"),
            "writes and repairs Python code",
            usd=0.001,
        ),
        "mathematician": Worker(
            chat("Qwen/Qwen2.5-Math-7B-Instruct", "MATH"), "solves mathematical problems", usd=0.001
        ),
        "reader": Worker(
            chat("Qwen/Qwen3-14B", "READER"), "knows facts and reads texts", usd=0.002
        ),
        "calculator": Worker(
            calculate, "computes one expression such as (3 + 4) * 2", takes="text"
        ),
    }
    return Workers(pool, sizes=[3, 4], names=list("ABCDEFGHIJKL"))


if __name__ == "__main__":
    run_script(lambda: main("prompt-r1", sys.argv[1:]))
