"""Evaluation. Predictions carry their sample's place: each sample counts once, none is missing."""

import contextlib
import io
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_ft.config import DataConfig
from accel_ft.data.loader import Batches, Padding, make_loader
from accel_ft.data.splits import Split, Splits
from accel_ft.engine.step import forward
from accel_ft.runtime.files import write_whole

logger = logging.getLogger(__name__)

MISTAKES = 100


def make_eval_loader(
    accelerator: Accelerator, split: Split, batch_size: int | None, pad: Padding
) -> Any:
    """Return a prepared loader of one pass over `split`: the same batches for any world size."""
    lengths = split.lengths(np.arange(len(split), dtype=np.int64))
    batches = pad.eval_batches(lengths, batch_size, accelerator.num_processes)
    return make_loader(accelerator, Batches(split, pad, len(batches), batches.__getitem__))


@torch.no_grad()
def predict_split(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Any,
    before_batch: Callable[[], None] = lambda: None,
) -> NDArray[np.float32]:
    """Return the logits of all samples in order of place, float32 [n, C], the same on every rank.
    Collective.

    Args:
        before_batch: called before each batch; may raise, on all ranks alike, to end early.

    Raises:
        RuntimeError: a sample is missing or came twice.
    """
    was_training = model.training
    model.eval()
    # FSDP2 does its own mixed precision, in evaluation as in training; autocast is not needed.
    is_fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
    precision = contextlib.nullcontext() if is_fsdp2 else accelerator.autocast()
    logits, places = [], []
    try:
        with precision:  # around the whole loop: autocast caches the weights that it has cast
            for batch in loader:
                before_batch()
                logits.append(forward(model, batch).clone())  # CUDA graphs reuse their output
                places.append(batch["places"])
    finally:
        model.train(was_training)
        loader.end()

    def gathered(rows: list[torch.Tensor]) -> NDArray[Any]:
        mine = torch.cat(rows)
        rows.clear()  # frees memory: many rows of many labels are large
        padded = accelerator.pad_across_processes(mine, dim=0, pad_index=-1)
        found: NDArray[Any] = accelerator.gather(padded).cpu().numpy()
        return found

    all_places = gathered(places)
    order = np.argsort(all_places, kind="stable")
    order = order[all_places[order] >= 0]  # place -1: padding
    wanted = len(loader.dataset.split)
    if not np.array_equal(all_places[order], np.arange(wanted)):
        raise RuntimeError(f"evaluation of {wanted} samples returned {len(order)} predictions")
    ledger: NDArray[np.float32] = gathered(logits)[order]
    return ledger


def evaluate_split(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Any,
    label_names: list[str],
    before_batch: Callable[[], None] = lambda: None,
    thresholds: NDArray[np.float64] | None = None,
    tunes: bool = False,
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return the metrics (`metrics.score`) and logits of a loader's split, on every rank.
    Collective.

    Args:
        tunes: multi-label only: tune the thresholds on these rows first.
    """
    split: Split = loader.dataset.split
    logits = predict_split(accelerator, model, loader, before_batch)
    from accel_ft.metrics import best_thresholds, score  # `import evaluate` is slow

    sick = int((~np.isfinite(logits).all(axis=1)).sum())
    if sick and accelerator.is_main_process:
        logger.warning("%s: rows with NaN or infinite logits: %d", split.store.name, sick)
    labels = split.labels(np.arange(len(split), dtype=np.int64))
    if tunes and labels.ndim == 2:
        thresholds = best_thresholds(logits, labels)
    scores = score(logits, labels, label_names, thresholds)
    return (_unknown(scores) if sick else scores), logits


def _unknown(scores: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with NaN for each float: the argmax of NaN would count as label 0."""
    return {
        key: _unknown(value) if isinstance(value, dict)
        else math.nan if isinstance(value, float) else value
        for key, value in scores.items()
    }  # fmt: skip


def write_predictions(
    folder: Path,
    splits: Splits,
    logits: dict[str, NDArray[np.float32]],
    thresholds: NDArray[np.float64] | None,
) -> None:
    """Write predictions.npz: `logits` [n, C], `labels` and `rows` [n] of the last split; the same
    of each other split, prefixed with its name (`validation_logits`); `thresholds`, if any.

    Args:
        logits: of each split, by its name, in order.
    """
    *_, last = logits
    arrays: dict[str, Any] = {} if thresholds is None else {"thresholds": thresholds}
    for name, of_split in logits.items():
        prefix = "" if name == last else f"{name}_"
        labels, rows = _labels_and_rows(splits, name)
        arrays |= {f"{prefix}logits": of_split, f"{prefix}labels": labels, f"{prefix}rows": rows}
    file = io.BytesIO()
    np.savez(file, **arrays)
    write_whole(folder / "predictions.npz", file.getbuffer())


def write_mistakes(
    folder: Path,
    config: DataConfig,
    splits: Splits,
    name: str,
    logits: NDArray[np.float32],
    thresholds: NDArray[np.float64] | None,
) -> None:
    """Write mistakes.jsonl: the most confident mistakes (for a regression, the largest errors) with
    their texts.

    Args:
        name: of the split that the logits belong to.
    """
    from accel_ft.metrics import mistakes

    source = _source(splits, name)
    if not source.is_unchanged():
        logger.warning("%s has changed since it was read: no mistakes.jsonl", source.name)
        return
    labels, rows = _labels_and_rows(splits, name)
    wrong, pair = mistakes(logits, labels, splits.label_names, thresholds)
    worst = np.argsort(-wrong, kind="stable")[: min(MISTAKES, int((wrong > 0).sum()))]
    ids = getattr(splits, name).ids(worst).tolist()
    texts = source.texts(config, set(ids))
    measure = "error" if config.problem_type == "regression" else "confidence"
    lines = [
        {
            "text": texts[row_id],
            "label": label,
            "predicted": predicted,
            measure: round(float(wrong[place]), 6),
            "row": int(rows[place]),
        }
        for row_id, place, (label, predicted) in zip(ids, worst, map(pair, worst), strict=True)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(folder / "mistakes.jsonl", text)


def _source(splits: Splits, name: str) -> Any:
    return splits.sources.get(name) or splits.sources["train"]  # if cut off these rows


def _labels_and_rows(splits: Splits, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the labels of a split's samples, and their row numbers in the source, [n]."""
    split: Split = getattr(splits, name)
    places = np.arange(len(split), dtype=np.int64)
    return split.labels(places), _source(splits, name).row_numbers(split.ids(places))
