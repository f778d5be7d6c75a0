"""Read a run's folder once: settings, receipt, events, predictions, mistakes; and score them."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from accel_ft.runtime.logging import read_events
from accel_ft.settings import read_receipt, read_settings

logger = logging.getLogger(__name__)

CALIBRATION_BINS = 15
DRAWS = 10_000


@dataclass(frozen=True)
class Record:
    """A run as it stands on the disk.

    Attributes:
        name: the folder's name.
        settings: from config.yaml.
        receipt: from receipt.json.
        events: from metrics.jsonl.
        predictions: arrays of predictions.npz, such as `logits` float32 [n, C], `rows` int64 [n],
            `labels` int64 [n] (regression float32 [n], multi-label [n, C]); {} before the end.
        mistakes: from mistakes.jsonl.
    """

    name: str
    settings: dict[str, Any]
    receipt: dict[str, Any]
    events: list[dict[str, Any]]
    predictions: dict[str, NDArray[Any]]
    mistakes: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [each for each in self.events if each["event"] == event]


def scores_of(event: dict[str, Any], with_unknown: bool = False) -> dict[str, Any]:
    """Return the metrics of an eval, test or end event, by name. `with_unknown` includes metrics
    that are None: those of a model that returns NaN.
    """
    return {
        key.partition("_")[2]: value
        for key, value in event.items()
        if key.startswith(("eval_", "test_"))
        and (isinstance(value, float) or (with_unknown and value is None))
        and not key.endswith("_seconds")
    }


def results(events: Iterable[dict[str, Any]]) -> tuple[dict[str, float], str]:
    """Return the metrics of a run's final model, or of its newest evaluation if it has not ended,
    and the split they were measured on: "test" if there is a test event, else "validation".
    """
    newest = {event["event"]: event for event in events}
    found = next((newest[kind] for kind in ("test", "end", "eval") if kind in newest), {})
    return scores_of(found), "test" if "test" in newest else "validation"


def read_record(folder: Path) -> Record:
    """Read a run's folder.

    Raises:
        ConfigError: the folder holds no run.
    """
    events = list(read_events(folder / "metrics.jsonl"))
    receipt, settings = read_receipt(folder), read_settings(folder / "config.yaml")
    predictions, mistakes = {}, []
    try:
        if (folder / "predictions.npz").is_file():
            with (folder / "predictions.npz").open("rb") as file:  # closed even on an error
                predictions = dict(np.load(file))
        if (folder / "mistakes.jsonl").is_file():
            with (folder / "mistakes.jsonl").open(encoding="utf-8") as lines:  # U+2028 ends no line
                mistakes = [json.loads(line) for line in lines]
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        logger.warning("%s: its predictions or mistakes cannot be read (%s)", folder, error)
    name = folder.resolve().name
    return Record(name, settings, receipt, events, predictions, mistakes)


def calibration(
    confidence: NDArray[np.float64], correct: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], float]:
    """Return the points of a reliability diagram, and the expected calibration error.

    Source: Guo et al., arXiv:1706.04599, with 15 bins of equal width.

    Returns:
        float64 [number of bins with samples, 3]: mean confidence, accuracy, share of the samples;
        and |confidence - accuracy| of the bins, averaged over the samples.
    """
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    rows = np.array(
        [
            [confidence[bins == b].mean(), correct[bins == b].mean(), (bins == b).mean()]
            for b in np.unique(bins)
        ]
    )
    return rows, float((np.abs(rows[:, 0] - rows[:, 1]) * rows[:, 2]).sum())


def intervals(
    hits: int, present: int, predicted: int, total: int
) -> dict[str, tuple[float, float, float]]:
    """Return one class's scores and their 95 % intervals, from the posterior of the four counts
    under Jeffreys' prior. It holds for few samples, also if none or all are hits. Each interval is
    widened to include the score.

    Source: Goutte and Gaussier, A probabilistic interpretation of precision, recall and F-score.

    Args:
        hits: number of samples of the class that were predicted as it.
        present, predicted: number of samples of the class; of samples predicted as it.
        total: number of all samples.

    Returns:
        precision, recall, f1: the score, the lower and the upper end of its interval.
    """
    from accel_ft.metrics import class_scores  # it imports `evaluate`, which is slow

    counts = np.array([hits, present - hits, predicted - hits, total - present - predicted + hits])
    drawn = np.random.default_rng(0).dirichlet(counts + 0.5, DRAWS) * 1e9  # class_scores clips at 1
    hit, missed, false, _ = np.vstack([counts, drawn]).T
    scores = class_scores(hit, hit + missed, hit + false)
    found = {}
    for key in ("precision", "recall", "f1"):
        estimate, *others = scores[key]
        low, high = np.quantile(others, [0.025, 0.975]).tolist()
        found[key] = (estimate, min(low, estimate), max(high, estimate))
    return found
