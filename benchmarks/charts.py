"""What a figure shows, as values; ``svg.py`` draws it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """One line.

    Attributes
    ----------
    label : str
        Lines of one label share a colour; the legend has it once.
    x, y : tuple of float
        Points that are not finite are left out.
    thick : bool
        A median is thick, one seed thin.
    steps : bool
        Each value holds until the next one.
    markers : bool
        Points without a line between them.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    thick: bool = True
    steps: bool = False
    markers: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines in one pair of axes.

    Attributes
    ----------
    title, x_label, y_label : str
    lines : tuple of Line
    log_x, log_y : bool
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """Stacked bars.

    Attributes
    ----------
    title, y_label : str
    groups : tuple of str
        One bar each.
    parts : dict of str to tuple of float
        What each bar is made of, from below; one number per bar.
    stacked : bool
        Otherwise the parts stand side by side.
    """

    title: str
    y_label: str
    groups: tuple[str, ...]
    parts: dict[str, tuple[float, ...]]
    stacked: bool = True


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure and what must be said of it.

    Attributes
    ----------
    name : str
        Of its file.
    caption : str
        What it shows and how that differs from the paper's figure.
    panels : tuple of Chart or Bars
    """

    name: str
    caption: str
    panels: tuple[Chart | Bars, ...]
