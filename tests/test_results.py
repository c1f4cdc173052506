"""The numbers of the documentation are those of the reports that it cites: each row of a table is a row of a report."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
# a number, and its interval where it has one
_ATOM = re.compile(rf"({_NUMBER.pattern})(?: \(({_NUMBER.pattern}) to ({_NUMBER.pattern})\))?")

Atom = tuple[str, ...]


def atoms(cells: list[str]) -> list[Atom]:
    """The numbers of these cells, each with its interval."""
    found = (match.groups() for cell in cells for match in _ATOM.finditer(cell))
    return [tuple(part.replace(",", "").lstrip("+") for part in groups if part) for groups in found]


def same(written: Atom, reported: Atom) -> bool:
    """Whether one is the other, rounded to as many digits as it has."""
    if len(written) > len(reported):
        return False
    # of a number with an interval, the page may leave out the interval
    for short, long in zip(written, reported, strict=False):
        digits = len(short.partition(".")[2])
        if abs(float(short) - float(long)) > 0.5 * 10**-digits + 1e-9:
            return False
    return True


def rows(text: str) -> list[list[str]]:
    """The cells of each row of each table, without the rows that name the columns."""
    tables = re.findall(r"(?m)^\|.*\n\| ---.*\n((?:\|.*\n?)+)", text)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def reports(page: Path, section: str) -> list[Path]:
    """The reports that a section links to, or makes by a command."""
    linked = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)\s#]+)", section)]
    made = [ROOT / path for path in re.findall(r"model_cards/[\w./-]+", section)]
    found = [path for base in [*linked, *made] for path in (base.with_suffix(".md"), base / "report.md")]
    return sorted({path for path in found if path.is_relative_to(ROOT / "model_cards") and path.is_file()})


def sections(page: Path) -> list[str]:
    return [part for part in re.split(r"(?m)^(?=#+ )", page.read_text()) if part.strip()]


CASES = [
    pytest.param(page, section, id=f"{page.stem}: {section.splitlines()[0].strip('# ')}")
    for page in PAGES
    for section in sections(page)
    if reports(page, section) and any(atoms(cells) for _, *cells in rows(section))
]


@pytest.mark.parametrize(("page", "section"), CASES)
def test_every_row_is_one_of_a_report(page: Path, section: str) -> None:
    # name of a row -> its numbers in all tables of all reports of the section
    reported: dict[str, list[Atom]] = defaultdict(list)
    for report in reports(page, section):
        for name, *cells in rows(report.read_text()):
            reported[name] += atoms(cells)
    for name, *cells in rows(section):
        wanted = atoms(cells)
        missing = {
            other: [atom for atom in wanted if not any(same(atom, one) for one in numbers)]
            for other, numbers in reported.items()
        }
        nearest = min(missing, key=lambda other: len(missing[other]))
        assert not missing[nearest], f"{name}: {nearest} has no {missing[nearest]}"


def test_there_are_results() -> None:
    assert len(CASES) > 10
