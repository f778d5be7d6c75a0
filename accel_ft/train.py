"""Fine-tune a text classifier.

accelerate launch --config_file STRATEGY.yaml -m accel_ft.train --config JOB.yaml [--key value ...]
"""

import faulthandler
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

from accel_ft.config import TrainConfig
from accel_ft.errors import (
    DOCTOR,
    CheckpointError,
    ConfigError,
    LaunchError,
    Preempted,
    RankError,
    UserError,
    let_go_of_output,
    require,
    run_command,
)
from accel_ft.runtime.memory import restart_with_better_malloc
from accel_ft.settings import parse, read_receipt, settings_to_reproduce

logger = logging.getLogger("accel_ft.train")  # under -m, __name__ is "__main__"

RESULTS = ("model", "predictions.npz", "mistakes.jsonl", "report.html")
RECORD = ("config.yaml", "metrics.jsonl")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the configuration, train or resume, and say where the model is."""
    config = parse(TrainConfig, argv, "train", settings_to_reproduce)
    try:
        fit(config)
    except Exception as error:
        if isinstance(error, RankError) or not isinstance(error, UserError | Preempted):
            error.add_note(DOCTOR)
        raise


def fit(config: TrainConfig) -> None:
    """Run the job; every rank calls it.

    Raises:
        UserError: a fault the user can fix; raised before the model is loaded, if it can be found
            by then.
    """
    from accel_ft.data.sources import check_first_rows

    check_first_rows(config)  # the imports below take seconds
    if config.lora_r is not None:
        require("lora", "LoRA", "peft")
    from accel_ft.diagnosis.job import preflight
    from accel_ft.engine.build import build
    from accel_ft.engine.loop import train
    from accel_ft.engine.start import is_finished, start_or_resume
    from accel_ft.model import dropout
    from accel_ft.runtime import trackers
    from accel_ft.runtime.launch import make_training_accelerator
    from accel_ft.runtime.logging import read_events, setup_logging

    accelerator = make_training_accelerator(
        config.ddp_timeout,
        log_with=trackers.check(config.report_to) or None,
        project_dir=config.output_dir / "trackers",
    )
    is_main = accelerator.is_main_process
    setup_logging(is_main)
    if config.reproduce is not None:
        _check_precision(config, config.reproduce, accelerator.mixed_precision)
    with _watched(config, accelerator) as watch:
        run = build(config, accelerator, watch)
        config = run.config  # with derived values filled in
        if config.push_to_hub and is_main:
            from accel_ft.runtime.card import require_repo

            repo_id = require_repo(config.repo_id(config.output_dir), config.hub_private_repo)
            config = config.resolved(hub_model_id=repo_id)
        if not is_finished(run):
            try:
                with closing(run.trackers), closing(run):
                    if config.preflight == "auto":
                        preflight(run)
                    start_or_resume(run)
                    with dropout.on_cpu(accelerator.device):
                        train(run)
            except Preempted:
                watch.barrier()  # as a rank exits, the launcher signals the others again
                raise
        events = list(read_events(run.events.path)) if is_main else []
        if is_main and _lacks_card(config):
            _write_card_and_report(config, run.splits.label_names, events)
        watch.barrier()
    if is_main:
        _say_and_push(config, events)


def _check_precision(config: TrainConfig, run: Path, now: str) -> None:
    """Refuse, before any training, to reproduce a run in another precision."""
    key, was = "mixed_precision", read_receipt(run)["strategy"].get("mixed_precision")
    if was != now and key not in config.allow_changed:
        raise LaunchError(
            f"reproduce={run}: {key} was {was}, now it is {now}. Fix: "
            f"`accelerate launch --{key} {was}`, or --allow_changed {key}"
        )


@contextmanager
def _watched(config: TrainConfig, accelerator: Any) -> Iterator[Any]:
    """Lock the run's folder, and watch the ranks. Collective.

    Raises:
        UserError: the folder cannot be made or locked; raised on all ranks.
    """
    from accel_ft.runtime.watch import Watch

    ranks = config.output_dir / "ranks"
    fault: Exception | None = None
    try:
        ranks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = ConfigError(f"output_dir={config.output_dir}: {error}")
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    check: Callable[[], None] = lambda: None  # noqa: E731
    with ExitStack() as stack:
        if accelerator.is_main_process and fault is None:
            try:
                check = stack.enter_context(_own(config, ranks / "lock"))
            except (UserError, OSError) as error:
                fault = error
        watch = Watch(ranks, rank, num_ranks, config.ddp_timeout, DOCTOR, fault)
        watch.check_folder = check
        yield stack.enter_context(watch)


@contextmanager
def _own(config: TrainConfig, lock: Path) -> Iterator[Callable[[], None]]:
    """Lock the run's folder; refuse one that holds a run, unless this is a resume."""
    from accel_ft.checkpoint.transaction import list_published
    from accel_ft.runtime.files import locked, refuse_links, remove_unfinished

    folder = config.output_dir
    places = [folder / name for name in ("ranks", "model", "trackers", "profile")]
    inside = [path for place in places for path in place.glob("*")]
    # Written in place, or into; the others are replaced by a rename, which follows no link.
    written = ("ranks", "metrics.jsonl", "report", "trackers", "profile")
    refuse_links(*inside, *(folder / name for name in written))
    if config.push_to_hub:  # all files in it are uploaded
        refuse_links(folder / "model", *(folder / "model").rglob("*"))
    checkpoints = folder / "checkpoints"
    if (checkpoints.resolve().parent / "receipt.json").exists():
        refuse_links(checkpoints)  # no link to another run's; to another disk is fine
    with locked(folder, lock) as check:
        for place in (folder, folder / "model"):
            remove_unfinished(place)
        has_checkpoints = bool(list_published(folder / "checkpoints"))
        has_receipt = (folder / "receipt.json").exists()
        for name in RESULTS if has_checkpoints else RESULTS + RECORD:
            if (folder / name).exists() and not has_receipt:
                raise ConfigError(
                    f"output_dir={folder}: holds a `{name}` but no receipt.json: it is not from a "
                    "run, and would be replaced. Fix: move it away, or another --output_dir"
                )
        left = (*RESULTS, "metrics.jsonl")
        is_begun = has_checkpoints or any((folder / name).exists() for name in left)
        if is_begun and config.resume_from_checkpoint is None:
            raise ConfigError(
                f"output_dir={folder}: already holds a run. "
                "Fix: --resume_from_checkpoint latest to continue it, or another --output_dir"
            )
        yield check


def _lacks_card(config: TrainConfig) -> bool:
    """Whether the model has no card, or one without the repository that it is pushed to."""
    card = config.output_dir / "model" / "README.md"
    if not card.is_file():
        return card.parent.is_dir() and not card.parent.is_symlink()  # a link may lead anywhere
    is_own = 'model="."' in card.read_text(encoding="utf-8", errors="replace")  # not a user's
    return is_own and config.push_to_hub


def _write_card_and_report(
    config: TrainConfig, label_names: list[str], events: list[dict[str, Any]]
) -> None:
    """Write model card and report of a run that ended."""
    from accel_ft.reporting.record import results
    from accel_ft.reporting.report import write_report
    from accel_ft.runtime.card import model_card
    from accel_ft.runtime.files import write_whole

    told = config.without_this_start().model_dump(mode="json", exclude_defaults=True)
    for key in ("max_seq_length", "model_name_or_path", "output_dir"):
        told[key] = str(getattr(config, key))
    path = config.output_dir / "report.html"
    try:
        if "html" in config.report_to:
            try:
                write_report([config.output_dir], config.output_dir)
            except OSError:
                raise
            except Exception as error:  # the model is saved; a report can be made again
                logger.warning(
                    "the report could not be written: %s. To try again: python -m "
                    "accel_ft.report %s", str(error) or repr(error), quote(str(config.output_dir)),
                )  # fmt: skip
        path = config.output_dir / "model" / "README.md"  # written last: marks the run as complete
        write_whole(path, model_card(label_names, told, *results(events)))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); the model is saved. Fix: free "
            "disk space, or permission to write there, then the same command with "
            "--resume_from_checkpoint latest"
        ) from error


def _say_and_push(config: TrainConfig, events: list[dict[str, Any]]) -> None:
    """Print where the results are; push and compare where asked for."""
    with suppress(OSError, ValueError):  # stdout is closed or cannot encode it; the run is done
        _say_farewell(config, events)
    let_go_of_output()
    model = config.output_dir / "model"
    if config.push_to_hub and model.is_dir():
        from accel_ft.runtime.card import push

        pushed = push(model, config.repo_id(config.output_dir))
        with suppress(OSError, ValueError):
            print(f"pushed: {pushed}")
    if config.reproduce is not None:
        _compare(config.reproduce, config.output_dir)


def _say_farewell(config: TrainConfig, events: list[dict[str, Any]]) -> None:
    """Print the main metric, and where the model and the report are."""
    if config.best_metric == "loss":
        config = config.resolved(metric_for_best_model=None)
    metric = config.best_metric
    has_thresholds = "multi_label" in config.problem_type and metric != "roc_auc"
    tuned = " (thresholds are tuned on them)" * has_thresholds

    def shown(event: dict[str, Any], prefix: str) -> str:
        label = config.best_label
        if label is not None and not event[f"{prefix}per_class"][label]["support"]:
            return "no row has that label"
        value = config.best_value(event, prefix)
        return "NaN" if math.isnan(value) else f"{value:.4f}"

    print(f"{metric} on the validation rows: {shown(events[-1], 'eval_')}{tuned}")
    for event in events:
        if event["event"] == "test":
            print(f"{metric} on the test rows: {shown(event, 'test_')}")
    model, report = config.output_dir / "model", config.output_dir / "report.html"
    quoted = quote(str(model))
    print(f"model: {model}")
    if report.exists():
        print(f"report: {report}")
    pair = ' --text_pair "..."' if config.text_pair_column is not None else ""
    python = "python"
    if Path(which(python) or "").parent != Path(sys.executable).parent:  # no active environment
        python = quote(min(sys.executable, os.path.relpath(sys.executable), key=len))
    print(f'predict: {python} -m accel_ft.predict --checkpoint {quoted} --text "..."{pair}')


def _compare(first: Path, again: Path) -> None:
    """Print whether a reproduced run is the same as the first.

    Raises:
        UserError: it is not, or cannot be compared; names the first difference, and likely causes.
    """
    from accel_ft.reporting.compare import curves, differences, shared, table
    from accel_ft.reporting.record import read_record

    one, other = read_record(first), read_record(again)
    if any(curves(one, other)):
        on_gpu = other.receipt["strategy"]["device"] == "cuda"
        why = "On a GPU the last bits may differ: attention's backward pass sums in any order\n"
        told = table(list(differences(one, other)))
        raise UserError(f"not reproduced:\n{why * on_gpu}{told}")
    compared, stopped = shared(one, other), not one.of("end")
    if not compared:
        raise UserError(f"nothing to compare: {first} and {again} logged no update in common")
    until = f"; {first} stopped there, after update {compared[-1][1]}" if stopped else ""
    print(f"reproduced: {len(compared)} train events, bit for bit{until}")


if __name__ == "__main__":
    restart_with_better_malloc("accel_ft.train")
    faulthandler.disable()  # `Watch` enables it on the run's log
    run_command(main)
