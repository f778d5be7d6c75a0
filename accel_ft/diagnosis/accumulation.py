"""Accumulation that is not: gradients that leak, are dropped, averaged wrongly or sent too often.

What you see: a curve that changes with the number of accumulation steps; a learning rate that
reaches its end too early; a DDP job slower than it should be. What it is: mean losses of
micro-batches of different sizes, a short last block that is divided by too many (or whose gradients
go on into the next epoch), a scheduler stepped with every micro-batch or by every process, a
missing no_sync. It is found by writing down what a loop calls, and by comparing gradients.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_ft.diagnosis.finding import Finding, failed, listed, passed, warned

Gradients = dict[str, torch.Tensor]
Update = list[str]
_listening: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
BACKWARD, REDUCE, STEP, SCHEDULE, CLEAR = "backward", "reduce", "step", "schedule", "clear"


@contextlib.contextmanager
def recording(model: nn.Module | None = None) -> Iterator[list[str]]:
    """Write down what the loop in the body does: backward, reduce, step, schedule, clear, in order.

    Args:
        model: wrapped by DDP, whose all-reduces are to be counted; a bucket is one `reduce`.
    """
    events: list[str] = []

    def noting(original: Any, what: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            return original(*args, **kwargs)

        return noted

    # A scheduler's constructor steps it once; a subclass of Optimizer has a step of its own, which
    # torch calls its hooks around.
    step_hook = register_optimizer_step_pre_hook(lambda *_: events.append(STEP))
    schedule, made = LRScheduler.step, LRScheduler._initial_step
    inside = False

    def initial_step(scheduler: Any) -> None:
        nonlocal inside
        inside = True
        made(scheduler)
        inside = False

    def scheduler_step(scheduler: Any, *args: Any) -> None:
        if not inside:
            events.append(SCHEDULE)
        schedule(scheduler, *args)

    run = torch.autograd.backward
    clear = torch.optim.Optimizer.zero_grad
    with (
        mock.patch.object(torch.autograd, "backward", noting(run, BACKWARD)),
        mock.patch.object(torch.optim.Optimizer, "zero_grad", noting(clear, CLEAR)),
        mock.patch.object(LRScheduler, "_initial_step", initial_step),
        mock.patch.object(LRScheduler, "step", scheduler_step),
        _counting_reduces(model, events),
    ):
        try:
            yield events
        finally:
            step_hook.remove()


@contextlib.contextmanager
def _counting_reduces(model: nn.Module | None, events: list[str]) -> Iterator[None]:
    """Note each bucket that DDP reduces; its own all-reduce is replaced by the same one, which
    stays: DDP takes but one hook.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    if model not in _listening:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(
            group: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            _listening[model].append(REDUCE)
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, hook)
    _listening[model] = events
    try:
        yield
    finally:
        _listening[model] = []


def blocks(events: Sequence[str]) -> tuple[list[Update], Update]:
    """Cut what was recorded after each step; return those, and what follows the last one."""
    updates: list[Update] = []
    rest: Update = []
    for event in events:
        if event == STEP:
            updates.append([*rest, event])
            rest = []
        else:
            rest.append(event)
    return updates, rest


def accumulation_calls(events: Sequence[str], accumulation_steps: int) -> Finding:
    """Judge what `recording` wrote down over one epoch.

    Args:
        events: from `recording`.
        accumulation_steps: micro-batches an update is meant to have.
    """
    check = "accumulation"
    updates, rest = blocks(events)
    if not updates:
        return failed(check, f"no step in {len(events)} calls", "call optimizer.step()")
    counts = [update.count(BACKWARD) for update in updates]
    uncleared = [n for n, update in enumerate(updates[1:], 2) if CLEAR not in update]
    # the scheduler's step comes after the optimizer's: it stands in the block that follows
    schedules = max(update.count(SCHEDULE) for update in [*updates[1:], rest])
    about = f"{len(updates)} updates of {listed(sorted(set(counts)), 8)} micro-batches"
    faults = (
        (
            rest.count(BACKWARD) > 0,
            f"the epoch ends with {rest.count(BACKWARD)} backward passes and no step: their "
            "gradients are dropped, or go into the next epoch's first update",
            "step after the last batch of an epoch too (accelerator.accumulate does), and divide "
            "by the number of samples it has",
        ),
        (
            len(uncleared) > 0,
            f"{len(uncleared)} updates begin with the gradients of the one before",
            "optimizer.zero_grad() after each step",
        ),
        (
            max(counts) > accumulation_steps,
            f"{about}, more than {accumulation_steps}",
            "step the optimizer after each of them: see where step() is called",
        ),
        (
            schedules > 1,
            f"the scheduler is stepped {schedules} times an update",
            "step it once after each optimizer step; a scheduler that Accelerate has prepared is "
            "stepped num_processes times, so leave it out of prepare()",
        ),
    )
    for is_so, measured, mend in faults:
        if is_so:
            return failed(check, measured, mend)
    sums = [_sums(update) for update in updates]
    if max(sums) > 1:
        return warned(
            check,
            f"gradients are summed over the ranks up to {max(sums)} times an update of "
            f"{max(counts)} micro-batches",
            "model.no_sync() around all but the last backward pass (accelerator.accumulate)",
        )
    if len(set(counts)) > 1:
        return warned(
            check,
            f"{about}: a short last block",
            "its loss must be divided by its own number of samples: see `accumulated gradient`",
        )
    return passed(check, about)


def _sums(update: Update) -> int:
    """After how many of an update's backward passes buckets were reduced."""
    return sum(before == REDUCE and now != REDUCE for before, now in pairwise(update))


def gradients_of(model: nn.Module, run: Callable[[], Any]) -> Gradients:
    """Return the gradients that `run` leaves, from none; the model's own come back after it."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    run()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        p.grad = kept[name]
    return found


def ratio(ours: Gradients, whole: Gradients) -> tuple[float, float]:
    """Return the factor by which one gradient is the other, and the share that no factor explains.

    Returns:
        <ours, whole> / <whole, whole>, and |ours - factor x whole| / |ours|.
    """
    names = whole.keys() & ours.keys()
    a = torch.cat([ours[name].flatten().double().cpu() for name in sorted(names)])
    b = torch.cat([whole[name].flatten().double().cpu() for name in sorted(names)])
    factor = float(a @ b / (b @ b))
    return factor, float((a - factor * b).norm() / a.norm().clamp_min(1e-30))


def accumulated_gradient(
    model: nn.Module,
    micro_batches: Callable[[], Any],
    whole_batch: Callable[[], Any],
    tolerance: float = 1e-3,
) -> Finding:
    """Compare the gradient of k micro-batches with that of the same samples at once.

    Args:
        model: without dropout (`model.eval()` will do).
        micro_batches: runs the loop's own backward passes over the micro-batches, without a step.
        whole_batch: computes the mean loss of the same samples and its backward pass.
        tolerance: relative; float32 sums in another order differ by about 1e-6, bf16 by 1e-2.
    """
    check = "accumulated gradient"
    factor, rest = ratio(gradients_of(model, micro_batches), gradients_of(model, whole_batch))
    about = f"{factor:.4f} times that of the whole batch, {rest:.1e} of it in another direction"
    if abs(factor - 1) > tolerance or rest > tolerance:
        return failed(
            check,
            about,
            "divide each micro-batch's summed loss by the samples (or label weight) of the whole "
            "update, not by its own; compute the loss outside the model",
        )
    return passed(check, about)
