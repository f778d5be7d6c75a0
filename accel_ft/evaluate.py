"""Evaluate a checkpoint: python -m accel_ft.evaluate --checkpoint runs/ag_news [--test_file
FILE].
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from accel_ft.config import EvaluateConfig, parse, run_settings
from accel_ft.errors import ConfigError, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a checkpoint on its run's rows, or on those given, on one process or several."""
    config = parse(EvaluateConfig, argv, "evaluate", run_settings)

    from accel_ft.checkpoint.open import open_classifier
    from accel_ft.data.loader import Padding
    from accel_ft.data.splits import load_eval_split
    from accel_ft.engine.evaluation import evaluate, make_eval_loader
    from accel_ft.model.load import check_max_seq_length
    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import setup_logging

    accelerator = make_accelerator()
    setup_logging(accelerator.process_index)
    # Not prepared: each rank holds the whole model, and nothing but the ledger is exchanged.
    opened = open_classifier(config.checkpoint, accelerator.device)
    check_max_seq_length(config.max_seq_length, opened.limit)
    if "problem_type" not in config.model_fields_set:
        config = config.resolved(problem_type=opened.problem_type)
    if config.problem_type != opened.problem_type:
        raise ConfigError(
            f"problem_type={config.problem_type}: {config.checkpoint} is for {opened.problem_type}"
        )
    with accelerator.local_main_process_first():
        name, split = load_eval_split(config, opened.tokenizer, opened.label_names, config.split)
    pad = Padding(opened.tokenizer, config.max_seq_length, accelerator.device)
    loader = make_eval_loader(accelerator, split, config.per_device_eval_batch_size, pad)
    scores, _ = evaluate(
        accelerator, opened.model, loader, split, opened.label_names, thresholds=opened.thresholds
    )
    if accelerator.is_main_process:
        about = {"checkpoint": opened.folder, "split": name, "rows": split.store.name}
        text = json.dumps(about | {"num_samples": len(split)} | scores, indent=1)
        print(text)
        if config.output is not None:
            config.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
