"""A table of rows as aligned text or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned columns for a terminal: words to the left, numbers to the right."""
    cells = [list(rows[0]), *([cell(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [not any(isinstance(row[name], str) for row in rows) for name in rows[0]]
    return "\n".join(
        "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[cell(v).replace("|", "\\|") for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
    """Numbers with three or four significant digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if 0.1 <= abs(value) < 1e4 else f"{value:.3g}"
    return str(value)
