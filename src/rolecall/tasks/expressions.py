"""Arithmetic written by a model, read by a parser of our own: nothing is ever evaluated as Python.

sum     = product (("+" | "-") product)*
product = atom (("*" | "/") atom)*
atom    = digits | "(" sum ")"
"""

import re
from fractions import Fraction

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_LONGEST = 200
"""Characters. Ten numbers with their brackets need fewer; it also bounds the depth of the recursion."""


class NotArithmetic(ValueError):
    """The text is no expression of this grammar, or divides by zero."""


def parse_expression(text: str) -> tuple[Fraction, tuple[int, ...]]:
    """The exact value and the numbers used, in order."""
    if len(text) > _LONGEST:
        raise NotArithmetic(f"longer than {_LONGEST} characters")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise NotArithmetic("a character that is not a digit, operator or bracket")
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.tokens:
        raise NotArithmetic(f"{parser.tokens[-1]!r} where the expression should end")
    return value, tuple(parser.numbers)


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]  # the next token is the last
        self.numbers: list[int] = []

    def sum(self) -> Fraction:
        value = self.product()
        while self.tokens and self.tokens[-1] in "+-":
            if self.tokens.pop() == "+":
                value += self.product()
            else:
                value -= self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while self.tokens and self.tokens[-1] in "*/":
            if self.tokens.pop() == "*":
                value *= self.atom()
                continue
            divisor = self.atom()
            if not divisor:
                raise NotArithmetic("a division by zero")
            value /= divisor
        return value

    def atom(self) -> Fraction:
        if not self.tokens:
            raise NotArithmetic("it ends too early")
        token = self.tokens.pop()
        if token == "(":
            value = self.sum()
            if not self.tokens or self.tokens.pop() != ")":
                raise NotArithmetic("a bracket is not closed")
            return value
        if not token.isdigit():
            raise NotArithmetic(f"{token!r} where a number should be")
        self.numbers.append(int(token))
        return Fraction(int(token))
