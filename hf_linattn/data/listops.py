"""ListOps of Long Range Arena (Tay et al. 2020, arXiv:2011.04006): nested operations on lists of digits."""

import random
from collections.abc import Callable, Sequence

#: The operators, and what each makes of its arguments, which are digits.
OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: median(values),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
DIGITS = tuple("0123456789")
#: Every word of an expression.
WORDS = (*OPERATORS, END, *DIGITS)
# of Long Range Arena's generator: how likely an argument is itself an operation
_NESTED = 0.25
_OPERATORS = tuple(OPERATORS)


def median(values: Sequence[int]) -> int:
    """The median, rounded down where it lies between two values, as Long Range Arena has it."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


def largest_size(max_depth: int, max_args: int) -> int:
    """Number of words of the largest expression that these limits allow."""
    size = 1
    for _ in range(max_depth - 1):
        # an operator, its arguments, and the bracket that closes it
        size = 2 + max_args * size
    return size


def draw_expression(
    generator: random.Random, *, max_words: int, max_depth: int = 10, max_args: int = 10
) -> tuple[list[str], int] | None:
    """One expression of Long Range Arena's distribution, e.g. [MAX 4 [MIN 2 3 ] 0 ], and its value.

    Args:
        generator: source of the draw; only its `random()` is used, which is the same in every version of Python.
        max_words: most words of an expression, operators, digits and closing brackets counted.
        max_depth: most levels, a digit alone being one level.
        max_args: most arguments of an operator; the fewest are two.

    Returns:
        The words and the value, 0 to 9; None where the expression drawn is longer than `max_words`: draw again.
    """
    words: list[str] = []

    def draw(depth: int) -> int:
        if depth == max_depth or generator.random() >= _NESTED:
            value = int(generator.random() * 10)
            words.append(DIGITS[value])
            return value
        operator = _OPERATORS[int(generator.random() * len(_OPERATORS))]
        count = 2 + int(generator.random() * (max_args - 1))
        words.append(operator)
        values = []
        for _ in range(count):
            # too long already: what is drawn from here on will not be used
            if len(words) > max_words:
                return 0
            values.append(draw(depth + 1))
        words.append(END)
        return OPERATORS[operator](values)

    value = draw(1)
    return (words, value) if len(words) <= max_words else None
