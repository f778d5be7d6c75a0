"""A job's model, before anything wraps it."""

from typing import Any

import torch
from accelerate.utils import set_seed

from accel_ft.config import TrainConfig
from accel_ft.model import load
from accel_ft.model.adapters import choose_trained
from accel_ft.model.first_token import compute_first_token_only
from accel_ft.runtime.compiled import compiles_layers

EAGER_TOKENS = 512  # beyond, what eager keeps, the square of them for each head, fills the memory


def plain_model(
    config: TrainConfig, device: torch.device, label_names: list[str], tokenizer: Any
) -> tuple[Any, list[str]]:
    """Load the job's model, not wrapped yet, with the same new head on every rank.

    Args:
        device: that it will train on; it is on the CPU yet.

    Returns:
        The model, and the names of the parameters that are newly initialized.
    """
    set_seed(config.seed)
    folder = load.resolve(config.model_name_or_path)
    labels = dict(enumerate(label_names))
    model_config = load.load_model_config(
        folder,
        id2label=labels,
        label2id={label: label_id for label_id, label in labels.items()},
        problem_type=config.problem_type,
        thresholds=None,  # of another job's rows
    )
    # RoBERTa's kind counts positions from behind the pad token that it was pretrained with.
    if model_config.model_type not in load.ROBERTAS or model_config.pad_token_id is None:
        load.take_pad_token(model_config, tokenizer)
    is_eager = config.max_seq_length <= EAGER_TOKENS or load.drops_attention(model_config)
    model, new_parameters = load.load_for_training(
        folder, model_config, device if is_eager else None
    )
    compute_first_token_only(model, last_alone=compiles_layers())
    model.config.max_seq_length = config.max_seq_length  # as predict and evaluate take it
    model.config.text_pairs = config.text_pair_column is not None
    return choose_trained(model, config, new_parameters), new_parameters
