"""What a run is at an update, saved and loaded as one thing by all ranks together.

`Accelerator.save_state` writes model, optimizer, loss scaler and every rank's random numbers.
Beside them stand trainer_state.json (schedule, plan position, metrics so far; JSON, since what is
registered for checkpointing is unpickled) and the model's config and tokenizer, so that a
checkpoint of one process or DDP is a Hugging Face folder.
"""

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

from accel_ft.checkpoint import convert, transaction
from accel_ft.errors import CheckpointError

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"


def save(
    accelerator: Accelerator,
    final: Path,
    trainer_state: dict[str, Any],
    config: Any,
    tokenizer: Any,
) -> None:
    """Save the run, between two updates. Collective: every rank calls it.

    Args:
        final: where the checkpoint is published.
        trainer_state: what is not in accelerate's hands; plain JSON values.
        config, tokenizer: of the model.
    """
    staging = transaction.staging_folder(final)
    if accelerator.is_main_process:
        transaction.start(final)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(staging))
    if accelerator.is_main_process:
        (staging / TRAINER_STATE).write_text(json.dumps(trainer_state, indent=1), encoding="utf-8")
        config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        transaction.publish(final)
    accelerator.wait_for_everyone()


def find(accelerator: Accelerator, root: Path, wanted: str | None) -> Path | None:
    """Return the checkpoint to resume from, verified, the same on every rank; None to start from
    the beginning.

    Args:
        root: the run's checkpoints folder.
        wanted: `latest`, a checkpoint's folder, or None.

    Raises:
        CheckpointError: `wanted` names a folder that is missing or damaged, or every checkpoint is
            damaged.
    """
    found: list[str | None] = [None]
    if accelerator.is_main_process and wanted is not None:
        if wanted == "latest":
            newest = newest_sound(root)
            found = [None if newest is None else str(newest)]
        else:
            transaction.verify(Path(wanted))
            found = [wanted]
    broadcast_object_list(found)
    return None if found[0] is None else Path(found[0])


def is_sound(accelerator: Accelerator, folder: Path) -> bool:
    """Return whether a checkpoint verifies, the same on every rank; tell what is wrong if not.
    Collective.
    """
    sound = [False]
    if accelerator.is_main_process:
        try:
            transaction.verify(folder)
            sound = [True]
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    broadcast_object_list(sound)
    return sound[0]


def newest_sound(root: Path) -> Path | None:
    """Return the newest checkpoint that verifies, naming the damaged ones passed over; None where
    there is none.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    published = transaction.list_published(root)
    for _, folder in reversed(published):
        try:
            transaction.verify(folder)
            return folder
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    if published:
        raise CheckpointError(f"{root}: all {len(published)} checkpoints are damaged")
    return None


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Read a verified checkpoint's trainer_state.json."""
    state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    return state


def load(accelerator: Accelerator, folder: Path, trainer_state: dict[str, Any], seed: int) -> None:
    """Load a verified checkpoint into the prepared model, optimizer and random number generators.
    Collective.
    """
    convert.load_any(accelerator, folder)
    accelerator.step = 0  # counts micro steps; a checkpoint stands between two updates
    if trainer_state["num_processes"] != accelerator.num_processes:
        step = trainer_state["step"]
        set_seed(seed + step, device_specific=True)
        logger.info(
            "saved by %d processes, resumed by %d: weights, optimizer, schedule and data order "
            "carry over, the "
            "random streams of dropout cannot; they start anew from seed + step",
            trainer_state["num_processes"],
            accelerator.num_processes,
        )


def check_same_run(folder: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse to go on with another job's checkpoint.

    Args:
        saved: the identity in the checkpoint.
        identity: of this job: model, labels, data, global batch size, seed.

    Raises:
        CheckpointError: listing the differences.
    """
    differences = [
        f"{key}: {saved.get(key)!r} in the checkpoint, {value!r} in this job"
        for key, value in identity.items()
        if saved.get(key) != value
    ]
    if differences:
        raise CheckpointError(
            f"{folder}: belongs to another job. Fix: the same settings, or another output_dir\n  "
            + "\n  ".join(differences)
        )
