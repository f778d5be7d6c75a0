"""The metrics of an evaluation, from one table of logits and labels; those of label ids also as an
`evaluate.Metric`, `Classification`.

Legend: n samples, C classes. `evaluate.load("accuracy")` needs the network; these need none.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray

BLOCK_CELLS = 10**7


def confusion_matrix(
    labels: NDArray[np.int64], predictions: NDArray[np.int64], num_labels: int
) -> NDArray[np.int64]:
    """Count samples by (label, prediction), int64 [C, C]."""
    cells = np.bincount(labels * num_labels + predictions, minlength=num_labels**2)
    return cells.reshape(num_labels, num_labels).astype(np.int64)


def class_scores(
    hits: NDArray[Any], present: NDArray[Any], predicted: NDArray[Any]
) -> dict[str, list[float]]:
    """Return precision, recall, F1 and support of each class, from three counts per class, [C].
    A score is 0 where nothing was predicted or present.
    """
    return {
        "precision": (hits / np.maximum(predicted, 1)).tolist(),
        "recall": (hits / np.maximum(present, 1)).tolist(),
        "f1": (2 * hits / np.maximum(present + predicted, 1)).tolist(),
        "support": present.tolist(),
    }


def by_blocks(function: Callable[..., NDArray[Any]], *tables: NDArray[Any]) -> NDArray[Any]:
    """Apply `function` to tables [n, C] or [n], a block of rows at a time: a float64 copy of a
    large table might not fit into memory beside it.
    """
    size = max(1, BLOCK_CELLS // max(table[0].size for table in tables))
    starts = range(0, len(tables[0]), size)
    return np.concatenate(
        [function(*(t[start : start + size] for t in tables)) for start in starts]
    )


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of logits [n, C], float64 [n, C]."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


@np.errstate(invalid="ignore")  # rows may hold NaN or inf
def best_and_others(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return what `log_odds` needs of logits [n, C], float64 [n, 3]: the highest logit, then the
    sum of exp(logit - highest) over the other labels, and the logarithm of that sum.
    """
    values = logits.astype(np.float64)
    best = values.argmax(axis=1)[:, None]
    top = np.take_along_axis(values, best, axis=1)
    values -= top
    np.put_along_axis(values, best, -np.inf, axis=1)  # leaves the others
    log_sum = np.logaddexp.reduce(values, axis=1, keepdims=True)
    return np.hstack([top, np.exp(values).sum(axis=1, keepdims=True), log_sum])


@np.errstate(invalid="ignore", divide="ignore")
def log_odds(
    logits: NDArray[Any], top: NDArray[Any], others: NDArray[Any], log_others: NDArray[Any]
) -> NDArray[np.float64]:
    """Return log(p / (1 - p)) of one label's softmax probabilities p, float64 [n], from its logits
    and the columns of `best_and_others`, all [n]. Exact to rounding, even where p rounds to 1.
    """
    values = logits - top
    beside = values - np.log1p(others - np.exp(values))
    return np.where(values == 0, -log_others, beside)


def cross_entropy(logits: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log-likelihood of each row in nats, float64 [n]; logits [n, C], labels [n]."""
    values = logits.astype(np.float64)
    shifted = values - values.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return np.asarray(log_sum - shifted[np.arange(len(labels)), labels])


def binary_cross_entropy(logits: NDArray[Any], labels: NDArray[np.float32]) -> NDArray[np.float64]:
    """Mean of the loss over each row's labels, in nats, float64 [n]; logits and labels [n, C]."""
    values = logits.astype(np.float64)
    losses = np.maximum(values, 0) - values * labels + np.log1p(np.exp(-np.abs(values)))
    return np.asarray(losses.mean(axis=1))


class Classification(evaluate.Metric):  # type: ignore[misc]
    """Scores of predictions and references that are label ids 0..num_labels - 1."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="predictions, references: label ids; num_labels: their number",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, Any]:
        labels, found = np.asarray(references, np.int64), np.asarray(predictions, np.int64)
        hits, present, predicted = (
            np.bincount(ids, minlength=num_labels)
            for ids in (labels[labels == found], labels, found)
        )
        columns = class_scores(hits, present, predicted)
        occur = present + predicted > 0  # scikit-learn averages over these, too
        return {
            "accuracy": float(hits.sum() / len(labels)),
            "f1_macro": float(np.mean(np.array(columns["f1"])[occur])),
            "matthews_correlation": _matthews_correlation(hits, present, predicted),
            "per_class": columns,
        }


def _matthews_correlation(
    hits: NDArray[np.int64], present: NDArray[np.int64], predicted: NDArray[np.int64]
) -> float:
    """Return it, -1 to 1, from three counts [C]; 0 where labels or predictions are all the same.

    Source: Gorodkin, doi:10.1016/j.compbiolchem.2004.09.006.
    """
    total = float(present.sum())  # float: int64 would overflow at the fourth power
    both = hits.sum() * total - present @ predicted
    spread = (total**2 - present @ present) * (total**2 - predicted @ predicted)
    return float(both / spread**0.5) if spread > 0 else 0.0


def roc_auc(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the mean over labels of the area under the one-versus-rest ROC curve, 0 to 1: the
    probability that a row with the label scores above a row without it. Two exclusive labels have
    equal areas. Labels that all rows have, or none, are left out; 0.5 if no label remains.

    Args: as for `score`.
    """
    rest = by_blocks(best_and_others, logits).T if labels.ndim == 1 else None
    areas = []
    for label in range(logits.shape[1]):
        has = labels == label if labels.ndim == 1 else labels[:, label] > 0.5
        count = int(has.sum())
        if 0 < count < len(has):
            values = logits[:, label] if rest is None else log_odds(logits[:, label], *rest)
            ranked, own = np.sort(values), values[has]
            twice = ranked.searchsorted(own) + ranked.searchsorted(own, "right")  # a tie is half
            areas.append((twice.mean() - count) / 2 / (len(has) - count))
    return float(np.mean(areas)) if areas else 0.5


def score(
    logits: NDArray[Any],
    labels: NDArray[Any],
    label_names: list[str],
    thresholds: NDArray[np.float64] | None = None,
) -> dict[str, Any]:
    """Compute every metric of an evaluation.

    Args:
        logits: [n, C].
        labels: label ids, int64 [n]; multi-label: 0 or 1, float32 [n, C]; regression: float32
            [n].
        label_names: by id, C of them.
        thresholds: multi-label: probability from which each label counts, [C]; None for 0.5.

    Returns:
        Values by metric, loss included; per_class: label name -> precision, recall, f1, support.
    """
    if labels.dtype.kind == "i":
        scores: dict[str, Any] = {"loss": float(by_blocks(cross_entropy, logits, labels).mean())}
        ids = {"predictions": logits.argmax(axis=1), "references": labels}
        with tempfile.TemporaryDirectory() as folder:  # evaluate leaves an empty folder behind
            metric = Classification(keep_in_memory=True, cache_dir=folder)
            scores |= metric.compute(**ids, num_labels=len(label_names))
        scores["roc_auc"] = roc_auc(logits, labels)
    elif labels.ndim == 2:
        scores = multi_label_metrics(logits, labels, thresholds)
    else:
        return regression_metrics(logits[:, 0], labels)
    columns = scores.pop("per_class")  # put back below, as the last key
    scores["per_class"] = {
        name: {column: values[row] for column, values in columns.items()}
        for row, name in enumerate(label_names)
    }
    return scores


def sigmoid(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of independent logits, float64."""
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64).clip(-500, 500))))


def chosen_labels(
    logits: NDArray[Any], thresholds: NDArray[np.float64] | None
) -> NDArray[np.bool_]:
    """Return which labels each row is given in a multi-label problem, [n, C]."""
    least = 0.5 if thresholds is None else thresholds
    return by_blocks(lambda some: sigmoid(some) >= least, logits)


def multi_label_metrics(
    logits: NDArray[Any], labels: NDArray[np.float32], thresholds: NDArray[np.float64] | None = None
) -> dict[str, Any]:
    """Compute the metrics of a multi-label problem.

    Returns:
        loss: mean over rows and labels of the binary cross-entropy; accuracy: share of rows whose
        label set is fully right; f1_macro, f1_micro; roc_auc; per_class: as `class_scores`.
    """
    predicted = chosen_labels(logits, thresholds)
    actual = labels > 0.5
    hits = (predicted & actual).sum(axis=0)
    present, chosen = actual.sum(axis=0), predicted.sum(axis=0)
    columns = class_scores(hits, present, chosen)
    return {
        "loss": float(by_blocks(binary_cross_entropy, logits, labels).mean()),
        "accuracy": float((predicted == actual).all(axis=1).mean()),
        "f1_macro": float(np.mean(columns["f1"])),
        "f1_micro": float(2 * hits.sum() / max(present.sum() + chosen.sum(), 1)),
        "roc_auc": roc_auc(logits, labels),
        "per_class": columns,
    }


def best_thresholds(logits: NDArray[Any], labels: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the decision threshold of each label, [C]: the probability with the highest F1 on
    these rows, moved half-way to the next lower one; 0.5 for a label that no row has.
    """
    thresholds = np.full(labels.shape[1], 0.5)
    for label in range(labels.shape[1]):
        probabilities = sigmoid(logits[:, label])
        order = np.argsort(-probabilities, kind="stable")
        ranked, hits = probabilities[order], np.cumsum(labels[order, label] > 0.5)
        if hits[-1] == 0:
            continue
        f1 = 2 * hits / (np.arange(1, len(hits) + 1) + hits[-1])
        f1[:-1][ranked[:-1] == ranked[1:]] = 0.0  # no threshold separates ties
        cut = int(f1.argmax())
        below = ranked[cut + 1] if cut + 1 < len(ranked) else 0.0
        thresholds[label] = (ranked[cut] + below) / 2
    return thresholds


def regression_metrics(predictions: NDArray[Any], labels: NDArray[np.float32]) -> dict[str, Any]:
    """Compute the metrics of a regression, from predictions [n] and labels [n].

    Returns:
        loss: mean squared error; rmse: its root; mae: mean absolute error; pearson: correlation;
        spearmanr: that of the ranks; r2: share of the variance that is explained. Correlations
        are 0 if predictions or labels are constant, r2 if the labels are.
    """
    found, actual = predictions.astype(np.float64), labels.astype(np.float64)
    squared = float(((found - actual) ** 2).mean())
    return {
        "loss": squared,
        "rmse": squared**0.5,
        "mae": float(np.abs(found - actual).mean()),
        "pearson": _correlation(found, actual),
        "spearmanr": _correlation(_ranks(found), _ranks(actual)),
        "r2": 1 - squared / float(actual.var()) if actual.std() > 0 else 0.0,
    }


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])  # NaN where one of them is not finite


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank values: ties share their mean rank; NaN and infinite values get NaN."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return np.where(np.isfinite(values), ranks, np.nan)


def mistakes(
    logits: NDArray[Any],
    labels: NDArray[Any],
    label_names: list[str],
    thresholds: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], Callable[[int], tuple[Any, Any]]]:
    """Return how wrong each prediction is, and a function that describes it.

    Args: as for `score`.

    Returns:
        Errors, float64 [n], 0 where a prediction is right: the probability given to the wrong
        answer (multi-label: the largest over labels), or a regression's absolute error; and a
        function: row -> (label, prediction), as names or numbers.
    """
    names = np.array(label_names, dtype=object)
    if labels.dtype.kind == "i":
        found = logits.argmax(axis=1)
        wrong = by_blocks(lambda some: softmax(some).max(axis=1), logits)
        wrong[found == labels] = 0.0
        return wrong, lambda row: (names[labels[row]], names[found[row]])
    if labels.ndim == 2:
        actual, found = labels > 0.5, chosen_labels(logits, thresholds)

        def worst(logits: NDArray[Any], *sets: NDArray[np.bool_]) -> NDArray[np.float64]:
            (actual, found), probabilities = sets, sigmoid(logits)
            given = np.where(found, probabilities, 1 - probabilities)
            return np.asarray(np.where(found != actual, given, 0.0).max(axis=1))

        wrong = by_blocks(worst, logits, actual, found)
        return wrong, lambda row: (names[actual[row]].tolist(), names[found[row]].tolist())
    found = logits[:, 0].astype(np.float64)
    return np.abs(found - labels), lambda row: (float(labels[row]), float(found[row]))
