"""Start or resume a run, and write the files that describe it to its folder."""

import hashlib
import logging
import math
import shutil
from pathlib import Path
from typing import Any

from accel_ft.checkpoint import state, transaction
from accel_ft.config import TrainConfig
from accel_ft.data.tokenize import tokenizer_fingerprint
from accel_ft.engine.resume import refuse_fewer_updates, resume
from accel_ft.engine.run import Run
from accel_ft.errors import CheckpointError, counted
from accel_ft.model import load
from accel_ft.runtime.files import write_whole
from accel_ft.runtime.logging import read_events
from accel_ft.runtime.receipt import versions, write_receipt
from accel_ft.settings import is_run, read_receipt

logger = logging.getLogger(__name__)

ORDER_HASH_STEPS = 256


def is_finished(run: Run) -> bool:
    """Return whether the folder holds this very run, with nothing left to do. Its end is redone for
    other evaluation rows, another choice of best or last model, or if part of model/ is missing.

    Raises:
        CheckpointError: it holds another job's run, or a longer one.
    """
    config = run.config
    ends = list(read_events(run.events.path, "end"))
    if config.resume_from_checkpoint != "latest" or not ends:
        return False
    step, patience = ends[-1]["step"], config.early_stopping_patience
    if step > run.num_steps:
        _checked_receipt(run)  # first: tells if it is another job (larger batch, fewer rows)
    refuse_fewer_updates(run.output_dir, step, run.num_steps)
    is_whole = step >= run.num_steps
    if not is_whole and (patience is None or ends[-1]["num_worse"] < patience):
        return False
    receipt, wanted = _checked_receipt(run), _selection(config)
    chosen = receipt.get("selection", wanted)
    if not is_whole and chosen["metric"] != wanted["metric"]:
        return False  # another metric stopped it early
    if wanted["takes_best"] and chosen["metric"] not in (None, wanted["metric"]):
        logger.warning(
            "the model was chosen by %s; no updates are left to choose one by %s",
            chosen["metric"], wanted["metric"],
        )  # fmt: skip
    is_done = chosen["takes_best"] == wanted["takes_best"] and _end_is_whole(run, receipt)
    anew = "its end is repeated: other evaluation rows, another choice, or model/ is incomplete"
    logger.info(
        "%s is finished: %s (%d of %d updates done%s)",
        run.output_dir, "nothing to do" if is_done else anew, step, run.num_steps,
        "" if is_whole else f", early_stopping_patience={patience} ended it",
    )  # fmt: skip
    return is_done


def _end_is_whole(run: Run, receipt: dict[str, Any]) -> bool:
    """Return whether model/ is complete and was evaluated on the rows that are given now."""
    rows = _fingerprints(run) | {"train": receipt["data"]["train"]}
    parts = ["config.json", "*.safetensors", "tokenizer_config.json"]
    parts += ["tokenizer.json"] * getattr(run.tokenizer, "is_fast", False)
    return rows == receipt["data"] and all(
        any((run.output_dir / "model").glob(part)) for part in parts
    )


def _selection(config: TrainConfig) -> dict[str, Any]:
    """Return which model is taken at the end, and by which metric."""
    picks = config.load_best_model_at_end or config.early_stopping_patience is not None
    return {
        "takes_best": config.load_best_model_at_end,
        "metric": config.best_rule if picks else None,
    }


def _checked_receipt(run: Run) -> dict[str, Any]:
    receipt = read_receipt(run.output_dir)
    state.check_same_run(
        run.output_dir, receipt["identity"], run.identity, run.config.allow_changed
    )
    return receipt


def _last_start(run: Run) -> dict[str, Any]:
    """Return update and choice of model of the last start in this folder; empty if none."""
    if not is_run(run.output_dir):
        return {}
    receipt = read_receipt(run.output_dir)
    return dict(receipt["starts"][-1], **receipt.get("selection", {}))


def _saved_step(run: Run) -> int:
    """Return the newest update that certainly had a checkpoint, in this folder or in the one it was
    resumed from; 0 if there may have been none.
    """
    events = list(read_events(run.events.path))
    saved = sorted({event["step"] for event in events if event["event"] == "save"})
    if transaction.has_leftovers(run.checkpoints):  # the last save was not published
        saved = saved[:-1]
    stopped = [event["step"] for event in events if event["event"] == "preempted"]
    begun = _last_start(run).get("step", 0)
    return int(max([begun, *saved, *stopped]))


def _tell_of_last_start(run: Run, best_step: int | None) -> None:
    """Warn if, since the last start, libraries have changed, fewer updates are asked for, or the
    best checkpoint, that of `best_step`, is no longer protected from pruning.
    """
    last, now = _last_start(run), versions()
    is_pruned = run.config.save_total_limit and not run.config.load_best_model_at_end
    if best_step is not None and last.get("takes_best") and is_pruned:
        logger.warning(
            "load_best_model_at_end was on, and is off: the checkpoint of the best evaluation, of "
            "update %d, will be pruned like others", best_step,
        )  # fmt: skip
    was, num_steps = last.get("versions", {}), last.get("num_steps", 0)
    known = [name for name in now if was.get(name) and now[name]]
    changed = [f"{name} {was[name]}, now {now[name]}" for name in known if was[name] != now[name]]
    if changed:
        told = "other versions than at the last start, so the last bits may differ: %s"
        logger.warning(told, "; ".join(changed))
    if num_steps > run.num_steps:
        logger.warning(
            "the run was to have %d updates, now it has %d, and its learning rate follows the "
            "shorter schedule. Fix, if not meant: num_train_epochs, max_steps, rows and batch size "
            "as before",
            num_steps, run.num_steps,
        )  # fmt: skip


def _fingerprints(run: Run) -> dict[str, str]:
    return {name: split.fingerprint() for name, split in run.splits.given.items()}


def start_or_resume(run: Run) -> None:
    """Load the requested checkpoint, if any, and write the files that describe the run. Collective.

    Raises:
        CheckpointError: it is missing, damaged, another job's, or older than others of this run; or
            the folder holds a run that would be lost.
    """
    wanted, accelerator = run.config.resume_from_checkpoint, run.accelerator
    folder, is_elsewhere = state.find(run.watch, run.checkpoints, wanted), False
    lost: list[Path] = []
    has_ended = any(read_events(run.events.path, "end"))
    if folder is not None:
        in_here = folder.parent.resolve() == run.checkpoints.resolve()
        has_run = has_ended or is_run(run.output_dir)
        if not in_here and (has_run or transaction.list_published(run.checkpoints)):
            _checked_receipt(run)
        best_step = state.best_step(folder)
        lost = resume(run, folder)
        own = transaction.checkpoint_folder(run.checkpoints, run.step)
        is_elsewhere = folder.resolve() != own.resolve()  # e.g. a copy, or one set aside
        logger.info("resumed from %s: %d of %d updates done", folder, run.step, run.num_steps)
        _tell_of_last_start(run, best_step if in_here else None)
    elif has_ended:
        raise CheckpointError(
            f"{run.output_dir}: a finished run, and its checkpoints are gone: it cannot resume. "
            "Fix: another output_dir"
        )
    elif wanted is not None:
        saved = _saved_step(run)
        if saved > 0:
            raise CheckpointError(
                f"{run.output_dir}: had reached update {saved}, but its checkpoints are gone. Fix: "
                "put `checkpoints` back (a disk that is not mounted?), --resume_from_checkpoint "
                "FOLDER for one elsewhere, or start again in another output_dir"
            )
        logger.info("no checkpoint in %s yet: starting from the beginning", run.checkpoints)
    later = [path for step, path in transaction.list_published(run.checkpoints) if step > run.step]
    if later and wanted != "latest":
        raise CheckpointError(
            f"resume_from_checkpoint={wanted}: {run.checkpoints} holds later checkpoints, up to "
            f"{later[-1].name}. Fix: another output_dir, or remove them yourself"
        )
    saves_first = is_elsewhere or (run.config.on_nonfinite == "rollback" and run.step == 0)
    run.watch.barrier()  # rank 0 changes the folder only after all ranks have read it
    run.trackers.start(run.config, run.step)
    _announce(run)
    if accelerator.is_main_process:
        transaction.make_root(run.checkpoints)
        transaction.set_aside([*lost, *later], "passed over")
        transaction.remove_leftovers(run.checkpoints)
        _check_space(run, saves_first)
        # First, so that the run no longer counts as finished, whenever it is killed from here on.
        run.events.rewind(run.step, run.eval_is_due, run.passed_over)
        _write_config_and_receipt(run)
        transaction.remove(run.output_dir / "model")  # of an earlier end; no longer valid
        for name in ("predictions.npz", "mistakes.jsonl", "report.html"):
            (run.output_dir / name).unlink(missing_ok=True)
        if run.step > 0:
            run.events.write("resume", step=run.step, num_processes=accelerator.num_processes)
    run.watch.barrier()
    if saves_first:
        run.save()  # to roll back to, or to resume from


def _announce(run: Run) -> None:
    accelerator, rows = run.accelerator, len(run.splits.train)
    size = min(run.plan.global_batch_size, rows)
    if size < run.plan.global_batch_size:
        scaled = ", and lr_scaling goes by a batch that never occurs"
        logger.warning(
            "global_batch_size=%d: more than the %d training rows, so an epoch is one update%s",
            run.plan.global_batch_size, rows, scaled * (run.config.lr_scaling != "none"),
        )  # fmt: skip
    logger.info(
        "training: %s, %s of %s (%d an epoch; %d done), ranks x accumulation "
        "steps x micro-batch: %d x %d x %d; %.1f million parameters, %.3g %% trained; %s, "
        "precision %s",
        counted(rows, "row"), counted(run.num_steps, "update"), counted(size, "sample"),
        run.plan.steps_per_epoch, run.step,
        accelerator.num_processes, run.accumulation_steps, math.ceil(size / run.num_micro_batches),
        run.num_parameters / 1e6, 100 * run.num_trained / run.num_parameters,
        accelerator.device.type, accelerator.mixed_precision,
    )  # fmt: skip


def _check_space(run: Run, saves_first: bool) -> None:
    """Check that the disk has room for the checkpoints that this start adds, and the final model.

    Args:
        run: about to start.
        saves_first: whether it saves before its first update.

    Raises:
        CheckpointError: it has not enough.
    """
    there = len(transaction.list_published(run.checkpoints))
    left = range(run.step + 1, run.num_steps + 1)
    wanted = checkpoint_bytes(run, run.config, left, run.plan.steps_per_epoch, there, saves_first)
    free = shutil.disk_usage(run.checkpoints).free  # may be its own mount
    if free < wanted:
        raise CheckpointError(
            f"output_dir={run.output_dir}: {free / 1e6:,.1f} MB are free on its disk, this run "
            f"needs {wanted / 1e6:,.1f} MB. Fix: free some, another output_dir, or a smaller "
            "save_total_limit (2 at least)"
        )


def checkpoint_bytes(
    run: Run,
    config: TrainConfig,
    left: range,
    steps_per_epoch: int,
    there: int = 0,
    saves_first: bool = False,
) -> int:
    """Return the bytes of the new checkpoints that will exist at once, and of the final model.

    Args:
        run: gives the sizes of the model.
        config: of the job, not `run.config`: the doctor's runs are shorter.
        left: the updates still to be made, by number.
        steps_per_epoch: of the job.
        there: number of checkpoints that exist already.
        saves_first: whether there is a checkpoint before the first update.
    """
    periods = [config.save_steps]
    if config.load_best_model_at_end:  # each evaluation may be the best
        evals = config.eval_steps or steps_per_epoch
        periods += [evals, math.lcm(evals, config.save_steps)]
    due = [(left.stop - 1) // period - (left.start - 1) // period for period in periods]
    at_end = len(left) > 0 and all((left.stop - 1) % period for period in periods)
    saves = saves_first + at_end + sum(due[:2]) - sum(due[2:])
    if config.save_total_limit is not None:  # one more while the newest is written
        at_once = config.save_total_limit + 1 + config.load_best_model_at_end
        saves = max(min(saves, at_once - there), 0)
    weights, trained = 4 * run.num_parameters, 4 * run.num_trained
    saved = 2 * trained + (weights if config.lora_r is None else trained)
    return saved * saves + weights


def _write_config_and_receipt(run: Run) -> None:
    """Write config.yaml and receipt.json."""
    config, selection = run.config, _selection(run.config)
    if selection["metric"] and run.best is not None and run.step >= run.num_steps:
        selection["metric"] = run.best["metric"]  # no update is left to choose by another
    steps = range(min(run.plan.steps_per_epoch, ORDER_HASH_STEPS))
    order = b"".join(run.plan.global_batch(step).tobytes() for step in steps)
    about = {
        "step": run.step,
        "num_steps": run.num_steps,
        "accumulation_steps": run.accumulation_steps,
        "identity": run.identity,
        "selection": selection,
        "data": _fingerprints(run),
        "num_samples": {name: len(split) for name, split in run.splits.given.items()},
        "sample_order_sha256": hashlib.sha256(order).hexdigest(),
        "tokenizer": tokenizer_fingerprint(run.tokenizer),
        "pretrained": run.identity.get("pretrained") or load.provenance(config.model_name_or_path),
    }
    write_receipt(run.output_dir / "receipt.json", run.accelerator, about)
    write_whole(run.output_dir / "config.yaml", config.without_this_start().to_yaml())
