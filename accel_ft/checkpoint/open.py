"""Open anything that a user calls a checkpoint as a classifier ready to predict."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from accel_ft.checkpoint import convert, state, transaction
from accel_ft.errors import CheckpointError, ConfigError, listed
from accel_ft.model import adapters, load
from accel_ft.model.first_token import compute_first_token_only
from accel_ft.runtime import fsdp
from accel_ft.runtime.compiled import is_compiled
from accel_ft.runtime.guest import own_random_numbers
from accel_ft.runtime.logging import read_events
from accel_ft.settings import is_run

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LENGTH = 512


@dataclass(frozen=True)
class Classifier:
    """A finished classifier.

    Attributes:
        folder: the folder, or Hub id, that it was read from.
        model: float32, on its device, in evaluation mode. Use its logits only: for some model types
            the last layer computes the first token only.
        tokenizer: the model's own.
        label_names: in the order of their ids.
    """

    folder: str
    model: Any
    tokenizer: Any
    label_names: list[str]

    @property
    def problem_type(self) -> str:
        """The config's problem_type; by default, as in transformers, one label is a regression."""
        one = self.model.config.num_labels == 1
        default = "regression" if one else "single_label_classification"
        return str(self.model.config.problem_type or default)

    def check_pairs(self, are_pairs: bool) -> None:
        """Refuse single texts if it was trained on pairs; warn about pairs in the opposite case."""
        of_pairs = getattr(self.model.config, "text_pairs", None)  # None: trained elsewhere
        if of_pairs and not are_pairs:
            fix = "two texts per row (text_pair_column, or text_pair)"
            raise ConfigError(
                f"checkpoint={self.folder}: was trained on pairs of texts. Fix: {fix}"
            )
        if of_pairs is False and are_pairs:
            logger.warning("checkpoint=%s: was trained on single texts, not on pairs", self.folder)

    def max_seq_length(self, wanted: int | None) -> int:
        """Return the number of tokens at which texts are truncated: `wanted`, else as in training
        (512 if unknown) within the model's limit.

        Raises:
            ConfigError: `wanted` exceeds the model's limit.
        """
        limit = load.position_limit(self.model.config, self.tokenizer)
        load.check_max_seq_length(wanted or 0, limit)
        trained = getattr(self.model.config, "max_seq_length", None)
        usual = trained if isinstance(trained, int) else DEFAULT_MAX_SEQ_LENGTH
        return wanted or min(usual, limit or usual)

    @property
    def thresholds(self) -> NDArray[np.float64] | None:
        """Multi-label only: the probability from which each label counts as predicted, [C].

        Raises:
            ConfigError: config.json has not one number for each label.
        """
        wanted = getattr(self.model.config, "thresholds", None)
        kind = self.model.config.problem_type
        if wanted is None or kind not in (None, "multi_label_classification"):
            return None
        with contextlib.suppress(TypeError, ValueError):
            thresholds = np.array(wanted, np.float64)
            if thresholds.shape == (len(self.label_names),) and np.isfinite(thresholds).all():
                return thresholds
        raise ConfigError(
            f"checkpoint={self.folder}: `thresholds` in its config.json is no list of one number "
            f"per label. Allowed: {len(self.label_names)}, for {listed(self.label_names)}"
        )


def open_classifier(checkpoint: str, device: torch.device) -> Classifier:
    """Open a run, a published checkpoint of any strategy, a Hugging Face folder, Hub id or
    package:// model.

    Raises:
        ConfigError, CheckpointError: it is not available, is damaged or is not a classifier.
    """
    folder = load.resolve(model_folder(checkpoint), "checkpoint")
    config, tokenizer, names = load.load_parts(folder)
    model = load_whole(folder, config).to(device).eval()
    compute_first_token_only(model)
    if is_compiled():
        logger.warning("torch.compile is ignored here: it is for training only")
    if fsdp.is_asked_for():
        logger.warning("FSDP is ignored here: each process holds the whole model")
    return Classifier(folder, model, tokenizer, names)


def same_folder(checkpoint: str, accelerator: Any) -> str:
    """Return rank 0's `model_folder`: other ranks may see a newer checkpoint of a run in progress.
    Collective.
    """
    found: list[Any] = [None]
    if accelerator.process_index == 0:
        try:
            found = [model_folder(checkpoint)]
        except Exception as error:  # the other ranks wait for the broadcast
            found = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return str(found[0])


def load_whole(folder: str, config: Any) -> Any:
    """Load a classifier from a resolved checkpoint or model, adapters merged, on the CPU.

    Raises:
        ConfigError, CheckpointError: it is not available or is damaged.
    """
    lora = adapters.read_adapters(Path(folder))
    if lora is not None:
        of_run = Path(folder, state.TRAINER_STATE).is_file()
        identity = state.read_trainer_state(Path(folder))["identity"] if of_run else {}
        trained = state.read_weights(Path(folder))
        with own_random_numbers():  # weights are drawn at random before they are replaced
            return adapters.merged(config, lora, trained, identity.get("pretrained"))
    if not convert.is_sharded(Path(folder)):
        return load.load_for_inference(folder, config)
    with own_random_numbers():
        return load.load_for_inference(folder, config, state.read_weights(Path(folder)))


def model_folder(path: str) -> str:
    """Return the Hugging Face folder or name that a user's `checkpoint` stands for.

    Args:
        path: a run's folder (gives its model/ or, until that is written, its newest checkpoint), a
            published checkpoint, or any Hugging Face folder, Hub id or package:// model. All but a
            run's folder are returned unchanged.

    Raises:
        CheckpointError: the run has no checkpoint, or the checkpoint is damaged.
    """
    folder = Path(path)
    if (folder / transaction.MANIFEST).is_file():
        state.check(folder)
    elif (folder / "config.json").is_file() and not is_run(folder):
        return path
    elif (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    elif (folder / "checkpoints").is_dir():
        newest = state.newest_sound(folder / "checkpoints")
        if (folder / "model" / "config.json").is_file():  # the run has just ended
            return str(folder / "model")
        if newest is None:
            raise CheckpointError(f"{path}: has no checkpoint yet")
        if any(read_events(folder / "metrics.jsonl", "end")):
            raise CheckpointError(
                f"checkpoint={path}: its model/ is missing. Fix: rerun its training command with "
                f"--resume_from_checkpoint latest; or --checkpoint {newest}"
            )
        logger.warning("%s has no final model yet; taking %s", path, newest.name)
        return str(newest)
    return path
