"""One micro-batch: forward and loss.

Legend: B samples, C classes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from accel_ft.data.loader import Batch


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits, float32 [B, C]."""
    logits: torch.Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits
    return logits.float()


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    """Return the sum of weight x cross-entropy over the micro-batch, a scalar with its graph.

    The loss of an update is the sum of these over all its micro-batches, divided by the sum of all
    its weights: a mean over the global batch, whatever the split. A mean of each micro-batch's mean
    is not that.

    Args:
        logits: float32 [B, C].
        labels: int64 [B].
        weights: float32 [B]; 0 for filling.
        label_smoothing: share of the target spread evenly over the C classes.
    """
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    return (losses * weights).sum()
