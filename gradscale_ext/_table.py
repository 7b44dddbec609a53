"""Tables in plain text, as much of them as fits a screen, and in HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side. Rows shorter than the headers do not widen the columns."""
    every = [list(headers), *map(list, rows)]
    widths = [max(len(row[column]) for row in every if len(row) == len(headers)) for column in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in every]
    return "\n".join(lines)


def fitted(text: str, lines: int = 40, columns: int = 100) -> str:
    """Cut a text to a screen, and say how much is left out.

    >>> print(fitted("one\\ntwo\\nthree\\nfour", lines=3, columns=4))
    one
    two
    ... 2 more lines; print() shows all
    """
    every = [line if len(line) <= columns else line[: columns - 3] + "..." for line in text.splitlines()]
    if len(every) > lines:
        every[lines - 1 :] = [f"... {len(every) - lines + 1} more lines; print() shows all"]
    return "\n".join(every)


def form(tensor: torch.Tensor) -> str:
    """Dtype and shape.

    >>> form(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def named_tensors(result: Any) -> str:
    """Write the tensors of a named tuple: values where they fit into the line, else dtype and shape."""
    width = max(map(len, result._fields))
    lines = [type(result).__name__]
    for name, value in result._asdict().items():
        text = " ".join(str(value).split())
        is_long = isinstance(value, torch.Tensor) and width + 2 + len(text) > 100
        lines.append(f"{name:<{width}}  {form(value) if is_long else text}")
    return "\n".join(lines)


def fitted_table(headers: Sequence[str], rows: Sequence[Sequence[str]], lines: int = 40, columns: int = 100) -> str:
    """Cut a table to a screen: the middle of long names in its first column, then lines.

    >>> print(fitted_table(["name", "norm"], [["encoder.layers.0.weight", "1.25"]], columns=18))
    name         norm
    enco...ight  1.25
    """
    whole = [row for row in [headers, *rows] if len(row) == len(headers)]
    others = sum(2 + max(len(row[column]) for row in whole) for column in range(1, len(headers)))
    short = [[_without_middle(name, max(columns - others, len(headers[0]))), *cells] for name, *cells in rows]
    return fitted(table(headers, short), lines, columns)


def _without_middle(name: str, length: int) -> str:
    half = (length - 3) // 2
    return name if len(name) <= length else f"{name[:half]}...{name[-half:]}"


def html_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]], limit: int = 40) -> str:
    """Write a table in HTML, of at most `limit` rows."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    left_out = [[f"... and {len(rows) - limit} more"]] if len(rows) > limit else []
    body = "".join(row(cells, "td") for cells in [*rows[:limit], *left_out])
    caption = html.escape(caption)
    return f"<table><caption>{caption}</caption><thead>{row(headers, 'th')}</thead><tbody>{body}</tbody></table>"
