"""What an evaluation says, from one table of logits and labels: `evaluate.Metric` subclasses and
what they compute.

Legend: n samples, C classes. `evaluate.load("accuracy")` needs the network; these need none.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray


def confusion_matrix(
    labels: NDArray[np.int64], predictions: NDArray[np.int64], num_labels: int
) -> NDArray[np.int64]:
    """Count samples by (label, prediction), int64 [C, C]."""
    cells = np.bincount(labels * num_labels + predictions, minlength=num_labels**2)
    return cells.reshape(num_labels, num_labels).astype(np.int64)


def per_class_scores(matrix: NDArray[np.int64]) -> dict[str, list[float]]:
    """Precision, recall and F1 of each class, 0 where nothing was predicted or present, and the
    number of samples.

    Args:
        matrix: confusion matrix [C, C], rows are labels.
    """
    hits = np.diag(matrix).astype(np.float64)
    present, predicted = matrix.sum(axis=1), matrix.sum(axis=0)
    return {
        "precision": (hits / np.maximum(predicted, 1)).tolist(),
        "recall": (hits / np.maximum(present, 1)).tolist(),
        "f1": (2 * hits / np.maximum(present + predicted, 1)).tolist(),
        "support": present.tolist(),
    }


def cross_entropy(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Mean negative log-likelihood in nats; logits [n, C], labels [n]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return float(np.mean(log_sum - shifted[np.arange(len(labels)), labels]))


class _ClassificationMetric(evaluate.Metric):  # type: ignore[misc]
    """Predictions and references are label ids 0..C-1; `num_labels` is C."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="predictions, references: label ids; num_labels: their number",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    @staticmethod
    def _matrix(predictions: Any, references: Any, num_labels: int) -> NDArray[np.int64]:
        return confusion_matrix(
            np.asarray(references, np.int64), np.asarray(predictions, np.int64), num_labels
        )


class Accuracy(_ClassificationMetric):
    """Share of samples whose prediction is their label."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, Any]:
        matrix = self._matrix(predictions, references, num_labels)
        return {"accuracy": float(np.trace(matrix) / matrix.sum())}


class MacroF1(_ClassificationMetric):
    """Mean over the classes of F1."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, Any]:
        return {
            "f1_macro": float(
                np.mean(per_class_scores(self._matrix(predictions, references, num_labels))["f1"])
            )
        }


class PerClass(_ClassificationMetric):
    """Precision, recall, F1 and support of each class."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, Any]:
        return {"per_class": per_class_scores(self._matrix(predictions, references, num_labels))}


def classification_metrics(
    logits: NDArray[Any], labels: NDArray[np.int64], label_names: list[str]
) -> dict[str, Any]:
    """Compute every metric of an evaluation.

    Args:
        logits: [n, C].
        labels: label ids, int64 [n].
        label_names: by id, C of them.

    Returns:
        loss, accuracy, f1_macro: numbers; per_class: label name -> precision, recall, f1, support.
    """
    ids = {
        "predictions": logits.argmax(axis=1),
        "references": labels,
        "num_labels": len(label_names),
    }
    scores: dict[str, Any] = {"loss": cross_entropy(logits.astype(np.float64), labels)}
    for metric in (Accuracy, MacroF1, PerClass):
        scores |= metric(keep_in_memory=True).compute(**ids)
    table = scores.pop("per_class")
    scores["per_class"] = {
        name: {column: values[row] for column, values in table.items()}
        for row, name in enumerate(label_names)
    }
    return scores
