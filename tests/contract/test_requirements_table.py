"""docs/requirements.md: one truthful line for every row the product must have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "A": 12,
    "B": 15,
    "C": 8,
    "D": 6,
    "E": 10,
    "F": 5,
    "G": 5,
    "H": 3,
    "I": 3,
    "K": 1,
    "X": 10,
}
IDS = [f"{letter}{i}" for letter, count in GROUPS.items() for i in range(1, count + 1)]
STATUSES = {"works", "partly", "open"}


def table() -> list[list[str]]:
    """The cells of every row of the table, headings left out."""
    lines = (ROOT / "docs/requirements.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in lines if line.startswith("|")]  # fmt: skip
    return [row for row in rows if re.fullmatch(r"[A-Z]\d+", row[0])]


def test_every_id_has_exactly_one_line_in_order() -> None:
    assert [row[0] for row in table()] == IDS


def test_columns_and_statuses() -> None:
    for row in table():
        assert len(row) == 6, row
        assert row[1] and row[2] in STATUSES, row


def named(cell: str) -> list[str]:
    """Paths between backticks in a cell."""
    return [text.split("::")[0] for text in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_files_named_exist(row: list[str]) -> None:
    missing = [path for cell in row[3:5] for path in named(cell) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_what_works_is_shown_by_file_test_and_command(row: list[str]) -> None:
    if row[2] == "open":
        return
    assert named(row[3]), f"{row[0]} is {row[2]} and names no file"
    assert row[5], f"{row[0]} is {row[2]} and has no command"
    if row[2] == "works":
        assert named(row[4]), f"{row[0]} works and names no test"


def test_the_table_speaks_of_the_present() -> None:
    text = (ROOT / "docs/requirements.md").read_text(encoding="utf-8")
    assert "#" not in re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
