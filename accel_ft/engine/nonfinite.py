"""Losses and gradients that are not finite: seen by all ranks before the weights move."""

import logging
import math
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from accel_ft.checkpoint import state, transaction
from accel_ft.data.loader import Batch
from accel_ft.engine.run import Run
from accel_ft.errors import UserError

logger = logging.getLogger(__name__)

IN_A_ROW = 10  # updates that `skip` or `rollback` put up with


def all_finite(run: Run, grad_norm: torch.Tensor) -> bool:
    """Return whether the update's losses and gradients are finite on every rank. Collective.

    The one place of an update that waits for the device.
    """
    if hasattr(grad_norm, "full_tensor"):
        grad_norm = grad_norm.full_tensor()
    grad_norm = grad_norm.to(run.losses[0])  # with offloaded gradients it is on the CPU
    *losses, norm = torch.stack([*run.losses, grad_norm]).tolist()
    run.grad_norm = norm if math.isfinite(norm) else None
    finite = all(map(math.isfinite, losses))
    finite = finite and (run.grad_norm is not None or _is_fp16_overflow(run))
    run.stop_signal, nonfinite = run.watch.agree(run.watch.stop_signal, int(not finite))
    if nonfinite:
        return False
    run.count_loss(math.fsum(losses))
    if run.step > run.newest_nonfinite:
        run.num_nonfinite = 0
    return True


def _is_fp16_overflow(run: Run) -> bool:
    """Whether gradients that are not finite come of the loss scale, which then halves."""
    scaler = run.accelerator.scaler
    return scaler is not None and scaler.get_scale() > 1.0


def may_skip(run: Run) -> bool:
    """Deal with an update that is not finite as `on_nonfinite` says. Collective.

    Returns:
        True to skip it, False after a rollback.

    Raises:
        UserError: to stop, or after too many in a row.
    """
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.update()  # its step was left out
    places, losses = _nonfinite_places(run)
    ids = run.splits.train.ids(places).tolist()
    policy, number = run.config.on_nonfinite, run.step + 1
    run.num_nonfinite += 1
    run.newest_nonfinite = max(run.newest_nonfinite, run.step)
    what = f"the loss is {losses[0]}" if losses else "the loss is finite, its gradient is not"
    shown = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
    message = f"update {number}: {what}; samples {shown} of {run.splits.train.store.name}"
    if policy == "stop" or run.num_nonfinite > IN_A_ROW:
        _write_event(run, "stop", number, ids, losses)
        newest = [path.name for _, path in transaction.list_published(run.checkpoints)][-1:]
        raise UserError(
            f"{message}, counted from 0. The weights are those of update {run.step}; the "
            f"newest checkpoint is {newest[0] if newest else 'none'}. Fix: a lower "
            "learning_rate, more warmup_steps, mixed_precision bf16 or no instead of fp16, or "
            "on_nonfinite: skip or rollback"
        )
    logger.warning("%s: %s", message, policy)
    run.losses.clear()
    if policy == "rollback":
        _roll_back_to_newest(run)
    _write_event(run, policy, number, ids, losses)
    return policy == "skip"


def _nonfinite_places(run: Run) -> tuple[NDArray[np.int64], list[str]]:
    """Places of the micro-batches whose loss is not finite, over all ranks, and these losses; the
    whole global batch where all losses are.
    """
    micro_batches = run.plan.micro_batches(run.step, run.num_micro_batches)
    mine = micro_batches[run.accelerator.process_index :: run.accelerator.num_processes]
    bad = [
        (places.tolist(), str(float(loss)))
        for places, loss in zip(mine, run.losses, strict=True)
        if not math.isfinite(float(loss))
    ]
    told = [pair for rank in run.watch.tell(bad) for pair in rank]
    if not told:
        return run.plan.global_batch(run.step), []
    return np.concatenate([np.array(places) for places, _ in told]), [loss for _, loss in told]


def _write_event(run: Run, policy: str, update: int, ids: list[int], losses: list[str]) -> None:
    run.events.write(
        "nonfinite", step=run.step, update=update, policy=policy, losses=losses, sample_ids=ids
    )


def _roll_back_to_newest(run: Run) -> None:
    """Load the newest sound checkpoint, and leave the present batch out from now on."""
    folder = state.find(run.watch, run.checkpoints, "latest")
    assert folder is not None  # `rollback` saves before the first update
    run.passed_over.add(run.step)
    run.resume(folder)
    run.events.rewind(run.step)
    logger.warning("rolled back to update %d", run.step)


def passes_over(run: Run, micro_batches: Iterator[Batch]) -> bool:
    """Leave the coming update out where a rollback says so. Collective."""
    run.watch.stage(f"step {run.step + 1}", can_save=True)
    if run.step not in run.passed_over:
        return False
    deque(islice(micro_batches, run.accumulation_steps), maxlen=0)
    run.grad_norm = None
    run.after_update()
    return True
