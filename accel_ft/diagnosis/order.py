"""What was built in the wrong order: before the process group, before wrapping, or out of step.

What you see: each rank trains alone; weights that never change; a hang at the first collective.
What it is: a DataLoader or a model that was built while the process believed to be the only one; an
optimizer that holds the parameters from before FSDP replaced them; a rank that comes to `prepare`
minutes after the others.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accel_ft.diagnosis.finding import Finding, failed, gather, listed, passed, skipped, warned

SPREAD_SECONDS = 5.0


@dataclass
class Construction:
    """What was built, in order: (what, whether a process group existed)."""

    events: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, what: str) -> None:
        """Note that `what` happened now."""
        self.events.append((what, dist.is_initialized()))


@contextlib.contextmanager
def construction() -> Iterator[Construction]:
    """Record, while the body builds its parts, what is made before the process group exists."""
    log = Construction()

    def noting(owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            log.add(what)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, noted)

    with contextlib.ExitStack() as patches:
        patches.enter_context(noting(DataLoader, "__init__", "DataLoader"))
        patches.enter_context(noting(torch.optim.Optimizer, "__init__", "optimizer"))
        patches.enter_context(noting(dist, "init_process_group", "process group"))
        yield log


def construction_order(log: Construction, num_ranks: int) -> Finding:
    """Judge what `construction` recorded.

    Args:
        log: of one rank.
        num_ranks: how many ranks the launcher started.
    """
    check = "order of construction"
    if num_ranks == 1:
        return skipped(check, "one process: there is no group to be late")
    early = sum(what == "DataLoader" and not had_group for what, had_group in log.events)
    ranks = gather((early, dist.is_initialized()))
    if not all(has_group for _, has_group in ranks):
        return failed(check, "there is no process group", "Accelerator() or init_process_group()")
    at_fault = [rank for rank, (early, _) in enumerate(ranks) if early]
    if at_fault:
        return warned(
            check,
            f"{max(early for early, _ in ranks)} DataLoader built before the process group, on "
            f"rank {listed(at_fault)}: a sampler made then knows one rank",
            "make the Accelerator (or init_process_group) first, then the DataLoader; see "
            "`training rows` for whether the ranks share their rows",
        )
    return passed(check, f"{len(log.events)} parts, the process group first")


def optimizer_holds_model(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Finding:
    """Compare the optimizers' tensors with the model's parameters, by identity.

    Returns:
        FAIL where they hold tensors the model does not have, WARN where trainable ones are in none.
    """
    check = "optimizer's parameters"
    own = {id(p) for p in model.parameters()}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    missing = [name for key, name in trainable.items() if key not in held]
    strangers = len(held - own)
    if strangers and missing:
        return failed(
            check,
            f"the optimizer holds {strangers} tensors the model no longer has, and not: "
            f"{listed(missing)}",
            "build the optimizer after FSDP has wrapped the model, or prepare both in one call "
            "(accelerator.prepare(model, optimizer)), which exchanges them",
        )
    if missing:
        return warned(
            check,
            f"in no optimizer, and so never trained: {listed(missing)}",
            "give them to an optimizer, or requires_grad_(False)",
        )
    return passed(check, f"all {len(trainable)} trainable parameters are held")


def arrival(stage: str, limit_seconds: float = SPREAD_SECONDS) -> Finding:
    """Measure how far apart the ranks arrive here, by their machines' clocks. Collective: where a
    rank never arrives, `postmortem.Stages` tells.

    Args:
        stage: its name.
        limit_seconds: above which it is a warning.
    """
    check = f"arrival at {stage}"
    times = gather(time.time())
    gather(None)  # so that no rank measures the next stage before all have left this one
    spread, last = max(times) - min(times), times.index(max(times))
    about = f"{spread:.2f} s between the first and the last of {len(times)} ranks"
    if spread > limit_seconds:
        return warned(
            check,
            f"{about}; rank {last} comes last",
            f"see what rank {last} does before it; a rank that prepares data for all is best "
            "waited for with a time limit of its own",
        )
    return passed(check, about)
