"""Experiment trackers, through Accelerate's `log_with`. A tracker that fails never ends a run."""

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from accel_ft.config import TrainConfig
from accel_ft.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

EXTRAS = ("tensorboard", "trackio", "wandb", "mlflow")


def check(names: Sequence[str]) -> list[str]:
    """Return the trackers for `Accelerator(log_with=...)`, which would silently skip those that are
    not installed.

    Raises:
        ConfigError: a tracker is unknown or not installed.
    """
    known, installed = list(LOGGER_TYPE_TO_CLASS), {str(kind) for kind in get_available_trackers()}
    wanted = [name for name in names if name not in ("html", "none")]
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"report_to={name}: no such tracker.{nearest(name, known)} "
                f"Allowed: html, {', '.join(known)}, none"
            )
        if name not in installed:
            package = f"'accel_ft[{name}]'" if name in EXTRAS else name
            raise ConfigError(f"report_to={name}: is not installed. Fix: pip install {package}")
    return wanted


class Trackers:
    """Passes a run's events to its trackers; each tracker decides whether only rank 0 logs."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.failed: set[str] = set()

    def start(self, config: TrainConfig, step: int) -> None:
        """Open the trackers, to continue after update `step`."""
        if not check(config.report_to):
            return
        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in config.model_dump(mode="json").items()
            if value is not None
        }
        folder = config.output_dir / "trackers"  # for trackers with local files
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "id"  # a new start in the same folder is another run
        name = str(config.output_dir.absolute()).strip("/").replace("/", "-")
        if (step == 0 or not known.is_file()) and self.accelerator.is_main_process:
            known.write_text(f"{secrets.token_hex(4)} {name}", encoding="utf-8")
        run_id, _, first_name = (
            known.read_text(encoding="utf-8") if known.is_file() else ""
        ).partition(" ")
        name = first_name or name  # the folder may have been moved since
        options: dict[str, Any] = {
            "wandb": {"name": name, "id": run_id, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
            "mlflow": {"run_name": name},
            "tensorboard": {"purge_step": step + 1},
        }
        try:
            project = os.environ.get("WANDB_PROJECT", "accel_ft")
            self.accelerator.init_trackers(project, settings, options)
        except Exception as error:  # third-party services may raise anything
            for tracker in self.accelerator.trackers:
                with contextlib.suppress(Exception):  # some did not start
                    tracker.finish()
            self.accelerator.trackers = []
            told = f"report_to={','.join(config.report_to)}: cannot be started: {error}"
            if step == 0:
                raise ConfigError(told) from error
            logger.warning("%s. The run continues without trackers, with metrics.jsonl", told)

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Log an event's numbers under the names <event>/<key>."""
        numbers = {
            f"{event}/{key.removeprefix(event + '_')}": value
            for key, value in values.items()
            if isinstance(value, int | float)
        }
        if not numbers:
            return
        for tracker in self.accelerator.trackers:  # `Accelerator.log` stops at the first failure
            try:
                tracker.log(numbers, step=step)
            except Exception as error:
                if tracker.name not in self.failed:
                    told = "%s failed, metrics.jsonl is still written: %r"
                    logger.warning(told, tracker.name, error)
                self.failed.add(tracker.name)

    def close(self) -> None:
        """Close the trackers; `Accelerator.end_training` would also close the process group."""
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:
                logger.warning("%s could not be closed: %r", tracker.name, error)
        self.accelerator.trackers = []
