"""Accumulation that is not: gradients that leak, are dropped, averaged wrongly or sent too often.

What you see: a curve that changes with the number of accumulation steps; a learning rate that
reaches its end too early; a DDP job slower than it should be. What it is: mean losses of
micro-batches of different sizes, a short last block that is divided by too many (or whose gradients
go on into the next epoch), a scheduler stepped with every micro-batch or by every process, a
missing no_sync. It is found by writing down what a loop calls, and by comparing gradients.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accel_ft.diagnosis.finding import Finding, failed, listed, passed, warned
from accel_ft.diagnosis.gradients import Gradients, gradients_of

ONE = torch.zeros(())

Update = list[str]
BACKWARD, REDUCE, STEP, SCHEDULE, LEFT = "backward", "reduce", "step", "schedule", "left"
_listening: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


class _Recorder:
    """Writes down calls; those that are made inside another of them are left out."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.depth = 0
        self.stepped: list[torch.optim.Optimizer] = []
        self.schedulers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def noting(self, owner: Any, name: str, note: Callable[..., None]) -> Any:
        """Return a patch of `owner.name` that notes each outermost call."""
        original = getattr(owner, name)

        @wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.enter(note, *args)
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        return mock.patch.object(owner, name, noted)

    def enter(self, note: Callable[..., None], *args: Any) -> None:
        """Note a call that begins, where it is an outermost one."""
        if self.depth == 0:
            note(*args)
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """A call has ended."""
        self.depth -= 1

    def backward(self, *_: Any) -> None:
        """Note a backward pass, and whether it adds to gradients that a step has used."""
        if any(
            p.grad is not None and bool(p.grad.any())
            for optimizer in self.stepped
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            self.events.append(LEFT)
        self.stepped = []
        self.events.append(BACKWARD)

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer's step."""
        self.events.append(STEP)
        self.stepped.append(optimizer)

    def schedule(self, scheduler: Any, *_: Any) -> None:
        """Note a scheduler's step; each scheduler has a number."""
        number = self.schedulers.setdefault(scheduler, len(self.schedulers))
        self.events.append(f"{SCHEDULE} {number}")


@contextlib.contextmanager
def recording(model: nn.Module | None = None) -> Iterator[list[str]]:
    """Write down what the loop in the body does: backward, reduce, step, schedule, in order, and
    "left" where a backward pass adds to the gradients of the step before.

    Args:
        model: wrapped by DDP, whose all-reduces are to be counted; a bucket is one `reduce`. They
            are not where it has a communication hook already.
    """
    recorder = _Recorder()
    hooks = (
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: recorder.enter(recorder.step, optimizer)
        ),
        register_optimizer_step_post_hook(recorder.leave),
    )
    own: tuple[tuple[Any, str, Callable[..., None]], ...] = (
        (torch.autograd, "backward", recorder.backward),
        (torch.amp.GradScaler, "step", lambda scaler, optimizer, *_: recorder.step(optimizer)),
        (LRScheduler, "_initial_step", lambda *_: None),  # a constructor's is none of the loop's
        *(
            (kind, "step", recorder.schedule)
            for kind in (LRScheduler, *_subclasses(LRScheduler))
            if "step" in vars(kind)
        ),
    )
    with contextlib.ExitStack() as patches:
        for owner, name, note in own:
            patches.enter_context(recorder.noting(owner, name, note))
        patches.enter_context(_counting_reduces(model, recorder.events))
        try:
            yield recorder.events
        finally:
            for hook in hooks:
                hook.remove()


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


@contextlib.contextmanager
def _counting_reduces(model: nn.Module | None, events: list[str]) -> Iterator[None]:
    """Note each bucket that DDP reduces; its own all-reduce is replaced by the same one, which
    stays: DDP takes but one hook.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, nn.parallel.DistributedDataParallel) or (
        model not in _listening and getattr(model, "_comm_hooks", [])
    ):
        yield
        return
    if model not in _listening:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        listener = ref(model)  # DDP keeps the hook, which must not keep DDP

        def hook(
            group: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            owner = listener()
            if owner is not None:
                _listening[owner].append(REDUCE)
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
        rest.append(event)
        if event == STEP and (BACKWARD in rest or not updates):
            updates.append(rest)
            rest = []
        elif event == STEP:  # of a second optimizer
            updates[-1] += rest
            rest = []
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
    uncleared = sum(update.count(LEFT) for update in [*updates, rest])
    # a scheduler's step comes after the optimizer's: it stands in the block that follows
    schedules = max(
        block.count(event)
        for block in [*updates, rest]
        for event in {SCHEDULE, *(event for event in block if event.startswith(SCHEDULE))}
    )
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
            uncleared > 0,
            f"{uncleared} updates begin with the gradients of the one before",
            "optimizer.zero_grad() after each step",
        ),
        (
            max(counts) > accumulation_steps,
            f"{about}, more than {accumulation_steps}",
            "see where step() is called; losses with a backward pass each count as micro-batches",
        ),
        (
            schedules > 1,
            f"the scheduler is stepped {schedules} times an update",
            "step it once after each optimizer step; one that Accelerate has prepared is stepped "
            "num_processes times: leave it out of prepare(), or count its steps so",
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


def ratio(ours: Gradients, whole: Gradients) -> tuple[float, float]:
    """Return the factor by which one gradient is the other, and the share that no factor explains.

    Returns:
        <ours, whole> / <whole, whole>, and |ours - factor x whole| / |ours|.
    """
    names = sorted(whole.keys() | ours.keys())

    def flat(gradients: Gradients, others: Gradients) -> torch.Tensor:
        parts = (gradients.get(name, torch.zeros_like(others.get(name, ONE))) for name in names)
        return torch.cat([part.to_dense().flatten().double().cpu() for part in parts])

    a, b = flat(ours, whole), flat(whole, ours)
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
    if not (abs(factor - 1) <= tolerance and rest <= tolerance):  # nor where one is no number
        return failed(
            check,
            about,
            "divide each micro-batch's summed loss by the samples (or label weight) of the whole "
            "update, not by its own; compute the loss outside the model",
        )
    return passed(check, about)
