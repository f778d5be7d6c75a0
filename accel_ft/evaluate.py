"""Evaluate a checkpoint: python -m accel_ft.evaluate --checkpoint RUN [--test_file FILE]."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_ft.config import ROW_KEYS, EvaluateConfig
from accel_ft.errors import CheckpointError, ConfigError, run_command
from accel_ft.runtime.memory import restart_with_better_malloc
from accel_ft.settings import parse, run_folder, run_settings, trained_on

if TYPE_CHECKING:
    from accel_ft.checkpoint.open import Classifier

logger = logging.getLogger("accel_ft.evaluate")  # under -m, __name__ is "__main__"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a checkpoint on its run's rows, or on those given, on one process or several."""
    typed: dict[str, Any] = {}

    def settings_of_the_run(values: dict[str, Any]) -> dict[str, Any]:
        typed.update(values)
        return run_settings(values)

    config = parse(EvaluateConfig, argv, "evaluate", settings_of_the_run)
    if sys.stdout is None and config.output is None:
        raise ConfigError("output: standard output is closed. Fix: --output FILE")

    import numpy as np
    from accelerate.utils import gather_object

    from accel_ft.data.sources import check_first_rows

    check_first_rows(config)
    from accel_ft.checkpoint.open import open_classifier, same_folder
    from accel_ft.data.loader import Padding
    from accel_ft.data.splits import load_eval_split
    from accel_ft.engine.agreement import refuse_other_rows
    from accel_ft.engine.evaluation import evaluate_split, make_eval_loader
    from accel_ft.model.load import check_tokens
    from accel_ft.runtime.files import to_json, writing
    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import setup_logging

    accelerator = make_accelerator()
    setup_logging(accelerator.is_main_process)
    # No prepare(): each rank holds the whole model, and only logits and places are gathered.
    opened = open_classifier(same_folder(config.checkpoint, accelerator), accelerator.device)
    run = run_folder(config.checkpoint)
    if run is None and not (ROW_KEYS & config.model_fields_set):
        raise ConfigError(
            f"checkpoint={config.checkpoint}: belongs to no run, so its rows are unknown. "
            "Fix: --test_file FILE, or --dataset_name"
        )
    max_seq_length = opened.max_seq_length(config.max_seq_length)
    config = config.resolved(
        max_seq_length=max_seq_length, problem_type=_problem_type(config, opened)
    )
    with accelerator.local_main_process_first():
        name, split, is_cut_off = load_eval_split(
            config, opened.tokenizer, opened.label_names, config.split
        )
    refuse_other_rows(gather_object([{name: split.fingerprint()}]))
    check_tokens(split.store.greatest_id, opened.tokenizer, opened.model.config, "checkpoint")
    if "max_eval_samples" in typed:  # the run's own value is for its validation rows
        split.stop = min(split.stop, config.max_eval_samples or split.stop)
    if is_cut_off and "dataset_name" in typed:
        its_name = config.train_split_name or "train"
        logger.warning(
            "%s: has no %s rows; part of its split %s is measured. For all: --test_split_name %s",
            config.dataset_name, name, its_name, its_name,
        )  # fmt: skip
    if is_cut_off and run is not None:
        split.warn_if_trained_on(*trained_on(run))
    loader = make_eval_loader(
        accelerator,
        split,
        config.per_device_eval_batch_size,
        Padding(opened.tokenizer, max_seq_length, accelerator.device),
    )
    scores, logits = evaluate_split(
        accelerator, opened.model, loader, opened.label_names, thresholds=opened.thresholds
    )
    if not np.isfinite(logits).all():  # the argmax of NaN is the first label: it says nothing
        raise CheckpointError(
            f"checkpoint={config.checkpoint}: some logits are NaN or infinite. "
            "Fix: another checkpoint, or float32"
        )
    if accelerator.is_main_process:
        about = {"checkpoint": opened.folder, "split": name, "rows": split.store.name}
        text = to_json(about | {"num_samples": len(split)} | scores, indent=1)
        print(text)
        if config.output is not None and str(config.output) != "-":
            with writing(str(config.output)) as file:
                file.write(text + "\n")


def _problem_type(config: EvaluateConfig, opened: Classifier) -> str:
    """Return the model's problem type, or the keys' where the model's config names none.

    Raises:
        ConfigError: the two differ, the model needs pairs of texts, or predicts several numbers.
    """
    opened.check_pairs(config.text_pair_column is not None)
    kind, said = opened.problem_type, opened.model.config.problem_type
    if "problem_type" in config.model_fields_set and config.problem_type != kind:
        if said is not None:
            raise ConfigError(
                f"problem_type={config.problem_type}: {config.checkpoint} is for {said}"
            )
        kind = config.problem_type
    if kind == "regression" and len(opened.label_names) > 1:
        raise ConfigError(
            f"checkpoint={config.checkpoint}: predicts {len(opened.label_names)} numbers; only one "
            "is supported"
        )
    return kind


if __name__ == "__main__":
    restart_with_better_malloc("accel_ft.evaluate")
    run_command(main)
