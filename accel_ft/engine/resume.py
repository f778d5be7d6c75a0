"""Restore a run from a checkpoint, under the present configuration."""

import logging
import math
from pathlib import Path
from typing import Any

from accel_ft.checkpoint import state
from accel_ft.engine.graphs import Graphs
from accel_ft.engine.run import Run
from accel_ft.errors import CheckpointError
from accel_ft.settings import is_run, trained_on

logger = logging.getLogger(__name__)

OF_THE_PLAN = (
    "global_batch_size", "oversampling", "seed", "train_data", "train_sampling_strategy",
)  # fmt: skip


def resume(run: Run, folder: Path) -> list[Path]:
    """Continue from a verified checkpoint. Collective.

    Returns:
        The checkpoint of the best evaluation if it is damaged; the caller must set it aside.

    Raises:
        CheckpointError: it is another job's, or of an update after this job's last one.
    """
    saved = state.read_trainer_state(folder)
    here = run.identity | {"mixed_precision": run.accelerator.mixed_precision}
    there = saved["identity"] | {"mixed_precision": saved["mixed_precision"]}
    state.check_same_run(folder, there, here, run.config.allow_changed)
    refuse_fewer_updates(folder, saved["step"], run.num_steps)
    groups = run.scheduler.optimizer.param_groups
    fresh = [{key: group[key] for key in ("initial_lr", "weight_decay")} for group in groups]
    devices = run.watch.all_gather(run.accelerator.device.index or 0)
    state.load(run.accelerator, folder, saved, run.config.seed, devices)
    # Recorded graphs read the loss scale from a tensor that has been replaced.
    graphs = run.graphs
    run.graphs = Graphs(graphs.parameters, graphs.most_tokens, graphs.accumulates)
    for name in state.RUN_STATE:
        setattr(run, name, saved[name])
    run.saved_step = run.step
    _set_rates(run, fresh)
    _tell_what_differs(run, saved)
    run.logits = None  # from before a rollback
    if run.step == run.num_steps != run.evaluated_step:  # num_steps has become smaller
        run.eval_is_due = True
    lost = _forget_stale_best(run, saved["validation_data"])
    sums, rank = saved["loss_sums"], run.accelerator.process_index
    if len(sums) == run.accelerator.num_processes:
        run.meter.loss_sum = sums[rank]
    else:
        run.meter.loss_sum = math.fsum(sums) if rank == 0 else 0.0
    run.meter.loss_weight = saved["loss_weight"]
    return lost


def refuse_fewer_updates(folder: Path, done: int, wanted: int) -> None:
    """Refuse a job that ends before the updates already done: its record would be another job's.

    Raises:
        CheckpointError: more updates are done than the job has.
    """
    if done > wanted:
        raise CheckpointError(
            f"{folder}: update {done} is done, but the job has only {wanted}. "
            "Fix: max_steps or num_train_epochs as before, or greater"
        )


def _set_rates(run: Run, fresh: list[dict[str, Any]]) -> None:
    """Apply the settings that allow_changed permits, and a longer schedule, from here on.

    Args:
        fresh: initial_lr and weight_decay of each parameter group, from the configuration.
    """
    scheduler = run.scheduler
    lambdas = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * factor(run.step) for base, factor in lambdas]
    vars(scheduler).update(last_epoch=run.step, _step_count=run.step + 1, _last_lr=rates)
    for group, settings, rate in zip(scheduler.optimizer.param_groups, fresh, rates, strict=True):
        group.update(settings, lr=rate)


def _tell_what_differs(run: Run, saved: dict[str, Any]) -> None:
    parts, before = run.accumulation_steps, saved["accumulation_steps"]
    if parts != before and saved["num_processes"] == run.accelerator.num_processes:
        logger.info(
            "an update had %d micro-batches per rank, now it has %d: dropout masks change",
            before, parts,
        )  # fmt: skip
    here, there = run.identity, saved["identity"]
    if any(here[key] != there[key] for key in ("global_batch_size", "train_data")):
        logger.warning(
            "training rows or global_batch_size have changed: the %d of %d updates done so far "
            "count as if they were made by this job, which goes on at epoch %.2f",
            run.step, run.num_steps, run.step / run.plan.steps_per_epoch,
        )  # fmt: skip
    if any(here[key] != there.get(key, here[key]) for key in OF_THE_PLAN):
        # The plan has changed: later numbers stand for other batches than those left out.
        run.passed_over = [step for step in run.passed_over if step < run.step]
    validation = run.splits.validation
    if validation.store is run.splits.train.store:  # cut off the training rows
        of_starts = trained_on(run.output_dir) if is_run(run.output_dir) else ()
        validation.warn_if_trained_on(saved["identity"]["train_data"], *of_starts)


def _forget_stale_best(run: Run, rows: str) -> list[Path]:
    """Forget the best evaluation if its metric, rows or checkpoint no longer hold. Collective.

    Args:
        rows: fingerprint of the validation rows that it was measured on.

    Returns:
        Its checkpoint if that is damaged.
    """
    if run.best is None:
        return []
    metric, rule = run.best["metric"], run.config.best_rule
    is_over = run.is_over and not run.eval_is_due  # a due evaluation may give a new best
    is_needed = run.protected_step not in (None, run.step)  # that of run.step was just loaded
    is_lost = is_needed and not state.is_sound(run.watch, run.best_folder())
    other_rule = metric != rule and (run.step < run.num_steps or run.eval_is_due)
    other_rows = rows != run.splits.validation.fingerprint() and not is_over
    if is_lost and is_over and not other_rule:  # before the start removes model/ and reports
        raise run.best_is_lost()
    lost = [run.best_folder()] if is_lost and run.best_folder().exists() else []
    if other_rule or other_rows or is_lost:
        why = f"the metric is now {rule}" if other_rule else "its checkpoint is lost"
        logger.warning(
            "the best evaluation so far (by %s) no longer counts: %s",
            metric, "the validation rows have changed" if other_rows else why,
        )  # fmt: skip
        run.best, run.num_worse = None, 0
    elif metric != rule and run.config.load_best_model_at_end:
        logger.warning(
            "the best model is still that by %s: no updates are left to choose by %s", metric, rule
        )
    return lost
