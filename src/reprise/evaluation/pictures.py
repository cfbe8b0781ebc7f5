"""Pictures of an evaluation as PNG bytes: confusion matrix, per-class F1, learning curves.

Drawn by Agg without pyplot, so nothing global is touched; the same figures give the same bytes under the same libraries. Class
names are shown as they are (no formula is read into a ``$``) and cut where they are long.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from reprise.evaluation.metrics import ClassMetrics

Curves = Mapping[str, Sequence[tuple[int, float]]]

DOTS_PER_INCH = 130
MAX_CLASSES_DRAWN = 150
MAX_NAME_LENGTH = 34
SATURATED_ERROR_SHARE = 0.25  # from this share of a class's rows on, an error has the full colour


PAPER, INK, FAINT, LINE = "#ffffff", "#1b2430", "#5b6675", "#e3e8ee"
HIT, MISS = "#2f6fde", "#d9480f"
SERIES = (HIT, MISS, "#0f8a63", "#8a4fc7")


def neighbours_first(matrix: NDArray[np.int64]) -> list[int]:
    """An order of the classes in which those that are mistaken for each other stand side by side.

    Pairs are joined into chains, the most confused first, as long as both are ends of different chains (the greedy path of the
    travelling salesman); chains then follow by their number of errors.
    """
    errors = matrix + matrix.T
    np.fill_diagonal(errors, 0)
    chain_of = {c: [c] for c in range(len(matrix))}
    upper = np.triu(errors)
    for flat in np.argsort(-upper, axis=None, kind="stable")[: int((upper > 0).sum())]:
        one, other = (int(c) for c in np.unravel_index(flat, upper.shape))
        left, right = chain_of[one], chain_of[other]
        if left is right or one not in (left[0], left[-1]) or other not in (right[0], right[-1]):
            continue
        joined = (left if left[-1] == one else left[::-1]) + (right if right[0] == other else right[::-1])
        chain_of.update(dict.fromkeys(joined, joined))
    chains = {id(chain): chain for chain in chain_of.values()}.values()
    ranked = sorted(chains, key=lambda chain: (-int(errors[chain].sum()), chain[0]))
    return [c for chain in ranked for c in chain]


def draw_confusion_matrix(matrix: NDArray[np.int64], class_names: Sequence[str]) -> bytes:
    """The confusion matrix, rows true and columns predicted; errors carry their count and another colour than hits.

    Of more than ``MAX_CLASSES_DRAWN`` classes those with the most errors are drawn; the title says so.
    """
    order = neighbours_first(matrix)
    title = f"{_count(int(matrix.sum()), 'row')}, {_count(int(matrix.sum() - np.trace(matrix)), 'error')}"
    if len(order) > MAX_CLASSES_DRAWN:
        errors = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diagonal(matrix)
        kept = set(np.argsort(-errors, kind="stable")[:MAX_CLASSES_DRAWN].tolist())
        order = [c for c in order if c in kept]
        title += f"; the {MAX_CLASSES_DRAWN} of {len(matrix)} classes with the most errors"
    support = matrix.sum(axis=1)[order]
    shown = matrix[np.ix_(order, order)]
    shares = shown / np.maximum(support, 1)[:, None]
    names = [shorten(class_names[c]) for c in order]

    num = len(order)
    cell = float(np.clip(9 / num, 0.155, 0.6))  # inches
    label_size = float(np.clip(cell * 45, 6.8, 9))
    margin = 0.35 + label_size * 0.0078 * max(map(len, names))
    side = cell * num
    figure = _figure(side + margin + 0.3, side + margin + 0.5)
    width, height = figure.get_size_inches()
    axes = figure.add_axes((margin / width, margin / height, side / width, side / height))
    axes.imshow(_cell_colours(shares), interpolation="nearest", aspect="equal")
    _name_ticks(axes, names, label_size)
    edges = np.arange(num + 1) - 0.5
    axes.hlines(edges, -0.5, num - 0.5, color=LINE, linewidth=0.5)
    axes.vlines(edges, -0.5, num - 0.5, color=LINE, linewidth=0.5)
    axes.set_xlim(-0.5, num - 0.5)
    axes.set_ylim(num - 0.5, -0.5)
    axes.set_xlabel("predicted", color=FAINT, fontsize=label_size + 1)
    axes.set_ylabel("label", color=FAINT, fontsize=label_size + 1)
    axes.set_title(title, color=INK, fontsize=label_size + 2, loc="left")
    _write_counts(axes, shown, shares, float(np.clip(cell * 34, 5, 10)))
    _plain(axes)
    return _png(figure)


def draw_per_class_f1(per_class: Sequence[ClassMetrics]) -> bytes:
    """F1 of each class as a bar, the lowest on top, with precision and recall as marks; at most ``MAX_CLASSES_DRAWN``."""
    ranked = sorted(per_class, key=lambda row: (row["f1"], row["label"]))[:MAX_CLASSES_DRAWN]
    names = [f"{shorten(row['label'])}  ({row['support']})" for row in ranked]
    places = np.arange(len(ranked))
    height = 0.175 * len(ranked) + 1.1
    figure = _figure(8.2, height)
    margin = 0.2 + 0.06 * max(map(len, names))
    axes = figure.add_axes((margin / 8.2, 0.4 / height, (8.0 - margin) / 8.2, (height - 1.1) / height))
    mean = float(np.mean([row["f1"] for row in per_class]))
    colours = [MISS if row["f1"] < mean - 0.1 else HIT for row in ranked]
    axes.barh(places, [row["f1"] for row in ranked], height=0.62, color=colours, alpha=0.55)
    axes.plot([row["precision"] for row in ranked], places, linestyle="", marker="|", markersize=7, color=INK)
    axes.plot([row["recall"] for row in ranked], places, linestyle="", marker=".", markersize=5, color=INK)
    axes.axvline(mean, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1.02)
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_yticks(places)
    axes.set_yticklabels(names, fontsize=7.5, parse_math=False)
    axes.tick_params(axis="x", labelsize=8, labeltop=True)
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    title = f"F1 of each class (rows); | precision, · recall; dashed: mean {mean:.3f}"
    axes.set_title(title, color=INK, fontsize=9, loc="right", pad=18)
    _plain(axes)
    return _png(figure)


def draw_learning_curves(curves: Curves, best_step: int | None) -> bytes:
    """Loss beside validation scores over optimizer steps; the step whose weights were kept is marked.

    ``curves`` maps metric keys (``train/loss``, ``validation/macro_f1``) to (step, value) points; others are left out.
    """
    losses = {name: points for name, points in curves.items() if name.endswith("/loss") and points}
    scores = {
        name: points
        for name, points in curves.items()
        if name.startswith("validation/") and name.endswith(("accuracy", "macro_f1")) and points
    }
    figure = _figure(9.4, 3.7)
    left, right = figure.subplots(1, 2)
    for axes, series, title in ((left, losses, "loss (nats)"), (right, scores, "validation score")):
        axes.set_title(title, color=INK, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", color=FAINT, fontsize=8.5)
        axes.grid(color=LINE, linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        _plain(axes)
        if not series:
            axes.text(0.5, 0.5, "nothing was logged", transform=axes.transAxes, ha="center", color=FAINT, fontsize=9)
            continue
        for (name, points), colour in zip(sorted(series.items()), SERIES, strict=False):
            _draw_curve(axes, name, points, colour)
        if best_step is not None:
            axes.axvline(best_step, color=FAINT, linewidth=0.9, linestyle=(0, (3, 3)), label=f"kept: step {best_step:,}")
        legend = axes.legend(fontsize=8, frameon=False)
        for text in legend.get_texts():
            text.set_color(INK)
    figure.tight_layout()
    return _png(figure)


def shorten(name: str, length: int = MAX_NAME_LENGTH) -> str:
    """The name on one line, cut in its middle where it is longer than ``length``: endings often tell classes apart."""
    name = " ".join(name.split())
    if len(name) <= length:
        return name
    tail = (length - 1) // 2
    return f"{name[: length - 1 - tail]}…{name[len(name) - tail :]}"


def _cell_colours(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB of each cell, float64 [C, C, 3]: hits by recall in one colour, errors by their share of the row in another."""
    paper, hit, miss = (np.array(to_rgb(colour)) for colour in (PAPER, HIT, MISS))
    strength = np.where(shares > 0, 0.22 + 0.78 * np.minimum(shares / SATURATED_ERROR_SHARE, 1), 0)
    diagonal = np.eye(len(shares), dtype=bool)
    strength[diagonal] = 0.75 * np.diagonal(shares)
    full = np.where(diagonal[..., None], hit, miss)
    colours: NDArray[np.float64] = paper + strength[..., None] * (full - paper)
    return colours


def _write_counts(axes: Axes, shown: NDArray[np.int64], shares: NDArray[np.float64], size: float) -> None:
    for row, column in np.argwhere(shown > 0).tolist():
        strong = row != column and shares[row, column] > 0.6 * SATURATED_ERROR_SHARE
        colour = PAPER if strong else INK
        axes.text(column, row + 0.03, str(shown[row, column]), ha="center", va="center", fontsize=size, color=colour)


def _draw_curve(axes: Axes, name: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    steps, values = np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=np.float64)
    marker = "o" if len(points) <= 40 else ""
    if name.startswith("train/") and len(points) > 40:  # a loss per batch is noise around what the eye looks for
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        window = max(5, len(points) // 25)
        values = np.convolve(values, np.ones(window) / window, mode="valid")
        steps = steps[window // 2 :][: len(values)]  # centred: a mean of the past alone would lag behind
        name = f"{name} (mean of {window})"
    axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=name)


def _name_ticks(axes: Axes, names: Sequence[str], size: float) -> None:
    places = range(len(names))
    axes.set_xticks(places)
    axes.set_xticklabels(names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(places)
    axes.set_yticklabels(names, fontsize=size, parse_math=False)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Axes) -> None:
    axes.set_facecolor(PAPER)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for spine in axes.spines.values():
        spine.set_color(LINE)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A class name in a script that the font lacks: boxes are drawn, and the page beside the picture has the name.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font", category=UserWarning)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
