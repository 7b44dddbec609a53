"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side. Rows shorter than the headers do not widen the columns."""
    every = [list(headers), *map(list, rows)]
    widths = [max(len(row[column]) for row in every if len(row) == len(headers)) for column in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in every]
    return "\n".join(lines)
