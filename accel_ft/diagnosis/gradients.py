"""Gradients of a piece of somebody's program, without leaving a trace in it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Gradients = dict[str, torch.Tensor]


def gradients_of(model: nn.Module, run: Callable[[], Any]) -> Gradients:
    """Return the gradients that `run` leaves, from none, by name; the model's own come back."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    try:
        for p in model.parameters():
            p.grad = None
        run()
        named = model.named_parameters()
        return {name: p.grad.detach() for name, p in named if p.grad is not None}
    finally:
        for name, p in model.named_parameters():
            p.grad = kept[name]
