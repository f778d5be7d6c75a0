"""Turn a checkpoint of any strategy into a Hugging Face folder: python -m accel_ft.export
--checkpoint C --output DIR.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel_ft.config import ExportConfig, parse, run_settings
from accel_ft.errors import ConfigError, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Write weights, config, tokenizer and model card; in one process, with the model once in
    memory.
    """
    config = parse(ExportConfig, argv, "export")
    if config.output.exists() and any(config.output.iterdir()):
        raise ConfigError(f"output={config.output}: is not empty. Fix: another folder")
    export(config.checkpoint, config.output)
    print(f"model: {config.output}")


def export(checkpoint: str, output: Path) -> None:
    """Write the classifier of a checkpoint to a new folder, whole or not at all.

    Raises:
        ConfigError, CheckpointError: where it cannot be had or is damaged.
    """
    import torch

    from accel_ft.checkpoint import transaction
    from accel_ft.checkpoint.open import open_classifier
    from accel_ft.runtime.card import model_card

    opened = open_classifier(checkpoint, torch.device("cpu"))
    settings = run_settings({"checkpoint": checkpoint})
    staging = transaction.start(output)
    opened.model.save_pretrained(staging)
    opened.tokenizer.save_pretrained(staging)
    (staging / "README.md").write_text(model_card(opened.label_names, settings), encoding="utf-8")
    transaction.publish(output, with_manifest=False)


if __name__ == "__main__":
    run_command(main)
