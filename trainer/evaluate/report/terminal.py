"""Columns of tables in a terminal, where no number is cut."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PADDING = 3  # characters between two columns; the two edges have a space each, together one less
TEXT_WIDTH = 14  # characters of a column of text, whose longer cells wrap before columns go


def fitting(
    columns: dict[str, list[str]], width: int, text: Collection[str], optional: Iterable[Collection[str]]
) -> dict[str, list[str]]:
    """Returns the ``{header: cells}`` that fit ``width`` characters.

    If they do not, headers break at their spaces and the columns of ``text`` wrap, then the groups of ``optional`` headers go,
    in this order.
    """
    room = width + 1
    if sum(PADDING + max(map(len, [header, *cells])) for header, cells in columns.items()) <= room:
        return columns
    broken = {header.replace(" ", "\n").replace("\n%", " %"): cells for header, cells in columns.items()}
    for names in optional:
        if sum(PADDING + _least_width(header, cells, header in text) for header, cells in broken.items()) > room:
            broken = {header: cells for header, cells in broken.items() if header.replace("\n", " ") not in names}
    return broken


def with_columns(title: str, headers: Sequence[str], text: Collection[str]) -> "Table":
    """Returns a table without rows. In a terminal that is still too narrow the columns of ``text`` wrap, numbers do not."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        is_text = header in text
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not is_text, vertical="bottom")
    return table


def _least_width(header: str, cells: list[str], is_text: bool) -> int:
    whole = max(map(len, [*header.split("\n"), *cells]))
    return max([min(whole, TEXT_WIDTH), *(len(word) for cell in cells for word in cell.split())]) if is_text else whole
