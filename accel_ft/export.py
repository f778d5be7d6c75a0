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
    from safetensors.torch import save_file

    from accel_ft.checkpoint import convert, state, transaction
    from accel_ft.checkpoint.open import model_folder
    from accel_ft.model.load import classifier_labels, load_model_config, load_tokenizer, resolve
    from accel_ft.runtime.card import model_card

    folder = resolve(model_folder(checkpoint), "checkpoint")
    model_config = load_model_config(folder, "checkpoint")
    names = classifier_labels(folder, model_config)
    tokenizer = load_tokenizer(folder, "checkpoint")
    with transaction.writing(output) as staging:
        weights = state.read_weights(Path(folder))  # no model is built: memory is their size
        save_file(weights, staging / convert.WEIGHTS, metadata={"format": "pt"})
        model_config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        card = model_card(names, run_settings({"checkpoint": checkpoint}))
        (staging / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
