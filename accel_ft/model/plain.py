"""A job's model, before anything wraps it."""

from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from accel_ft.config import TrainConfig
from accel_ft.model import load
from accel_ft.model.adapters import choose_trained
from accel_ft.model.first_token import KINDS, compute_first_token_only
from accel_ft.runtime import fsdp
from accel_ft.runtime.compiled import compiles_layers, is_compiled

EAGER_TOKENS = 512  # beyond, eager's saved scores, quadratic in tokens per head, fill the memory
SDPA_TOKENS = 192  # from here on torch's CPU kernel, which saves no scores, is faster


def plain_model(
    config: TrainConfig, device: torch.device, label_names: list[str], tokenizer: Any
) -> tuple[Any, list[str]]:
    """Load the job's model, not wrapped yet, with the same new head on every rank.

    Args:
        device: that it will train on; the returned model is still on the CPU.

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
        thresholds=None,  # tuned on another job's rows
    )
    # Models like RoBERTa count positions from their pretrained pad token's id: keep that one.
    if model_config.model_type not in load.ROBERTAS or model_config.pad_token_id is None:
        load.take_pad_token(model_config, tokenizer)
    most = EAGER_TOKENS if model_config.model_type in KINDS else SDPA_TOKENS - 1
    is_eager = config.max_seq_length <= most or load.drops_attention(model_config)
    model, new_parameters = load.load_for_training(
        folder, model_config, device if is_eager else None
    )
    if device.type == "cpu" and not (is_eager or is_compiled()):
        _attend_by_width(model)
    # Under FSDP, the joined weight of `fused_qkv_attention` would stay unsharded until backward.
    stays_apart = fsdp.is_asked_for() and model.config._attn_implementation == "sdpa"
    compute_first_token_only(model, last_alone=stays_apart or compiles_layers())
    model.config.max_seq_length = config.max_seq_length  # for predict and evaluate
    model.config.text_pairs = config.text_pair_column is not None
    return choose_trained(model, config, new_parameters), new_parameters


def _attend_by_width(model: Any) -> None:
    """Make a model use eager attention in narrow batches and scaled_dot_product_attention in wide
    ones, if it supports both. For a CPU, and models without attention dropout.
    """
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    # On the base: before peft 0.21 adapters call the model's `forward`, which bypasses its hooks.
    model.base_model.register_forward_pre_hook(partial(_choose, configs), with_kwargs=True)


def _choose(configs: list[Any], _: Any, args: Any, kwargs: dict[str, Any]) -> None:
    ids = args[0] if args else kwargs["input_ids"]
    for config in configs:  # T5's encoder and decoder have copies of the config
        config._attn_implementation = "sdpa" if ids.shape[1] >= SDPA_TOKENS else "eager"
