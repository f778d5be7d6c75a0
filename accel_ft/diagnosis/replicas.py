"""Replicas out of sync: parameters, buffers or gradients that differ between ranks."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel_ft.diagnosis.finding import Finding, Verdict, check, gather, num_ranks
from accel_ft.diagnosis.gradients import gradients_of
from accel_ft.engine.agreement import digest
from accel_ft.errors import listed
from accel_ft.runtime.fsdp import strategy_of

Tensors = Iterable[tuple[str, torch.Tensor]]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or another scheme has sharded the model over the ranks."""
    shares = any(hasattr(parameter, "to_local") for parameter in model.parameters())
    return shares or strategy_of(model).startswith("FSDP")


def _alike(model: nn.Module | None, tensors: Tensors, mend: str) -> Finding:
    """Compare tensors bit by bit over the ranks; SKIP where `model`, if given, is sharded."""
    if num_ranks() == 1:
        return Verdict.SKIP("one process: nothing to compare with")
    if model is not None and is_sharded(model):
        return Verdict.SKIP("each rank holds its own share under FSDP")
    ranks = gather({name: digest(tensor) for name, tensor in tensors})
    first, names = ranks[0], list(dict.fromkeys(chain(*ranks)))
    differing = [n for n in names if any(rank.get(n) != first.get(n) for rank in ranks)]
    if not differing:
        return Verdict.PASS(f"{len(names)} tensors have the same bits on every rank")
    odd = [number for number, rank in enumerate(ranks) if rank != first]
    words = f"{len(differing)} of {len(names)} differ from rank 0's, on rank {listed(odd)}"
    return Verdict.FAIL(f"{words}; the first is {differing[0]}", mend)


@check("same weights")
def same_weights(model: nn.Module) -> Finding:
    """Compare parameters bit by bit over the ranks; not for sharded ones. Collective."""
    return _alike(
        model,
        model.named_parameters(),
        "set the same seed on every rank before the model is made (accelerate.utils.set_seed), or "
        "accelerator.prepare(model), which broadcasts rank 0's; sum the gradients over the ranks "
        "(see `accumulation`); never step on one rank only",
    )


@check("same buffers")
def same_buffers(model: nn.Module) -> Finding:
    """Compare buffers bit by bit over the ranks. Collective.

    DDP broadcasts rank 0's before each forward pass: differences that a pass leaves are no fault.
    """
    keys = {"broadcast_buffers", "forward_sync_buffers"}  # torch's older and newer name
    wrapped = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    sending = [m for m in wrapped if any(vars(m).get(key) for key in keys)]
    sent = {id(buffer) for m in sending for buffer in m.buffers()}
    named = [(name, b) for name, b in model.named_buffers() if not hasattr(b, "to_local")]
    kept = [(name, buffer) for name, buffer in named if id(buffer) not in sent]
    if sent and not kept:
        return Verdict.PASS("DDP broadcasts rank 0's before each forward pass")
    return _alike(
        None,  # FSDP neither shards nor broadcasts buffers
        kept,
        "leave DDP's broadcast_buffers on: it broadcasts rank 0's before each forward pass, so "
        "save on rank 0; SyncBatchNorm for the statistics of all ranks, as under FSDP, which "
        "broadcasts none",
    )


@check("same gradients")
def same_gradients(model: nn.Module) -> Finding:
    """Compare gradients bit by bit over the ranks, to be called between the backward pass that
    synchronises and the optimizer's step. Collective.
    """
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return _alike(
        model,
        gradients,
        "run the same backward passes through the wrapped model on every rank, the last one "
        "outside no_sync(), and let nothing but clipping change gradients afterwards",
    )


@check("used parameters")
def used_parameters(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Finding:
    """Find trainable parameters that the loss of a batch does not depend on."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    alone = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    with nullcontext() if alone is None else alone.no_sync():  # DDP would wait for unused ones
        gradients = gradients_of(model, lambda: torch.autograd.backward(loss()))
    unused = [name for name, _ in named if name not in gradients]
    if unused:
        return Verdict.WARN(
            f"{len(unused)} of {len(named)} get no gradient: {listed(unused)}; without "
            "find_unused_parameters, DDP stops at the next forward pass",
            "requires_grad_(False) for them, or DistributedDataParallelKwargs("
            "find_unused_parameters=True) (accel_ft sets it), which costs a pass over the graph at "
            "each step",
        )
    return Verdict.PASS(f"all {len(named)} trainable parameters get a gradient")


@check("same loss")
def same_loss(loss: Callable[[Any], torch.Tensor], batch: Any) -> Finding:
    """Compute the loss of rank 0's batch on every rank. Collective.

    Args:
        loss: computes that of a batch on this rank's device, with the model in evaluation mode.
        batch: tensors on the CPU; rank 0's is used.
    """
    if num_ranks() == 1:
        return Verdict.SKIP("one process: nothing to compare with")
    first = gather(batch)[0]
    with torch.no_grad():
        losses = gather(float(loss(first)))
    if not any(map(math.isfinite, losses)):
        return Verdict.FAIL(
            f"every rank computes {losses[0]} for the same batch",
            "check weights and labels: try the batch and pretrained model on one process",
        )
    limit = 1e-6 * max(1.0, abs(losses[0]))
    if not all(abs(value - losses[0]) <= limit for value in losses):
        return Verdict.FAIL(
            f"for the same batch the ranks compute {listed([f'{x:.7f}' for x in losses], 8)}",
            "see `same weights` and `same buffers`; else the ranks differ in code or precision",
        )
    return Verdict.PASS(f"{losses[0]:.6f} on {len(losses)} ranks")
