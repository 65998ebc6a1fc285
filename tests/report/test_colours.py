"""Colours of reports, as readers with every kind of colour vision see them.

The matrices of Machado, Oliveira and Fernandes (2009, severity 1.0) simulate dichromacy on linear RGB. Differences are
Euclidean in CIE Lab (D65), where about 2.3 are just noticeable.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoplan.cost_models.arrays import Array
from autoplan.pages.figures import COLOURS, INK, SHADES

_VISION = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = np.array([0.95047, 1.0, 1.08883])


def seen(colour: str, vision: str) -> Array:
    """Return a colour (`#0072b2`) as linear RGB after the loss of a kind of cone."""
    coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    out: Array = np.clip(np.array(_VISION[vision]) @ linear, 0, 1)
    return out


def lab(linear: Array) -> Array:
    """Return the CIE Lab coordinates of a colour in linear RGB."""
    xyz = _XYZ @ linear / _WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str, vision: str) -> float:
    """Return the contrast of two colours, as WCAG 2.2 counts it."""
    light = sorted(float(_XYZ[1] @ seen(c, vision)) + 0.05 for c in (one, other))
    return light[1] / light[0]


@pytest.mark.parametrize("vision", _VISION)
def test_all_colours_of_figures_are_told_apart(vision: str) -> None:
    apart = {
        (a, b): float(np.linalg.norm(lab(seen(a, vision)) - lab(seen(b, vision))))
        for a, b in itertools.combinations(COLOURS, 2)
    }
    assert min(apart.values()) > 15, min(apart, key=lambda pair: apart[pair])


@pytest.mark.parametrize("vision", _VISION)
def test_letters_are_read_on_every_shade_of_a_heatmap(vision: str) -> None:
    shades = [colour for _, colour in SHADES]
    assert all(contrast(INK, shade, vision) > 4.5 for shade in shades)
    light = [float(lab(seen(shade, vision))[0]) for shade in shades]
    assert all(a - b > 5 for a, b in itertools.pairwise(light))  # more is darker
