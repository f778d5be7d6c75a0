"""Fine-tune text classifiers with Accelerate: one curve, nothing lost, no silent fallback.

`fit` trains, `load_classifier` labels. The keys of each command are in `accel_ft.config`; what a
message means is in `accel_ft.errors`; the doctor's checks, for programs of your own, are in
`accel_ft.diagnosis`. The commands: `accel_ft.train`, `accel_ft.evaluate`, `accel_ft.predict`,
`accel_ft.export`, `accel_ft.report`, `accel_ft.doctor`, `accel_ft.search`. Built on:
`accel_ft.data`, `accel_ft.model`, `accel_ft.engine`, `accel_ft.checkpoint`, `accel_ft.reporting`,
`accel_ft.runtime`, `accel_ft.settings`, `accel_ft.metrics`.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_ft.predict import Predictor

__version__ = "0.1.0"
__all__ = ["fit", "load_classifier"]

LOADING = ("all_scores", "max_seq_length", "per_device_eval_batch_size")  # load_classifier's keys

_fitting = Lock()  # accelerate's state and the random generators are global


def fit(config: str | Path | None = None, **settings: Any) -> Path:
    """Run the job that `accel_ft.train` runs with these keys, in this process (or, in a script
    started by `accelerate launch`, with the other ranks). Only one may run at a time. On return the
    random state, an Accelerator's gradient accumulation, the grad mode and transformers' verbosity
    are as before.

    Args:
        config: a YAML file with keys, as `accel_ft.train --config` takes it.
        settings: keys of `accel_ft.config.TrainConfig` by name; they override `config`, as in
            fit(train_file="rows.csv", learning_rate=1e-4, output_dir="runs/mine").

    Returns:
        The model's folder.

    Signals save the run as they do for the command, except those that the program handles.

    Raises:
        accel_ft.errors.UserError: a fault the user can fix.
        accel_ft.errors.Preempted: a signal asked it to stop.
    """
    import gc
    import traceback

    import torch

    from accel_ft.config import TrainConfig
    from accel_ft.errors import ConfigError, UserError, close_process_group
    from accel_ft.runtime.guest import as_a_guest
    from accel_ft.settings import checked, read_settings, settings_to_reproduce
    from accel_ft.train import fit as run

    if not isinstance(config, str | Path | None):
        raise ConfigError("config: must be the path of a YAML file. Fix: pass other keys by name")
    if config is not None:
        settings = read_settings(Path(config).expanduser()) | settings
    job = checked(TrainConfig, settings, settings_to_reproduce(settings))
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if any(map(torch.is_autocast_enabled, {"cpu", device.type})):  # its cached weights go stale
        raise ConfigError(
            "fit: is called under torch.autocast. Fix: call it outside, and set the precision by "
            "ACCELERATE_MIXED_PRECISION"
        )
    if torch.get_default_device().type != "cpu":  # the DataLoader would use its generator
        raise ConfigError(
            f"fit: torch's default device is {torch.get_default_device()}. Fix: "
            'torch.set_default_device("cpu") around it; accelerate chooses the device'
        )
    if not _fitting.acquire(blocking=False):
        raise ConfigError("another `fit` runs in this process. Fix: wait, or use processes")
    try:
        with as_a_guest():
            run(job)
    except UserError:  # raised on all ranks: none is left waiting
        atexit.register(close_process_group)
        raise
    except torch.OutOfMemoryError as error:  # its frames hold tensors: a retry needs the room
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        gc.collect()  # a model has reference cycles
        _fitting.release()
    atexit.register(close_process_group)  # at exit, not now: another `fit` may follow
    return job.output_dir / "model"


def load_classifier(checkpoint: str | Path, **settings: Any) -> Predictor:
    """Open a run, a checkpoint of any strategy, or any Hugging Face classifier. It computes in
    float32, or in the precision that this process was launched with.

    Args:
        checkpoint: as `accel_ft.predict` takes it.
        settings: `all_scores`, `max_seq_length`, `per_device_eval_batch_size`.

    Returns:
        A Predictor; its method `predict` takes a list of texts. Labels are strings, even where the
        rows had integers.

    Raises:
        accel_ft.errors.UserError: it cannot be loaded.
    """
    from accel_ft.config import PredictConfig
    from accel_ft.errors import ConfigError
    from accel_ft.predict import Predictor, devices
    from accel_ft.runtime.guest import without_bars
    from accel_ft.settings import checked, run_settings

    if unknown := settings.keys() - LOADING:
        raise ConfigError(f"{', '.join(sorted(unknown))}: unknown. Allowed: {', '.join(LOADING)}")
    if not isinstance(checkpoint, str | Path):
        raise ConfigError(f"checkpoint={checkpoint}: must be a folder or a name")
    settings = settings | {"checkpoint": str(checkpoint), "text": ""}
    config = checked(PredictConfig, settings, run_settings(settings))
    with without_bars():
        return Predictor(config, devices())
