"""Gradient norm and clipping; clipping takes no pass of its own over the gradients."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import get_total_norm

from accel_ft.runtime import fsdp


def clip(accelerator: Accelerator, model: nn.Module, optimizer: Any, max_norm: float) -> Any:
    """Return the norm of the whole gradient before clipping, and clip it to `max_norm`.

    The fused optimizer clips in its coming step, as it reads each gradient, which saves a pass.
    With a loss scaler or FSDP1, accelerate clips now, in a pass of its own. Collective.

    Args:
        max_norm: infinity for no clipping.

    Returns:
        A scalar tensor on the gradients' device.
    """
    if accelerator.scaler is not None or hasattr(model, "clip_grad_norm_"):
        return fsdp.whole(accelerator.clip_grad_norm_(model.parameters(), max_norm))
    trained = (p for group in optimizer.optimizer.param_groups for p in group["params"])
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    kinds = {(type(g), g.device.type, g.dtype) for g in gradients}
    if kinds == {(torch.Tensor, "cpu", torch.float32)}:
        flat = [_filled(gradient).flatten() for gradient in gradients]
        norm = torch.stack([gradient.dot(gradient) for gradient in flat]).sum().sqrt()
    elif kinds == {(torch.Tensor, "cuda", torch.float32)}:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    else:  # the same result, but 3 times as slow on a CPU; with a GPU, 1 ms more on the host
        norm = fsdp.whole(get_total_norm(gradients))
    optimizer.optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    return norm


def _filled(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's nonzero rows if `fill_gradient` has recorded them, else all rows."""
    rows = getattr(gradient, "filled_rows", None)
    return gradient if rows is None else gradient.index_select(0, rows.unique())
