"""The state of a run after an update, saved and loaded as a unit by all ranks together.

`Accelerator.save_state` writes the model, the optimizer, the loss scaler and each rank's random
states. trainer_state.json holds the step, from which plan and schedule continue, and the metrics so
far; it is JSON because accelerate pickles registered objects. With the model's config and the
tokenizer beside them, a checkpoint of one process or DDP is a Hugging Face folder.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.checkpoint.api import CheckpointException

from accel_ft.checkpoint import convert, transaction, trust
from accel_ft.config import FIXED, TrainConfig
from accel_ft.errors import CheckpointError, in_one_line, listed
from accel_ft.runtime.watch import Watch

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
ABOUT = {  # explains a key that differs; {} stands for the saved value
    "mixed_precision": " (`accelerate launch --mixed_precision {}`)",
    "global_batch_size": (
        " (by gradient_accumulation_steps it grows with the ranks; `--gradient_accumulation_steps "
        "none --global_batch_size {}` keeps it)"
    ),
    "train_data": " (the rows, their columns, the tokenizer or max_seq_length)",
}
NO_SEED = 2**62 + 1  # a seed no run uses: integer settings fit int32
RUN_STATE = (  # attributes of Run
    "step", "best", "num_worse", "eval_is_due", "evaluated_step", "num_nonfinite",
    "newest_nonfinite", "passed_over",
)  # fmt: skip
TRAINER_STATE_KEYS = {
    *RUN_STATE, "num_processes", "device", "devices", "identity", "loss_sums", "loss_weight",
    "validation_data", "mixed_precision", "accumulation_steps",
}  # fmt: skip


def save(
    accelerator: Accelerator,
    watch: Watch,
    final: Path,
    trainer_state: dict[str, Any],
    descriptions: Sequence[Any],
) -> None:
    """Write and seal a checkpoint between two updates; the caller publishes it. Collective.

    Args:
        final: where the checkpoint will be published.
        trainer_state: the state that accelerate does not save; plain JSON values.
        descriptions: objects with `save_pretrained`: the configs of model and LoRA, the tokenizer.

    Raises:
        CheckpointError: a rank could not write; all ranks raise the same. Published checkpoints are
            intact, the staging folder is removed.
    """
    staging, is_main = transaction.staging_folder(final), accelerator.is_main_process
    with all_or_none(watch, final):
        if is_main:
            watch.check_folder()
            transaction.start(final)
            for name in convert.SHARDS if convert.makes_shards(accelerator) else ():
                (staging / name).mkdir()  # else a rank could fail before torch's collective
    with all_or_none(watch, final):
        accelerator.save_state(str(staging))
        if is_main:
            text = json.dumps(trainer_state, indent=1)
            (staging / TRAINER_STATE).write_text(text, encoding="utf-8")
            for description in descriptions:
                description.save_pretrained(str(staging))
    with all_or_none(watch, final):
        if is_main:
            transaction.seal(final)


@contextlib.contextmanager
def all_or_none(watch: Watch, final: Path) -> Iterator[None]:
    """Run the body on all ranks. If it fails on any, remove the staging and sealed folders (after a
    failed write nobody knows what reached the disk), and raise the same error on all. Collective.
    """
    fault: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # each library wraps OSError its own way
        fault = error
    told = watch.all_gather(None if fault is None else _told(fault))
    if any(told):
        for folder in (transaction.staging_folder(final), transaction.sealed_folder(final)):
            shutil.rmtree(folder, ignore_errors=True)
        reason = next(reason for reason in told if reason)
        with contextlib.suppress(OSError):
            reason += f" ({shutil.disk_usage(final.parent).free / 1e6:,.0f} MB free)"
        root = final.parent if final.name.startswith("step_") else final.parent / "checkpoints"
        newest = [path.name for _, path in transaction.list_published(root)][-1:]
        left = f"the newest one saved is {newest[0]}" if newest else "none is saved yet"
        raise CheckpointError(f"{final} could not be saved: {reason}; {left}") from fault


def check(folder: Path) -> None:
    """Check that a checkpoint is complete and that loading it runs no code.

    Raises:
        CheckpointError: naming the files.
    """
    transaction.verify(folder)
    trust.refuse_code(folder)


def find(
    watch: Watch, root: Path, wanted: str | None, unwanted: Collection[int] = ()
) -> Path | None:
    """Return the checkpoint to resume from, verified, the same on every rank; None to start from
    the beginning. Collective.

    Args:
        root: the run's checkpoints folder.
        wanted: `latest`, a checkpoint's folder, or None.
        unwanted: updates whose checkpoints are taken only if there is no other.

    Raises:
        CheckpointError: `wanted` names a folder that is missing or damaged, or every checkpoint is
            damaged.
    """
    found: Path | None = None
    fault: CheckpointError | None = None
    if watch.rank == 0 and wanted is not None:
        try:
            transaction.publish_sealed(root)
            if wanted == "latest":
                found = newest_sound(root, unwanted)
            else:
                found = Path(wanted)
                if (found / "checkpoints").is_dir():
                    latest = "latest, or " * (found.resolve() == root.parent.resolve())
                    raise CheckpointError(
                        f"resume_from_checkpoint={wanted}: is a run, not a checkpoint. "
                        f"Fix: {latest}a folder in {found / 'checkpoints'}"
                    )
                check(found)
        except CheckpointError as error:
            fault = error
        except OSError as error:
            fault = CheckpointError(f"{root}: {error}")
    found, fault = watch.all_gather((found, fault))[0]  # patient: rank 0 may hash for long
    if fault is not None:
        raise fault
    return found


def is_sound(watch: Watch, folder: Path) -> bool:
    """Return, on every rank, whether a checkpoint is valid; log what is wrong. Collective."""
    return bool(watch.all_gather(watch.rank == 0 and _verifies(folder))[0])


def _verifies(folder: Path) -> bool:
    try:
        check(folder)
    except CheckpointError as error:
        logger.warning("not usable: %s", error)
        return False
    return True


def newest_sound(root: Path, unwanted: Collection[int] = ()) -> Path | None:
    """Return the newest valid checkpoint, or None if there is none; log the damaged ones skipped. A
    checkpoint of an `unwanted` update is taken only if there is no other.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    published = transaction.list_published(root)
    published.sort(key=lambda each: each[0] not in unwanted)  # unwanted ones first: tried last
    found = next((folder for _, folder in reversed(published) if _verifies(folder)), None)
    if found is None and not all(os.path.lexists(folder) for _, folder in published):
        return newest_sound(root, unwanted)  # a run in progress has just pruned one
    if published and found is None:
        raise CheckpointError(
            f"{root}: all {len(published)} checkpoints are damaged. "
            "Fix: restore a copy of one, or start again in another output_dir"
        )
    return found


def best_step(folder: Path) -> int | None:
    """Return the update of the best evaluation at the time a checkpoint was written."""
    with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
        return int(read_trainer_state(folder)["best"]["step"])
    return None  # there was none, or it cannot be read


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Read a verified checkpoint's trainer_state.json.

    Raises:
        CheckpointError: it is missing, damaged or not written by accel_ft.
    """
    try:
        state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        state.setdefault("evaluated_step", state["step"])  # older checkpoints lack this key
        return {key: state[key] for key in TRAINER_STATE_KEYS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: no readable {TRAINER_STATE} ({error!r})") from error


def load(
    accelerator: Accelerator,
    folder: Path,
    trainer_state: dict[str, Any],
    seed: int,
    devices: list[int],
) -> None:
    """Load a verified checkpoint into model, optimizer and random generators. Collective.

    Args:
        devices: the local device index of each rank; accelerate saves and restores GPU random
            states by it.
    """
    torch.manual_seed(NO_SEED)  # stays set if accelerate silently skips unreadable random states
    try:
        convert.load_any(accelerator, folder)
    except (Exception, CheckpointException) as error:  # a foreign file may raise anything
        raise CheckpointError(f"{folder}: cannot be loaded: {_told(error)}") from error
    on_gpu = accelerator.device.type == "cuda"
    is_lost = NO_SEED in (torch.initial_seed(), torch.cuda.initial_seed() if on_gpu else 0)
    accelerator.step = 0  # counts micro-steps; a checkpoint lies between two updates
    saved = (trainer_state["num_processes"], trainer_state["device"])
    here = (accelerator.num_processes, accelerator.device.type)
    why, level = "", logging.INFO
    if saved != here:
        why = "saved by {} processes ({}), resumed by {} ({})".format(*saved, *here)
    elif trainer_state["devices"] != devices:
        why = f"resumed on other devices: {devices} for {trainer_state['devices']}"
    elif is_lost:
        why = f"rank {accelerator.process_index} cannot read its random states"
        level = logging.ERROR  # ranks other than 0 log errors only
    if why:
        set_seed(seed + trainer_state["step"], device_specific=True)
        logger.log(
            level,
            "%s: weights, optimizer, schedule and data order are restored; dropout's random state "
            "cannot be, and is seeded again with seed + step",
            why,
        )


def read_weights(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's weights by name, in one process.

    Raises:
        CheckpointError: they cannot be read.
    """
    trust.refuse_code(folder)  # a folder without a manifest was not checked before
    try:
        return convert.read_weights(folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder}: cannot be loaded: {_told(error)}") from error


def check_same_run(
    folder: Path, saved: dict[str, Any], identity: dict[str, Any], allowed: Collection[str] = ()
) -> None:
    """Refuse to resume from another job's checkpoint.

    Args:
        saved: the identity in the checkpoint.
        identity: of this job: model, labels, data, global batch size, seed.
        allowed: keys of the identity that may differ.

    Raises:
        CheckpointError: listing the differences.
    """
    differences, names, can_all = [], [*allowed], True
    usual = TrainConfig.model_validate({}).model_dump(mode="json")
    saved = usual | saved  # older checkpoints lack newer keys
    for key, here in identity.items():
        there = saved.get(key)
        can_differ = _can_differ(key, there, here)
        if there == here or (key in allowed and can_differ):
            continue
        told = f"{key}: {there!r} in the checkpoint, {here!r} in this job"
        if key == "labels" and there is not None:
            others = [f"{a!r} was {b!r}" for a, b in zip(here, there, strict=False) if a != b]
            if len(here) != len(there):
                others = sorted(set(here) ^ set(there))
            told = f"labels: {len(there)} in the checkpoint, {len(here)} in this job, which differ "
            told += f"in {listed(others, 10)}"
        names, can_all = [*names, key], can_all and can_differ
        if not can_differ:
            told += " (changes the parameters or their groups: cannot be allowed)"
        told += ABOUT.get(key, "").format(there)
        differences.append(told)
    if differences:
        allow = f", or --allow_changed {','.join(names)} to accept what differs" * can_all
        raise CheckpointError(
            f"{folder}: belongs to another job. Fix: the same settings, or another output_dir"
            f"{allow}\n  " + "\n  ".join(differences)
        )


def _can_differ(key: str, saved: Any, wanted: Any) -> bool:
    """Return whether a key may differ at all: not if it changes the parameters (number of labels,
    `FIXED` keys) or their groups (layerwise_lr_decay set or unset). Label names may change.
    """
    if key == "labels":
        return len(saved or ()) == len(wanted)
    if key == "layerwise_lr_decay":
        return None not in (saved, wanted)
    return key not in FIXED


def _told(error: BaseException) -> str:
    """Return an error's whole message on one line: torch lists mismatches after the first line."""
    if isinstance(error, CheckpointException):  # torch's wrapper around the ranks' errors
        error = next(iter(error.failures.values()))[0]
    return in_one_line(error)
