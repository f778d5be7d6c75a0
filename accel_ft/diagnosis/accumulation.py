"""Faulty gradient accumulation: gradients that leak, are dropped, averaged wrongly or reduced too
often; found by recording what a loop calls, and by comparing gradients.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accel_ft.diagnosis.finding import Finding, Verdict, check, num_ranks
from accel_ft.diagnosis.gradients import gradients_of
from accel_ft.errors import listed
from accel_ft.runtime.fsdp import whole

Update = list[str]
BACKWARD, REDUCE, STEP, SCHEDULE = "backward", "reduce", "step", "schedule"
LEFT, WITHIN = "left", "step within the backward pass"
UNSUMMED = "unsummed"


class _Recorder:
    """Records calls; a call made inside another recorded call is left out."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.depth = 0
        self.outermost: Callable[..., None] = self.backward
        self.used: dict[Any, tuple[Any, int]] = {}
        self.added: set[Any] = set()
        self.sums_next = self.is_unsummed = False
        self.replicated: dict[Any, tuple[Any, int]] = {}  # gradients of DDP's parameters

    def forward(self, model: nn.parallel.DistributedDataParallel, _: Any) -> None:
        """Note whether DDP will sum the gradients of this pass over the ranks."""
        if torch.is_grad_enabled():
            self.sums_next = bool(model.require_backward_grad_sync)

    def noting(self, owner: Any, name: str, note: Callable[..., None]) -> Any:
        """Return a patch of `owner.name` that records each outermost call."""
        original = getattr(owner, name)

        @wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.enter(note, *args, *kwargs.values())
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()
                if note == self.backward and self.depth == 0:
                    self.after_backward()

        return mock.patch.object(owner, name, noted)

    def enter(self, note: Callable[..., None], *args: Any) -> None:
        """Record the start of a call if it is outermost, or a step within a backward pass."""
        if self.depth == 0:
            note(*args)
            self.outermost = note
        elif note == self.step and self.outermost == self.backward:
            self.events.append(WITHIN)
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """Record the end of a call."""
        self.depth -= 1

    def backward(self, *_: Any) -> None:
        """Record a backward pass, and the gradients that a step used and nothing has cleared."""
        self.used = {p: (p.grad, _version(p.grad)) for p in _filled(self.used)}
        self.added = set(_filled(self.added))
        self.replicated = {p: (p.grad, _version(p.grad)) for p in self.replicated}
        self.events.append(BACKWARD)

    def after_backward(self) -> None:
        """Note which used gradients the pass added to; those of another model are unchanged."""
        self.added |= _changed(self.used)
        if _changed(self.replicated):
            self.is_unsummed = not self.sums_next
            if self.sums_next:
                self.events.append(REDUCE)
            self.sums_next = False

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an optimizer's step, and whether its gradients were added to used ones. Judged
        only here: what another model's loss has added may be cleared before the step.
        """
        taken = _filled(p for group in optimizer.param_groups for p in group["params"])
        if not self.added.isdisjoint(taken):
            self.events.append(LEFT)
        if num_ranks() > 1 and self.is_unsummed and not self.replicated.keys().isdisjoint(taken):
            self.events.append(UNSUMMED)
        self.added.difference_update(taken)
        self.events.append(STEP)
        self.used |= dict.fromkeys(taken, (None, 0))

    def sum(self, tensor: torch.Tensor, *_: Any) -> None:
        """Note an all-reduce by the loop itself; a tensor of one element is no gradient."""
        self.is_unsummed = self.is_unsummed and tensor.numel() < 2

    def schedule(self, scheduler: Any, *_: Any) -> None:
        """Record a scheduler's step, with the scheduler's id."""
        self.events.append(f"{SCHEDULE} {id(scheduler)}")


def _filled(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters that have a gradient which is not all zero."""
    return [p for p in parameters if p.grad is not None and bool(p.grad.any())]


def _changed(gradients: dict[Any, tuple[Any, int]]) -> set[Any]:
    """Return the parameters whose gradient was replaced, or written to, since it was noted."""
    return {
        p
        for p, (gradient, version) in gradients.items()
        if p.grad is not None and (p.grad is not gradient or _version(gradient) > version)
    }


def _version(gradient: Any) -> int:
    """Return a gradient's version counter: how often it was written to; FSDP2: its local shard."""
    return 0 if gradient is None else int(getattr(gradient, "_local_tensor", gradient)._version)


@contextlib.contextmanager
def recording(model: nn.Module | None = None) -> Iterator[list[str]]:
    """Record what the loop in the body does: backward, reduce, step, schedule, in order, and "left"
    before a step whose gradients were added to those of the step before.

    Args:
        model: wrapped by DDP, or containing such a module; a backward pass that DDP reduces is
            followed by "reduce", and a step on gradients not reduced is preceded by "unsummed".
    """
    recorder = _Recorder()
    hooks = [
        register_optimizer_step_pre_hook(partial(recorder.enter, recorder.step)),
        register_optimizer_step_post_hook(recorder.leave),
    ]
    model = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    for part in () if model is None else model.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            hooks.append(part.register_forward_pre_hook(recorder.forward))
            recorder.replicated |= dict.fromkeys(part.parameters(), (None, 0))
    patches = [
        recorder.noting(torch.autograd, "backward", recorder.backward),
        recorder.noting(torch.amp.GradScaler, "step", lambda _, one, *__: recorder.step(one)),
        recorder.noting(LRScheduler, "_initial_step", lambda *_: None),  # hides __init__'s step
    ]
    if torch.distributed.is_available():  # gradients, or a copy, reduced by hand
        patches.append(recorder.noting(torch.distributed, "all_reduce", recorder.sum))
    for kind in (LRScheduler, *_subclasses(LRScheduler)):
        if "step" in vars(kind):
            patches.append(recorder.noting(kind, "step", recorder.schedule))
    with contextlib.ExitStack() as undo:
        for patch in patches:
            undo.enter_context(patch)
        for hook in hooks:
            undo.callback(hook.remove)
        yield recorder.events


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def blocks(events: Sequence[str]) -> tuple[list[Update], Update]:
    """Split events after each step; return the updates, and the events after the last one."""
    updates: list[Update] = []
    rest: Update = []
    for event in events:
        rest.append(event)
        if event == STEP:
            if updates and BACKWARD not in rest:  # a second optimizer's step
                updates[-1] += rest
            else:
                updates.append(rest)
            rest = []
    return updates, rest


@check("accumulation")
def accumulation_calls(  # noqa: PLR0911
    events: Sequence[str], accumulation_steps: int
) -> Finding:
    """Judge what `recording` recorded over one epoch.

    Args:
        events: from `recording`.
        accumulation_steps: micro-batches that an update should have.
    """
    updates, rest = blocks(events)
    if WITHIN in events:
        return Verdict.SKIP(f"{events.count(WITHIN)} steps within the backward pass")
    if not updates:
        return Verdict.FAIL(f"no step in {len(events)} calls", "call optimizer.step()")
    counts = [update.count(BACKWARD) for update in updates]
    most = max(counts)
    if most == 0:
        return Verdict.SKIP(f"{events.count(STEP)} steps, no backward pass outside of step()")
    if BACKWARD in rest:
        return Verdict.FAIL(
            f"the epoch ends with {rest.count(BACKWARD)} backward passes and no step: their "
            "gradients are dropped, or go into the next epoch's first update",
            "step after the last batch of an epoch too (accelerator.accumulate does), and divide "
            "by the number of samples it has",
        )
    if LEFT in events:
        return Verdict.FAIL(
            f"{events.count(LEFT)} updates begin with the gradients of the update before",
            "optimizer.zero_grad() after each step",
        )
    if UNSUMMED in events:
        return Verdict.FAIL(
            f"{events.count(UNSUMMED)} updates step on gradients not summed over the ranks",
            "run the last backward pass of an update outside no_sync() (accelerator.accumulate "
            "does), and each forward pass through the DDP-wrapped model; fine for local SGD",
        )
    about = f"{len(updates)} updates of {listed(sorted(set(counts)), 8)} micro-batches"
    if most > accumulation_steps or (most < accumulation_steps and len(updates) > 1):
        return Verdict.FAIL(
            f"{about} instead of {accumulation_steps}",
            "step once for all of them: with accelerator.accumulate(model) around each, and "
            "Accelerator(gradient_accumulation_steps=...); each backward pass counts as a "
            "micro-batch",
        )
    # a scheduler steps after the optimizer: its step is in the block that follows
    schedules = max(
        max(Counter(e for e in block if e.startswith(SCHEDULE)).values(), default=0)
        for block in [*updates, rest]
    )
    if schedules > 1:
        is_after_backward = any(
            before in (BACKWARD, REDUCE) and event.startswith(SCHEDULE)
            for before, event in pairwise(events)
        )
        is_for_each_rank = schedules == num_ranks() and not is_after_backward
        judged = Verdict.WARN if is_for_each_rank else Verdict.FAIL
        return judged(
            f"the scheduler is stepped {schedules} times an update"
            + (", once for each rank" if is_for_each_rank else ""),
            "step it once after each optimizer step; Accelerate steps a prepared scheduler once "
            "for each rank: make it with num_processes times as many steps, or leave it out of "
            "prepare()",
        )
    sums = max(update.count(REDUCE) for update in updates)
    if sums > 1:
        return Verdict.WARN(
            f"gradients are summed over the ranks up to {sums} times an update of "
            f"{most} micro-batches",
            "model.no_sync() around all but the last backward pass (accelerator.accumulate)",
        )
    if counts[0] < most and set(counts[1:]) == {most}:
        return Verdict.WARN(
            f"{about}: a short first block",
            "step after every k-th batch: if (index + 1) % k == 0, counting from 0",
        )
    if len(set(counts)) > 1:
        return Verdict.WARN(
            f"{about}: a short last block",
            "its loss must be divided by its own number of samples: see `accumulated gradient`",
        )
    return Verdict.PASS(about)


@check("accumulated gradient")
def accumulated_gradient(
    model: nn.Module,
    micro_batches: Callable[[], Any],
    whole_batch: Callable[[], Any],
    tolerance: float = 1e-3,
) -> Finding:
    """Compare the gradient of k micro-batches with that of the same samples in one batch.
    Collective where FSDP2 has sharded the model.

    Args:
        model: with dropout off and BatchNorm's statistics fixed (`model.eval()` will do).
        micro_batches: runs the loop's own backward passes over the micro-batches, without a step.
        whole_batch: computes the mean loss of the same samples and its backward pass.
        tolerance: relative; sums in another order differ by about 1e-6 in float32, 1e-2 in bf16.
    """
    ours, theirs = gradients_of(model, micro_batches), gradients_of(model, whole_batch)
    aa, ab, bb = torch.zeros(3, dtype=torch.float64)
    for name in theirs | ours:  # one by one: in float64 all would be four times the model
        a, b = (
            whole(each[name]).to_dense().cpu().double() if name in each else torch.zeros(1)
            for each in (ours, theirs)
        )
        aa, ab, bb = aa + (a * a).sum(), ab + (a * b).sum(), bb + (b * b).sum()
    if not bb:
        return Verdict.FAIL("the whole batch leaves no gradient", "check requires_grad")
    factor = float(ab / bb)
    left = (aa - 2 * factor * ab + factor**2 * bb).clamp_min(0)  # |ours - factor * theirs|^2
    rest = float((left / aa.clamp_min(1e-60)).sqrt())
    about = f"{factor:.4f} times that of the whole batch, {rest:.1e} of it in another direction"
    if not (abs(factor - 1) <= tolerance and rest <= tolerance):  # NaN fails too
        return Verdict.FAIL(
            about,
            "divide each micro-batch's summed loss by the samples (or label weight) of the whole "
            "update, not by its own; compute the loss outside the model; zero_grad and clipping "
            "once an update, not in between",
        )
    return Verdict.PASS(about)
