"""Evaluate a checkpoint: python -m accel_ft.evaluate --checkpoint runs/ag_news [--test_file
FILE].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_ft.config import EvaluateConfig, parse, run_settings
from accel_ft.errors import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a checkpoint on its run's rows, or on those given, on one process or several."""
    config = parse(EvaluateConfig, argv, "evaluate", run_settings)

    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import setup_logging

    accelerator = make_accelerator()
    setup_logging(accelerator.process_index)
    scores = evaluate_checkpoint(config, accelerator)
    if accelerator.is_main_process:
        text = json.dumps(scores, indent=1)
        print(text)
        if config.output is not None:
            config.output.write_text(text + "\n", encoding="utf-8")


def evaluate_checkpoint(config: EvaluateConfig, accelerator: Any) -> dict[str, Any]:
    """Return the metrics of a checkpoint, the same on every rank."""
    from accel_ft.checkpoint.state import model_folder
    from accel_ft.data.loader import Padding
    from accel_ft.data.splits import load_eval_split
    from accel_ft.engine.evaluation import evaluate, make_eval_loader
    from accel_ft.model.load import (
        check_max_seq_length,
        label_names,
        load_classifier,
        load_model_config,
        load_tokenizer,
        resolve,
    )

    folder = resolve(model_folder(config.checkpoint))
    tokenizer = load_tokenizer(config.checkpoint, folder)
    model_config = load_model_config(config.checkpoint, folder)
    names = label_names(config.checkpoint, model_config)
    check_max_seq_length(config.max_seq_length, config.checkpoint, model_config, tokenizer)
    with accelerator.local_main_process_first():
        name, split = load_eval_split(config, tokenizer, names, config.split)
    # Not prepared: each rank holds the whole model, and nothing but the ledger is exchanged.
    model = load_classifier(
        config.checkpoint, folder, model_config, accelerator.device, training=False
    )
    model = model.to(accelerator.device)
    pad = Padding(tokenizer, multiple=1 if accelerator.device.type == "cpu" else 8)
    loader = make_eval_loader(accelerator, split, config.per_device_eval_batch_size, pad)
    scores = evaluate(accelerator, model, loader, split, names)
    return {
        "checkpoint": str(Path(folder)),
        "split": name,
        "rows": split.store.name,
        "num_samples": len(split),
    } | scores


if __name__ == "__main__":
    run_command(main)
