"""One micro-batch: forward and loss.

Legend: B samples, C classes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from accel_ft.data.loader import Batch
from accel_ft.data.tokenize import INPUTS


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits, float32 [B, C]."""
    logits: torch.Tensor = model(**{key: batch[key] for key in INPUTS if key in batch}).logits
    return logits.float()


def unreached(model: nn.Module, logits: torch.Tensor) -> list[str]:
    """Return the names of the trainable parameters that the graph of `logits` does not reach."""
    reached, seen, waiting = set(), set(), [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            waiting += [below for below, _ in node.next_functions]
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) not in reached]


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    """Return the sum of weight x loss over the micro-batch, a scalar with its graph. The loss is
    cross-entropy; for multi-label rows, binary cross-entropy averaged over the labels; for a
    regression, the squared error.

    The loss of an update is the sum of these over all its micro-batches, divided by the sum of all
    its weights: the mean over the global batch, however that is split. The mean of the
    micro-batches' means would depend on the split.

    Args:
        logits: float32 [B, C].
        labels: int64 [B]; multi-label, float32 [B, C]; regression, float32 [B].
        weights: float32 [B]; 0 for the sample of an empty micro-batch.
        label_smoothing: share of the target spread evenly over the C classes.
    """
    if not labels.is_floating_point():
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    elif labels.ndim == 2:
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
    else:
        losses = F.mse_loss(logits.squeeze(1), labels, reduction="none")
    return (losses * weights).sum()
