"""Gradients with other strides than DDP's buckets: copied at every step, with a warning that is
easily misread.

With `gradient_as_bucket_view` a gradient is a view of its bucket, with the parameter's strides.
Autograd keeps these strides, too, except where a difference is only in dimensions of size 1.
`grad.contiguous()` in a hook is a no-op: any stride in such a dimension counts as contiguous.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_ft.diagnosis.finding import Finding, Verdict, check
from accel_ft.diagnosis.gradients import gradients_of
from accel_ft.errors import listed

MEND = (
    "accel_ft.diagnosis.strides.match_strides(model) before training lays each gradient out as its "
    "parameter; or, of a Conv2d, model.to(memory_format=torch.channels_last) lays out both alike"
)


def bucket_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides DDP gives a parameter's view of its bucket.

    Source: torch/csrc/distributed/c10d/reducer.cpp, initialize_bucket_views: the parameter's own
        where it covers its memory without gap or overlap, else those of a contiguous tensor.
    """
    dense = torch.empty_like(parameter, device="meta").stride()  # keeps those of a dense tensor
    plain = torch.empty(parameter.shape, device="meta").stride()
    return dense if dense == parameter.stride() else plain


@check("gradient strides")
def gradient_strides(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Finding:
    """Compare the strides of each gradient, as it is accumulated, with those of its bucket.

    Args:
        model: plain or wrapped by DDP; its gradients are restored, and DDP's reduction does not
            run.
        loss: computes the loss of a batch, a scalar, with the inner model (`model.module`).

    Returns:
        FAIL with name, shape and both strides of those that differ.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = gradients_of(model, lambda: torch.autograd.backward(loss()))
    differing = [
        f"{name} {list(p.shape)}: gradient {gradients[name].stride()}, bucket {bucket_strides(p)}"
        for name, p in named
        if name in gradients
        and gradients[name].layout == torch.strided
        and gradients[name].stride() != bucket_strides(p)
    ]
    if differing:
        return Verdict.FAIL(f"{len(differing)} of {len(named)} differ: {listed(differing)}", MEND)
    return Verdict.PASS(f"{len(named)} gradients have their buckets' strides")


def match_strides(model: nn.Module) -> list[Any]:
    """Install hooks that give each gradient the strides of DDP's bucket; values stay the same.

    Returns:
        The hooks' handles: `handle.remove()` removes one.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p.register_hook(partial(_laid_out, bucket_strides(p))) for p in trained]  # type: ignore[no-untyped-call]


def _laid_out(strides: tuple[int, ...], gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided or gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
