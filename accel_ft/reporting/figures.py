"""The report's pictures; each function returns a matplotlib figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from accel_ft.reporting.record import Record, scores_of

TRAIN_CURVES = ("loss", "learning_rate", "grad_norm", "samples_per_second")
TICKS_AT_MOST, MARKED_POINTS = 30, 25


def curves(records: Sequence[Record]) -> dict[str, Figure]:
    """Return figures over updates, keyed train_<curve> and eval_<metric>; each shows all runs."""
    evaluated = (event for record in records for event in record.of("eval"))
    scores = dict.fromkeys(key for event in evaluated for key in scores_of(event))  # each once
    wanted = [("train", key) for key in TRAIN_CURVES] + [("eval", f"eval_{key}") for key in scores]
    drawn = {}
    for event, key in wanted:
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.subplots()
        for record in records:
            points = [(e["step"], e[key]) for e in record.of(event) if e.get(key) is not None]
            marker = "o" if len(points) < MARKED_POINTS else None  # a single point has no line
            steps, found = [step for step, _ in points], [value for _, value in points]
            axes.plot(steps, found, label=_plain(record.name), linewidth=1.2, marker=marker)
        title = key.replace("eval_", "validation ").replace("_", " ")
        axes.set(title=title, xlabel="update")
        axes.grid(alpha=0.3)
        if len(records) > 1:
            axes.legend(fontsize=8)
        drawn[f"{event}_{key.removeprefix('eval_')}"] = figure
    return drawn


def _plain(name: str) -> str:
    """Escape a legend's name: matplotlib reads $ as a formula and hides names that begin with _."""
    return (" " * name.startswith("_")) + name.replace("$", r"\$")


def confusion(matrix: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """Draw a confusion matrix: the colour is the share of a label's samples, the text a count."""
    size = min(max(4.0, 0.6 * len(names) + 2), 14.0)
    figure = Figure(figsize=(size, size * 0.9), layout="constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= TICKS_AT_MOST:
        shown = [name if len(name) <= 24 else name[:23] + "…" for name in names]
        axes.set_xticks(range(len(names)), shown, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(names)), shown, parse_math=False)
        for (row, column), count in np.ndenumerate(matrix):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
    axes.set(xlabel="prediction", ylabel="label")
    return figure


def values(labels: NDArray[np.float32], predictions: NDArray[np.float32]) -> Figure:
    """Draw a regression's predictions against the labels."""
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(labels, predictions, s=8, alpha=0.5)
    ends = [float(labels.min()), float(labels.max())]
    axes.plot(ends, ends, color="grey", linewidth=1, linestyle="--")
    axes.set(xlabel="label", ylabel="prediction")
    axes.grid(alpha=0.3)
    return figure


def reliability(rows: NDArray[np.float64], error: float) -> Figure:
    """Draw accuracy against confidence, and below it the share of the samples in each bin."""
    figure = Figure(figsize=(4.4, 4.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
    upper.plot(rows[:, 0], rows[:, 1], marker="o")
    upper.set(ylabel="accuracy", title=f"expected calibration error {error:.3f}", xlim=(0, 1))
    lower.bar(rows[:, 0], rows[:, 2], width=0.04)
    lower.set(xlabel="confidence", ylabel="share")
    upper.grid(alpha=0.3)
    return figure
