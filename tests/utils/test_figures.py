"""What plots share: few series in a panel, styles that differ without color, intervals that do not cover each other."""

import pytest

from hf_linattn.utils.figures import STYLES, draw_intervals, panels_of

plt = pytest.importorskip("matplotlib.pyplot")


def test_no_panel_has_more_series_than_there_are_styles() -> None:
    names = [str(i) for i in range(13)]
    panels = panels_of(names)
    assert [name for panel in panels for name in panel] == names
    assert max(map(len, panels)) <= len(STYLES) and max(map(len, panels)) - min(map(len, panels)) <= 1
    assert panels_of([]) == [[]]


def test_styles_differ_in_black_and_white() -> None:
    assert len({style["marker"] for style in STYLES}) == len({str(style["linestyle"]) for style in STYLES}) == 5


@pytest.mark.parametrize("rows", [False, True])
def test_intervals_of_a_place_lie_side_by_side(rows: bool) -> None:
    figure, axes = plt.subplots()
    series = {name: [(0.5, 0.4, 0.6), None if name == "b" else (0.7, None, None)] for name in "abc"}
    draw_intervals(axes, ["first", "second"], series, rows=rows)
    points = [container.lines[0] for container in axes.containers]
    places = [line.get_ydata() if rows else line.get_xdata() for line in points]
    assert [len(place) for place in places] == [2, 1, 2]
    firsts = [place[0] for place in places]
    assert firsts == sorted(set(firsts)) and max(map(abs, firsts)) < 0.5
    plt.close(figure)
