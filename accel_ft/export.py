"""Make a Hugging Face folder: python -m accel_ft.export --checkpoint C --output DIR."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from accel_ft.config import ExportConfig
from accel_ft.errors import ConfigError, require, run_command
from accel_ft.settings import is_run, parse, read_receipt, run_folder, run_settings

logger = logging.getLogger("accel_ft.export")  # under -m, __name__ is "__main__"


def main(argv: Sequence[str] | None = None) -> None:
    """Write weights, config, tokenizer and model card, in one process."""
    config = parse(ExportConfig, argv, "export")
    repo_id = None
    output = config.output.resolve()  # "." too: the folder itself is replaced
    if output.is_file() or (output.exists() and any(output.iterdir())):
        raise ConfigError(f"output={config.output}: is a file, or not empty. Fix: another folder")
    from accel_ft.checkpoint.state import TRAINER_STATE

    if any((parent / TRAINER_STATE).is_file() for parent in output.parents) or (
        output.parent.name == "checkpoints" and is_run(output.parent.parent)
    ):
        raise ConfigError(f"output={config.output}: is inside checkpoints/. Fix: another folder")
    if output.is_mount():
        raise ConfigError(f"output={config.output}: is a mount point. Fix: a folder in it")
    if config.format == "onnx":
        require("onnx", "the ONNX export", "onnx", "onnxscript", "onnxruntime")
    if config.push_to_hub:
        from accel_ft.checkpoint.open import model_folder
        from accel_ft.model.load import resolve
        from accel_ft.runtime.card import push, require_repo

        resolve(model_folder(config.checkpoint), "checkpoint")  # fails before a repository is made
        repo_id = require_repo(config.repo_id(output), config.hub_private_repo)
    from accel_ft.runtime.logging import setup_logging

    setup_logging(True)
    difference = export(config.checkpoint, output, config.format == "onnx", repo_id)
    if difference is not None:
        print(f"onnx: {output / 'model.onnx'}, logits within {difference:.1e} of the model's")
    print(f"model: {config.output}")
    if repo_id is not None:
        print(f"pushed: {push(output, repo_id)}")


def export(
    checkpoint: str, output: Path, with_onnx: bool = False, repo_id: str | None = None
) -> float | None:
    """Write the classifier of a checkpoint to a new folder, whole or not at all.

    Args:
        checkpoint: what `--checkpoint` takes.
        output: the folder to write.
        with_onnx: write model.onnx, too.
        repo_id: repository on the Hub that the model card names, if any.

    Returns:
        The largest difference between the ONNX file's logits and the model's, where there is one.

    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded, or is damaged.
    """
    import torch
    from safetensors.torch import save_file

    from accel_ft.checkpoint import convert, state, transaction
    from accel_ft.checkpoint.open import load_whole, model_folder
    from accel_ft.model.adapters import read_adapters
    from accel_ft.model.load import PACKAGE, load_parts, load_tokenizer, resolve
    from accel_ft.reporting.record import results
    from accel_ft.runtime.card import model_card
    from accel_ft.runtime.files import write_whole
    from accel_ft.runtime.logging import read_events

    folder = resolve(model_folder(checkpoint), "checkpoint")
    model_config, tokenizer, names = load_parts(folder)
    with transaction.writing(output) as staging:
        if convert.is_sharded(Path(folder)) and read_adapters(Path(folder)) is None:
            weights = state.read_weights(Path(folder))  # no second copy in a model
            save_file(weights, staging / convert.WEIGHTS, metadata={"format": "pt"})
            model_config.save_pretrained(staging)
        else:
            kind = model_config.dtype or torch.float32  # dtype of the stored weights
            load_whole(folder, model_config).to(kind).save_pretrained(staging)
        several = model_config.problem_type == "multi_label_classification"
        if several and getattr(model_config, "thresholds", None) is None:
            logger.warning("%s has no tuned thresholds yet: 0.5 is used for all", folder)
        # Not load_parts' tokenizer: its pad token may be a word, and would be read back as special.
        load_tokenizer(folder, "checkpoint").save_pretrained(staging)
        settings = run_settings({"checkpoint": checkpoint}) | {"hub_model_id": repo_id}
        for key in ("problem_type", "max_seq_length"):  # for a model outside its run
            value = getattr(model_config, key, None)
            if settings.get(key) is None and value is not None:
                settings[key] = value
        pairs = getattr(model_config, "text_pairs", False)
        run = run_folder(checkpoint)
        receipt = read_receipt(run) if run is not None else {}
        is_package = str(settings.get("model_name_or_path")).startswith(PACKAGE)
        if not is_package and "commit" not in receipt.get("pretrained", {"commit"}):
            settings.pop("model_name_or_path", None)  # a folder, though it may look like a Hub id
        ended = run is not None and Path(folder).resolve() == run / "model"  # not a checkpoint
        events = read_events(run / "metrics.jsonl") if run is not None and ended else []
        write_whole(staging / "README.md", model_card(names, settings, *results(events), pairs))
        if not with_onnx:
            return None
        from accel_ft.model.onnx import write_onnx

        return write_onnx(load_whole(folder, model_config).eval(), tokenizer, staging)


if __name__ == "__main__":
    run_command(main)
