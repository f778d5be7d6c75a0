"""Write one self-contained report.html about one or more runs, and its pictures as PNGs."""

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from accel_ft.errors import require
from accel_ft.metrics import by_blocks, confusion_matrix, sigmoid, softmax
from accel_ft.reporting.record import Record, calibration, intervals, read_record, results
from accel_ft.runtime.files import refuse_links, write_whole
from accel_ft.runtime.logging import MEASURED

MISTAKES_SHOWN, CONFUSIONS_SHOWN, TEXT_SHOWN = 40, 20, 2000
DRAWN_AT_MOST = 300  # labels of a confusion matrix
DPI = 130


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write the report of one run, or of several, whose curves share figures.

    Args:
        folders: the runs' folders.
        output: folder for report.html; the PNGs go into its subfolder report/.

    Raises:
        ConfigError: a folder holds no run, a library is missing, or report/ is a symbolic link.
    """
    records = [read_record(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):
        records = [
            replace(record, name=str(folder))
            for record, folder in zip(records, folders, strict=True)
        ]
    require("report", "the report", "matplotlib", "jinja2")
    import jinja2

    from accel_ft.reporting import figures

    pictures = figures.curves(records)
    curves = list(pictures)
    shown = [_about(record) for record in records]
    for number, about in enumerate(shown):
        for kind in ("confusion", "reliability", "values"):
            if kind in about:
                pictures[f"{kind}_{number}"] = getattr(figures, kind)(*about[kind])
    refuse_links(output / "report")
    (output / "report").mkdir(parents=True, exist_ok=True)
    images = {}
    for name, figure in pictures.items():
        file, image = output / "report" / f"{name.replace('/', '_')}.png", io.BytesIO()
        with warnings.catch_warnings():  # the font may lack a label's glyphs; the page has them
            warnings.filterwarnings("ignore", "Glyph")
            figure.savefig(image, dpi=DPI)
        write_whole(file, image.getbuffer())
        images[name] = base64.b64encode(image.getbuffer()).decode()
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    page = jinja2.Template(template, autoescape=True, trim_blocks=True).render(
        runs=shown, images=images, curves=curves, text=_text, shortened=_shortened,
        metrics=dict.fromkeys(key for run in shown for key in run["scores"]),
        most=figures.TICKS_AT_MOST,
    )  # fmt: skip
    write_whole(output / "report.html", page)
    return output / "report.html"


def _about(record: Record) -> dict[str, Any]:
    """Return the template's variables for one run."""
    end = record.of("end")
    scores, split = results(record.events)
    state = f"ended at update {end[-1]['step']}" if end else "has not ended"
    if end and end[-1]["model_step"] != end[-1]["step"]:
        state += f", the model is that of update {end[-1]['model_step']}"
    about: dict[str, Any] = {
        **vars(record),
        "rows": split,
        "tuned": " (which thresholds are tuned on)"
        * ("thresholds" in record.predictions and split == "validation"),
        "state": state,
        "timeline": [event for event in record.events if event["event"] not in MEASURED],
        "scores": scores,
        "mistakes": record.mistakes[:MISTAKES_SHOWN],
    }
    if record.predictions:
        about |= _about_predictions(record)
    return about


def _text(value: Any) -> Any:
    """Return a table cell's text: a tree as YAML, which is easier to read than its repr."""
    if isinstance(value, str | int):
        return value
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).removesuffix("...\n")


def _shortened(text: Any) -> Any:
    """Return a text, or a pair of texts, each cut to TEXT_SHOWN characters."""
    if isinstance(text, list):
        return [_shortened(part) for part in text]
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]} ..."


def _about_predictions(record: Record) -> dict[str, Any]:
    logits, labels = record.predictions["logits"], record.predictions["labels"]
    names = record.receipt["identity"]["labels"]
    if labels.ndim == 1 and labels.dtype.kind == "f":
        return {"values": (labels, logits[:, 0])}
    about: dict[str, Any] = {}
    if labels.ndim == 1:
        predicted = logits.argmax(axis=1)
        hits, present, chosen = (
            np.bincount(each, minlength=len(names))
            for each in (labels[labels == predicted], labels, predicted)
        )
        confidence = by_blocks(lambda some: softmax(some).max(axis=1), logits)
        if len(names) <= DRAWN_AT_MOST:
            about["confusion"] = confusion_matrix(labels, predicted, len(names)), names
        about["confusions"] = _confusions(labels, predicted, names)
        about["reliability"] = calibration(confidence, predicted == labels)
    else:
        probabilities, actual = sigmoid(logits), labels > 0.5
        found = probabilities >= record.predictions["thresholds"]
        hits, present, chosen = (found & actual).sum(0), actual.sum(0), found.sum(0)
        about["reliability"] = calibration(probabilities.ravel(), actual.ravel())
        about["thresholds"] = record.predictions["thresholds"].tolist()
    about["classes"] = [
        {"label": name, "support": count} | intervals(hit, count, predicted, len(labels))
        for name, hit, count, predicted in zip(names, hits, present, chosen, strict=True)
    ]
    return about


def _confusions(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], names: Sequence[str]
) -> list[tuple[str, str, int, float]]:
    """Return the most frequent confusions: label, prediction, rows, share of the label's rows."""
    pairs = np.stack([labels, predicted], axis=1)[labels != predicted]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    present = np.bincount(labels, minlength=len(names))
    return [
        (names[label], names[other], int(count), count / present[label])
        for (label, other), count in sorted(
            zip(found.tolist(), counts, strict=True), key=lambda each: -each[1]
        )[:CONFUSIONS_SHOWN]
    ]
