"""Run parts of a user's program without side effects on its model."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_ft.runtime.guest import own_random_numbers


def reshard(model: nn.Module) -> None:
    """Make the model expose its sharded parameters: after a forward pass FSDP2's root still exposes
    the gathered ones, whose gradients are not those that the optimizer sees.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and the random state after the body."""
    reshard(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    values = [(grad, grad.clone()) for _, grad in gradients if grad is not None]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with own_random_numbers():
        try:
            yield
        finally:
            reshard(model)
            for p, gradient in gradients:
                p.grad = gradient
            for gradient, before in values:  # views of DDP's buckets are written in place
                gradient.detach().copy_(before)
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                if not buffer.is_meta and not torch.equal(buffer, before):
                    buffer.detach().copy_(before)


def gradients_of(model: nn.Module, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Return the gradients that `run` leaves when it starts without any, by parameter name; under
    FSDP2, this rank's shards.
    """
    with untouched(model):
        for p in model.parameters():
            p.grad = None
        run()
        reshard(model)
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        return {name: gradient.detach().clone() for name, gradient in named}
