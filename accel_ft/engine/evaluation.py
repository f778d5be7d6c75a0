"""Evaluation is a ledger: each prediction carries its sample's place, each place counts once, none
may be missing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn

from accel_ft.data.loader import Batches, Padding, make_loader
from accel_ft.data.splits import Split
from accel_ft.engine.step import forward


def make_eval_loader(
    accelerator: Accelerator, split: Split, batch_size: int | None, pad: Padding
) -> Any:
    """Return a prepared loader of one pass over `split`: the same batches whatever the number of
    ranks.
    """
    lengths = split.lengths(np.arange(len(split), dtype=np.int64))
    batches = pad.eval_batches(lengths, batch_size, accelerator.num_processes)
    return make_loader(accelerator, Batches(split, pad, len(batches), batches.__getitem__))


@torch.no_grad()
def predict_split(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Any,
    num_samples: int,
    before_batch: Callable[[], None] = lambda: None,
) -> NDArray[np.float32]:
    """Return the logits of all samples by place, float32 [n, C], the same on every rank.
    Collective.

    Args:
        before_batch: may raise, on all ranks alike, to end it early.

    Raises:
        RuntimeError: a sample is missing or came twice.
    """
    was_training = model.training
    model.eval()
    logits, places = [], []
    try:
        for batch in loader:
            before_batch()
            with accelerator.autocast():
                logits.append(forward(model, batch))
            places.append(batch["places"])
    finally:
        model.train(was_training)
        loader.end()
    gathered: list[torch.Tensor] = [
        accelerator.gather(accelerator.pad_across_processes(torch.cat(rows), dim=0, pad_index=-1))
        for rows in (places, logits)
    ]
    all_places = gathered[0].cpu().numpy()
    real = all_places >= 0
    order = np.argsort(all_places[real], kind="stable")
    if not np.array_equal(all_places[real][order], np.arange(num_samples)):
        raise RuntimeError(f"evaluation of {num_samples} samples returned {real.sum()} predictions")
    ledger: NDArray[np.float32] = gathered[1].cpu().numpy()[real][order]
    return ledger


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Any,
    split: Split,
    label_names: list[str],
    before_batch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the metrics of a split (see `classification_metrics`), the same on every rank.
    Collective.
    """
    logits = predict_split(accelerator, model, loader, len(split), before_batch)
    from accel_ft.metrics import classification_metrics  # `import evaluate` is slow to come

    return classification_metrics(
        logits, split.labels(np.arange(len(split), dtype=np.int64)), label_names
    )
