"""Wrong order of construction: before the process group, before wrapping, or out of step."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accel_ft.diagnosis.finding import Finding, Verdict, check, gather
from accel_ft.diagnosis.gradients import reshard
from accel_ft.errors import listed

SPREAD_SECONDS = 5.0


@contextlib.contextmanager
def construction() -> Iterator[list[bool]]:
    """Record whether a process group existed when the body built each DataLoader."""
    log: list[bool] = []
    original = DataLoader.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        log.append(dist.is_initialized())
        original(self, *args, **kwargs)

    with mock.patch.object(DataLoader, "__init__", noted):
        yield log


@check("order of construction")
def construction_order(log: list[bool], num_ranks: int) -> Finding:
    """Judge what `construction` noted on this rank. Collective.

    Args:
        log: from `construction`.
        num_ranks: how many ranks the launcher started.
    """
    if num_ranks == 1:
        return Verdict.SKIP("one process: no process group is needed")
    ranks = gather((log.count(False), dist.is_initialized()))
    if not all(has_group for _, has_group in ranks):
        return Verdict.FAIL("there is no process group", "Accelerator() or init_process_group()")
    at_fault = [rank for rank, (early, _) in enumerate(ranks) if early]
    if at_fault:
        return Verdict.WARN(
            f"{max(early for early, _ in ranks)} DataLoader built before the process group, on "
            f"rank {listed(at_fault)}: its sampler may be made for a single rank",
            "make the Accelerator (or init_process_group) first, then the DataLoader; see "
            "`training rows` for whether the ranks share their rows",
        )
    return Verdict.PASS(f"{len(log)} DataLoaders, the process group first")


@check("optimizer's parameters")
def optimizer_holds_model(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Finding:
    """Compare the optimizers' tensors with the model's parameters, by identity.

    Returns:
        WARN where trainable parameters are in no optimizer; FAIL where, besides, the optimizers
        hold tensors that the model does not have.
    """
    reshard(model)
    own = {id(p) for p in model.parameters()}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    missing = [name for key, name in trainable.items() if key not in held]
    strangers = len(held - own)
    if strangers and missing:
        return Verdict.FAIL(
            f"the optimizer holds {strangers} tensors the model no longer has, and not: "
            f"{listed(missing)}",
            "build the optimizer after the last change to the model's modules; and after FSDP has "
            "wrapped it, or prepare both in one call (accelerator.prepare(model, optimizer))",
        )
    if missing:
        return Verdict.WARN(
            f"in no optimizer, and so never trained: {listed(missing)}",
            "give them to an optimizer, or requires_grad_(False)",
        )
    return Verdict.PASS(f"all {len(trainable)} trainable parameters are held")


def arrival(stage: str, limit_seconds: float = SPREAD_SECONDS) -> Finding:
    """Measure how far apart the ranks arrive here, by how long each waits for the others.
    Collective: a rank that never arrives is a case for `postmortem.Stages`.

    Args:
        stage: name of this place in the program.
        limit_seconds: a larger spread is a WARN.
    """
    started = time.monotonic()
    gather(None)
    waits = gather(time.monotonic() - started)
    spread, last = max(waits) - min(waits), waits.index(min(waits))
    about = f"{spread:.2f} s between the first and the last of {len(waits)} ranks"
    if spread > limit_seconds:
        return Finding(
            f"arrival at {stage}",
            Verdict.WARN,
            f"{about}; rank {last} comes last",
            f"see what rank {last} does before it; to wait for a rank that prepares data for all, "
            "use a time limit of its own",
        )
    return Finding(f"arrival at {stage}", Verdict.PASS, about)
