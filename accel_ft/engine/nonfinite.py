"""Non-finite losses and gradients: all ranks detect them before the weights change."""

import logging
import math
from collections import deque
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from accel_ft.checkpoint import state, transaction
from accel_ft.engine.resume import resume
from accel_ft.engine.run import Run
from accel_ft.errors import UserError, listed

logger = logging.getLogger(__name__)

IN_A_ROW = 10  # consecutive updates that `skip` or `rollback` tolerate


class Outcome(NamedTuple):
    """Losses and gradient norm of an update, possibly still being copied from the device."""

    step: int  # of the update, counted from 0
    values: torch.Tensor  # this rank's loss of each micro-batch, and the norm, float32
    arrived: Any = None  # CUDA event after which they can be read; None: at once


def may_step(run: Run, losses: list[torch.Tensor], grad_norm: torch.Tensor) -> bool:
    """Return whether the weights may move: losses and gradients are finite on every rank.
    Collective.

    On a GPU the host reads the result one update later, so that it does not wait for the device,
    and returns True until then; the device itself skips a non-finite step (`found_inf`).

    Args:
        losses: this rank's weighted loss of each micro-batch of the update, on the device.
        grad_norm: of the whole update.
    """
    run.outcomes.append(_measure(run, losses, grad_norm))
    # If read late, the newest outcome stays unread until the next update, unless something due now
    # needs it: for example a stop signal, which the ranks exchange in `_count_in_oldest`.
    while len(run.outcomes) > (1 if _is_late(run) and not run.needs_outcome() else 0):
        if _count_in_oldest(run):
            continue
        if run.outcomes[0].step == run.step or run.config.on_nonfinite != "skip":
            return False
        handle_nonfinite(run)  # the device has skipped it already; this records it
    return True


def _count_in_oldest(run: Run) -> bool:
    """Read the oldest outcome, and add it to the meter; if it is not finite on every rank, keep it
    and return False. The ranks also agree on a stop signal here. Collective.
    """
    outcome = run.outcomes[0]
    if outcome.arrived is not None:
        outcome.arrived.synchronize()
    *sums, norm = outcome.values.tolist()
    scaler, scale = run.accelerator.scaler, 1.0
    if scaler is not None and not math.isfinite(norm):
        scale = scaler.get_scale()
    overflows = scale > 1.0  # in fp16; not an error while the loss scale can be halved
    finite = all(map(math.isfinite, sums)) and (math.isfinite(norm) or overflows)
    run.stop_signal, nonfinite = run.watch.all_max(run.watch.stop_signal, int(not finite))
    run.grad_norm = norm if math.isfinite(norm) else None
    if nonfinite:
        return False
    run.outcomes.popleft()
    if overflows:
        logger.warning(
            "update %d: gradients overflow in fp16: it is skipped, and the loss scale %g halved",
            outcome.step + 1, scale,
        )  # fmt: skip
        run.events.write("overflow", step=outcome.step + 1, loss_scale=scale)
    run.meter.loss_sum += math.fsum(sums)
    run.meter.loss_weight += run.global_weight(outcome.step)
    if outcome.step > run.newest_nonfinite:
        run.num_nonfinite = 0
    return True


def _is_late(run: Run) -> bool:
    """Whether outcomes are read an update later."""
    on_device = run.accelerator.device.type == "cuda" and run.accelerator.scaler is None
    # With offloaded parameters the CPU does the step, and would not wait for the device's result.
    return on_device and next(run.model.parameters()).device.type == "cuda"


def _measure(run: Run, losses: list[torch.Tensor], grad_norm: torch.Tensor) -> Outcome:
    """Collect losses and norm; if they are read late, have the device skip a non-finite step."""
    values = torch.stack([*losses, grad_norm.to(losses[0])])  # the norm is on the CPU if offloaded
    if not _is_late(run):
        return Outcome(run.step, values)
    sick = (~values.isfinite()).any().float()
    if run.accelerator.num_processes > 1:
        dist.all_reduce(sick, dist.ReduceOp.MAX)
    run.optimizer.optimizer.found_inf = sick
    values = values.to("cpu", non_blocking=True)  # into pinned memory
    return Outcome(run.step, values, torch.cuda.current_stream().record_event())


def handle_nonfinite(run: Run) -> bool:
    """Handle the oldest outcome, which is not finite, as `on_nonfinite` says. Collective.

    Returns:
        True if the update is skipped, False after a rollback.

    Raises:
        UserError: `on_nonfinite` is stop, or too many updates in a row were not finite.
    """
    run.wait_for_publication()
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.update()  # `optimizer.step`, which does it, was left out
    outcome = run.outcomes.popleft()
    places, losses = _nonfinite_places(run, outcome)
    source = run.splits.sources["train"]
    ids = source.row_numbers(run.splits.train.ids(places)).tolist()
    policy, number = run.config.on_nonfinite, outcome.step + 1
    run.num_nonfinite += 1
    run.newest_nonfinite = max(run.newest_nonfinite, outcome.step)
    what = f"the loss is {losses[0]}" if losses else "the loss is finite, its gradient is not"
    where = f"samples {listed(ids, 10)} of {run.splits.train.store.name}, counted from 0"
    message = f"update {number}: {what}; {where}"
    if policy == "stop" or run.num_nonfinite > IN_A_ROW:
        _write_event(run, "stop", number, ids, losses, run.step)
        first = outcome.step  # the weights are still those after this many updates
        skipped = range(number - run.num_nonfinite, number)
        while first - 1 in (skipped if policy == "skip" else run.passed_over):
            first -= 1
        names = [(s, path.name) for s, path in transaction.list_published(run.checkpoints)][::-1]
        newest = next((name for _, name in names), "none")
        older = next((name for step, name in names if step < first), "none")
        in_a_row = f", after {IN_A_ROW} others in a row" * (policy != "stop")
        pass_over = ", or on_nonfinite: skip or rollback" * (policy == "stop")
        raise UserError(
            f"{message}{in_a_row}. The weights are those after update {first}; "
            f"the newest checkpoint is {newest}"
            + f", the newest from before these weights {older}" * (older != newest)
            + ". Fix: "
            + ("other pretrained weights, smaller class_weights or labels; " * (first == 0))
            + "a lower learning_rate or more warmup_steps (at a resume: --allow_changed KEY)"
            + ", bf16 in place of fp16" * (run.accelerator.mixed_precision == "fp16")
            + pass_over
        )
    logger.warning("%s: %s", message, policy)
    if policy == "rollback":
        _roll_back(run, outcome.step)
    # The step by which `rewind` drops the event: a resume from before a skipped update repeats it.
    # A rollback's event is kept only if the checkpoint lists the update in `passed_over`.
    _write_event(run, policy, number, ids, losses, number if policy == "skip" else run.step)
    return policy == "skip"


def _nonfinite_places(run: Run, outcome: Outcome) -> tuple[NDArray[np.int64], list[str]]:
    """Return the places in the micro-batches whose loss is not finite, over all ranks, and these
    losses; if all losses are finite, the places of the global batch, and no losses.
    """
    micro_batches = run.plan.micro_batches(outcome.step, run.num_micro_batches)
    mine = micro_batches[run.accelerator.process_index :: run.accelerator.num_processes]
    bad = [
        (places.tolist(), str(loss))
        for places, loss in zip(mine, outcome.values.tolist()[:-1], strict=True)
        if len(places) and not math.isfinite(loss)  # an empty one has weight 0, but NaN x 0 is NaN
    ]
    told = [pair for rank in run.watch.all_gather(bad) for pair in rank]
    if not told:
        return run.plan.global_batch(outcome.step), []
    return np.concatenate([np.array(places) for places, _ in told]), [loss for _, loss in told]


def _write_event(
    run: Run, policy: str, update: int, ids: list[int], losses: list[str], step: int
) -> None:
    run.events.write(
        "nonfinite", step=step, update=update, policy=policy, losses=losses, sample_ids=ids
    )


def _roll_back(run: Run, sick_step: int) -> None:
    """Load the newest valid checkpoint, and leave the failed update's batch out from now on. If the
    updates just before it were left out already, the last one made before those may have damaged
    the weights: then load a checkpoint from before that one, and leave it out too.
    """
    first = sick_step
    while first - 1 in run.passed_over:
        first -= 1
    spoilt = range(first, sick_step + 1) if first < sick_step else ()
    folder = state.find(run.watch, run.checkpoints, "latest", spoilt)
    assert folder is not None  # `rollback` saves before the first update
    if run.accelerator.is_main_process:
        published = [path for _, path in transaction.list_published(run.checkpoints)]
        later = published[published.index(folder) + 1 :]
        transaction.set_aside(later, "rolled back from")
        transaction.remove_leftovers(run.checkpoints)
    kept, passed_over = (run.num_nonfinite, run.newest_nonfinite), run.passed_over
    run.outcomes.clear()
    lost = resume(run, folder)
    if run.accelerator.is_main_process:
        transaction.set_aside(lost, "passed over")
    left_out = [sick_step, first - 1] if spoilt and run.step < first else [sick_step]
    run.num_nonfinite, run.newest_nonfinite = kept
    run.passed_over = [*passed_over, *left_out]
    run.events.rewind(run.step, run.eval_is_due, run.passed_over)
    without = " and ".join(str(step + 1) for step in sorted(left_out))
    logger.warning("rolled back to update %d; leaving out update %s", run.step, without)


def skip_if_left_out(run: Run) -> bool:
    """Skip the coming update if a rollback left it out; return whether it did. Collective."""
    run.watch.stage(f"step {run.step + 1}", can_save=True)
    if run.step not in run.passed_over:
        return False
    deque(islice(run.batches, run.accumulation_steps), maxlen=0)
    run.grad_norm = None
    run.after_update()
    return True
