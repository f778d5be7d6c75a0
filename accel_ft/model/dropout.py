"""Dropout for training on a CPU: masks from the bytes of 64-bit draws, eight elements a draw.

Masks come from numpy's SFC64, because torch's generator takes twice as long. Each forward pass of a
layer seeds one from torch's default generator, whose state thus reproduces and resumes the masks.
For each mask the probability is rounded to 1/256, up or down at random, so that its mean is the one
asked for. Kept elements are scaled for the rounded probability, so that their mean is exact.
"""

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from accel_ft.runtime.compiled import is_compiled

LEVELS = 2**8  # values of a byte
MOST = 1 - 1 / LEVELS  # the greatest probability handled here

_dropout_of_torch = F.dropout


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """`torch.nn.functional.dropout`, faster on a CPU.

    Args:
        input: any shape.
        p: probability that an element becomes 0, rounded as above; the others are scaled.
        training: False returns the input unchanged.
        inplace: True falls back to torch's dropout.
    """
    plain = training and not inplace and 0 < p <= MOST and input.is_floating_point()
    if not plain or input.device.type != "cpu":
        return _dropout_of_torch(input, p, training, inplace)
    kept: torch.Tensor = _Dropout.apply(input, p)  # type: ignore[no-untyped-call]
    return kept


def seeded() -> np.random.SFC64:
    """Return a generator whose seed is drawn from torch's."""
    return np.random.SFC64(torch.randint(2**63 - 1, (1,)).numpy())


def draw_mask(shape: torch.Size, p: float, generator: Any) -> tuple[torch.Tensor | None, float]:
    """Return a mask, uint8, 1 for kept and 0 for dropped elements, and the factor that scales kept
    elements so that the mean is preserved. If nothing is dropped, None and 1.

    Args:
        shape: of the mask.
        p: probability that an element is dropped, at most MOST; rounded as above.
        generator: from `seeded`; may be None if `p` is 0.
    """
    dropped = int(p * LEVELS + (generator.random_raw() >> 40) / 2**24) if p else 0
    if not dropped:
        return None, 1.0
    count = shape.numel()
    drawn = generator.random_raw(-(-count // 8)).view(np.uint8)[:count]
    kept = torch.from_numpy((drawn >= dropped).view(np.uint8)).view(shape)
    return kept, LEVELS / (LEVELS - dropped)


def apply_mask(values: torch.Tensor, kept: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write `values` x `kept` to `out` and return it; without `kept`, return `values`. The values'
    bits are multiplied as integers: a product with floats would convert both operands first.
    """
    if kept is None:
        return values
    bits = (torch.int8, torch.int16, torch.int32, torch.int64)[values.itemsize.bit_length() - 1]
    torch.mul(values.view(bits), kept, out=out.view(bits))
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, p: float) -> torch.Tensor:
        kept, ctx.scale = draw_mask(values.shape, p, seeded())
        ctx.save_for_backward(kept)
        scaled = values * ctx.scale
        return apply_mask(scaled, kept, scaled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        scaled = gradients[0] * ctx.scale
        return apply_mask(scaled, kept, scaled), None


def on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Replace `torch.nn.functional.dropout` by this one inside the context, on a CPU.

    All models call that function, in their layers and in their eager attention. Compiled models
    keep torch's own, because this one would cause graph breaks.
    """
    is_used = device.type == "cpu" and not is_compiled()
    return mock.patch.object(F, "dropout", dropout) if is_used else contextlib.nullcontext()
