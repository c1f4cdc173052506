"""Checks of settings. Each error names the field, the value it got and what is allowed."""

import math
from collections.abc import Iterable
from typing import Any


def check_choice(owner: str, name: str, value: Any, allowed: Iterable[str]) -> None:
    """Whether `value` is one of the strings.

    Raises:
        ValueError: it is not.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{owner}: {name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def check_integer(owner: str, name: str, value: Any, minimum: int, *, optional: bool = False) -> None:
    """Whether `value` is an integer (no bool) of at least `minimum`, or None where it is optional.

    Raises:
        ValueError: it is not.
    """
    if optional and value is None:
        return
    if not _is_integer(value, minimum):
        raise ValueError(f"{owner}: {name}={value!r} must be an integer of at least {minimum}.")


def check_integers(owner: str, name: str, values: Any, minimum: int) -> None:
    """Whether `values` is a list of integers (no bool) of at least `minimum`, and not empty.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(values, (list, tuple)) or not values or not all(_is_integer(x, minimum) for x in values):
        raise ValueError(f"{owner}: {name}={values!r} must be integers of at least {minimum}, one or more.")


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def check_number(owner: str, name: str, value: Any, minimum: float, *, above: bool = False) -> None:
    """Whether `value` is a finite number (no bool) of at least, or with `above` of more than, `minimum`.

    Raises:
        ValueError: it is not.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < minimum or (above and value == minimum):
        raise ValueError(f"{owner}: {name}={value!r} must be a number {'above' if above else 'of at least'} {minimum}.")


def check_bool(owner: str, name: str, value: Any) -> None:
    """Whether `value` is True or False.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name}={value!r} must be True or False.")
