"""Parts of a report in Markdown."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval_text(value: float, low: float | None, high: float | None, form: str = "{:.3f}") -> str:
    """A number and the interval in brackets, which is left out where it is None."""
    return form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")
