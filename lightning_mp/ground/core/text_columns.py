"""Text in columns."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table; the columns ``left`` are aligned left, the others right.

    >>> aligned([("dtype", "bytes"), ("fp32", "4")])
    ['dtype  bytes', 'fp32       4']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
