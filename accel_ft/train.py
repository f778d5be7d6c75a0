"""Fine-tune a text classifier.

accelerate launch --config_file STRATEGY.yaml -m accel_ft.train --config JOB.yaml [--key value ...]
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_ft.config import TrainConfig, parse
from accel_ft.errors import ConfigError, RankError, UserError, run_command

logger = logging.getLogger("accel_ft.train")  # run with -m, its name is __main__


def main(argv: Sequence[str] | None = None) -> None:
    """Read the configuration, train or resume, and say where the model is."""
    config = parse(TrainConfig, argv, "train")
    try:
        fit(config)
    except Exception as error:
        if isinstance(error, RankError) or not isinstance(error, UserError):
            error.add_note(
                "`-m accel_ft.doctor` in place of `-m accel_ft.train` finds what is wrong with a "
                "set-up"
            )
        raise


def fit(config: TrainConfig) -> None:
    """Run the job; every rank calls it.

    Raises:
        UserError: for what the user can mend, before the model is loaded where it can be known
            before.
    """
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
    )

    from accel_ft.diagnosis.job import preflight
    from accel_ft.engine.build import build, is_finished, start_or_resume
    from accel_ft.engine.loop import train
    from accel_ft.model import dropout
    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import read_events, setup_logging
    from accel_ft.runtime.watch import Watch

    accelerator = make_accelerator(
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # Later than the watch, which knows who is missing; NCCL would only abort.
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.ddp_timeout + 30)),
        ],
    )
    setup_logging(accelerator.process_index)
    _make_output_dir(config.output_dir)
    ranks = config.output_dir / "ranks"
    rank, num_ranks, is_main = (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.is_main_process,
    )
    with (
        _own(config, ranks / "lock") if is_main else nullcontext(),
        Watch(ranks, rank, num_ranks, config.ddp_timeout) as watch,
    ):
        run = build(config, accelerator, watch)
        if is_finished(run):
            logger.info("%s is finished: nothing to do", config.output_dir)
        else:
            try:
                if config.preflight == "auto":
                    preflight(run)
                start_or_resume(run)
                with dropout.on_cpu(accelerator.device):
                    train(run)
            finally:
                run.close()
        watch.wait()
        if is_main:
            _say_farewell(config.output_dir, list(read_events(run.events.path)))


def _make_output_dir(folder: Path) -> None:
    """Make the run's folder."""
    if folder.is_file():
        raise ConfigError(f"output_dir={folder}: is a file. Fix: the name of a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={folder}: cannot be made: {error.strerror}") from error


@contextmanager
def _own(config: TrainConfig, lock: Path) -> Iterator[None]:
    """Lock the run's folder; one that holds a run is only touched by a resume."""
    from accel_ft.checkpoint.transaction import list_published
    from accel_ft.runtime.files import locked

    folder = config.output_dir
    with locked(folder, lock):
        holds_run = (folder / "metrics.jsonl").exists() or list_published(folder / "checkpoints")
        if holds_run and config.resume_from_checkpoint is None:
            raise ConfigError(
                f"output_dir={folder}: already holds a run. "
                "Fix: --resume_from_checkpoint latest to continue it, or another --output_dir"
            )
        yield


def _say_farewell(output_dir: Path, events: list[dict[str, Any]]) -> None:
    """Print accuracy, the model's path, and the command that predicts with it."""
    model_step = events[-1]["model_step"]
    for name, words in (("eval", "validation"), ("test", "test")):
        for event in events:
            if event["event"] == name and (name == "test" or event["step"] == model_step):
                print(f"accuracy on the {words} rows: {event[name + '_accuracy']:.4f}")
    model = output_dir / "model"
    print(f"model: {model}")
    print(f'predict: python -m accel_ft.predict --checkpoint {model} --text "..."')


if __name__ == "__main__":
    run_command(main)
