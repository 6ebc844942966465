"""Curves: lines worked out by hand, and a picture that can be read back."""

import math
from pathlib import Path

import pytest

from trl.cli.curve import BLOCKS, PLAIN, draw_curve, resample, save_curve, terminal_characters


def test_levels_rise_from_one_step_to_all() -> None:
    # two lines of three steps each, so levels from 1 to 6: 1, 1 + 0.4 * 5 = 3, 6
    assert draw_curve([0.0, 0.4, 1.0], height=2, characters=PLAIN) == [
        "       1 |  #",
        "       0 |.##",
    ]


def test_blocks_fill_from_below() -> None:
    top, bottom = draw_curve([0.0, 1.0], height=2)
    assert top == "       1 | █"
    assert bottom == "       0 |▁█"


def test_a_constant_curve_is_a_flat_line() -> None:
    assert draw_curve([2.0, 2.0], height=3) == ["         |", "         |", "       2 |▁▁"]


def test_noise_does_not_fill_a_scale_that_is_given() -> None:
    # two lines of three steps: 0.5 is level 1 + round(0.5 * 5) = 3, 0.52 is 1 + round(2.6) = 4, 0.58 is 1 + round(2.9)
    assert draw_curve([0.5, 0.52, 0.58], height=2, characters=PLAIN, low=0.0, high=1.0) == [
        "       1 | ..",
        "       0 |###",
    ]


def test_a_constant_curve_stands_at_its_place_on_the_scale() -> None:
    assert draw_curve([1.0, 1.0], height=2, characters=PLAIN, low=0.0) == ["       1 |##", "       0 |##"]
    assert draw_curve([1.0, 1.0], height=2, characters=PLAIN, high=2.0) == ["       2 |", "       1 |.."]


def test_no_scale_cuts_a_curve_off() -> None:
    values = [-1.0, 0.2, 3.0]
    assert draw_curve(values, low=0.0, high=1.0) == draw_curve(values)
    assert draw_curve(values, low=5.0) == draw_curve(values, high=5.0)


def test_values_that_are_not_numbers_are_left_out() -> None:
    assert draw_curve([None, 0.0, math.nan, 1.0, math.inf]) == draw_curve([0.0, 1.0])
    assert draw_curve([None, math.nan]) == []
    assert draw_curve([]) == []


def test_more_values_than_columns_are_averaged() -> None:
    assert resample([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert resample([1.0, 2.0, 6.0, 7.0, 8.0], 2) == [1.5, 7.0]
    assert resample([1.0, 2.0], 5) == [1.0, 2.0]
    lines = draw_curve([float(step) for step in range(1000)], width=40, height=5)
    assert len(lines) == 5
    assert max(len(line) for line in lines) == len("         |") + 40


def test_the_curve_is_the_same_after_scaling_but_for_its_labels() -> None:
    values = [0.1, 0.5, 0.2, 0.9]
    plain = [line.split("|")[1] for line in draw_curve(values)]
    assert [line.split("|")[1] for line in draw_curve([10 * value - 3 for value in values])] == plain


def test_characters_fit_the_terminal() -> None:
    assert terminal_characters("utf-8") == BLOCKS
    assert terminal_characters("ascii") == PLAIN
    assert terminal_characters(None) == PLAIN


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = save_curve([0.0, None, 1.0], tmp_path / "run" / "curve.png", steps=[10, 20, 30])
    assert target == tmp_path / "run" / "curve.png"
    assert target.read_bytes().startswith(b"\x89PNG")
