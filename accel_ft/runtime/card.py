"""The model card (README.md beside a model, in the Hub's format), and the upload to the Hub."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from accel_ft.config import DEFAULT_DATASET, FILE_KEYS
from accel_ft.errors import ConfigError, first_line
from accel_ft.runtime.hub import is_hub_id

LOCAL_KEYS = FILE_KEYS | {"output_dir"}


def model_card(
    label_names: list[str],
    settings: dict[str, Any],
    scores: dict[str, float] | None = None,
    split: str | None = None,
    pairs: bool = False,
) -> str:
    """Return a model card.

    Args:
        label_names: ordered by label id.
        settings: of the run that trained the model; {} if unknown.
        scores: metrics by name.
        split: the split that the scores were measured on, "test" or "validation".
        pairs: whether the model was trained on pairs of texts, if the settings do not say so.
    """
    if settings.get("output_dir") and not settings.get("train_file"):  # a run's settings
        settings = settings | {"dataset_name": settings.get("dataset_name") or DEFAULT_DATASET}
    base, data = (
        name if is_hub_id(name) else None
        for name in (settings.get("model_name_or_path"), settings.get("dataset_name"))
    )
    name = (
        settings.get("hub_model_id")
        or Path(str(settings.get("output_dir", "model"))).absolute().name
    )
    own = settings.get(f"{split}_file") or settings.get("train_file")
    rows = own or settings.get("dataset_name") or "unknown"
    # Rows not given may be split off the training rows: no split on the Hub holds just them.
    is_given = split == "test" or settings.get(f"{split}_file")
    results = [
        EvalResult(
            task_type="text-classification",
            dataset_type="custom" if own else data or "custom",
            dataset_name=Path(str(rows)).name,
            dataset_config=None if own else settings.get("dataset_config_name"),
            dataset_split=settings.get(f"{split}_split_name") or (split if is_given else None),
            metric_type=metric,
            metric_value=round(value, 6),
        )
        for metric, value in (scores or {}).items()
    ]
    about = ModelCardData(
        pipeline_tag="text-classification",
        library_name="transformers",
        tags=["accelerate", "accel_ft"],
        base_model=base,
        datasets=None if data is None else [data],
        model_name=str(name) if results else None,
        eval_results=results or None,
    )
    measured = "".join(f"| {metric} | {value:.4f} |\n" for metric, value in (scores or {}).items())
    keys = "".join(
        f"| `{key}` | `{_shown(key, value).replace('|', chr(92) + '|')}` |\n"
        for key, value in settings.items()
        if value not in (None, [])
    )
    is_tuned = split == "validation" and "multi_label" in settings.get("problem_type", "")
    tuned = ", on which the thresholds are tuned" * is_tuned
    heading = f"\n## Evaluation, on the {split} rows{tuned}\n\n| metric | value |\n|---|---|\n"
    evaluation = heading + measured if measured else ""
    training = f"\n## Training\n\n| key | value |\n|---|---|\n{keys}" if keys else ""
    plain = (" ".join(name.split()).replace("`", "'") for name in label_names)
    labels = ", ".join(f"`{name}`" for name in plain)  # as code: HTML stays text
    labels = "" if settings.get("problem_type") == "regression" else f"Labels: {labels}.\n\n"
    place, longest = settings.get("hub_model_id") or ".", settings.get("max_seq_length")
    cut = f", truncation=True, max_length={longest}" if longest else ", truncation=True"
    told = ""
    if pairs or settings.get("text_pair_column"):
        told = '\nIt was trained on pairs: `classify({"text": "...", "text_pair": "..."})`.\n'
    if "multi_label" in settings.get("problem_type", ""):
        cut += ", top_k=None"
        told += (
            "\nEach label has its own score; it is predicted if that reaches its value in "
            "`thresholds` of config.json, or 0.5 if there is none.\n"
        )
    return (
        f"---\n{about.to_yaml()}\n---\n\n# Text classifier\n\n{labels}"
        "```python\nfrom transformers import pipeline\n\n"
        f'classify = pipeline("text-classification", model="{place}"{cut})\n```\n'
        + told
        + evaluation
        + training
    )


def _shown(key: str, value: Any) -> str:
    """Return a setting's value as the card shows it. A card may become public, so only the last
    part of a local path is kept.
    """
    is_name = key in ("model_name_or_path", "dataset_name")
    is_local = not (is_hub_id(value) or "://" in value) if is_name else key in LOCAL_KEYS
    return Path(value).absolute().name if is_local else str(value)


def require_repo(repo_id: str, private: bool) -> str:
    """Create the repository on the Hub if it is missing, and check the right to write to it. Called
    before a run, so that a run that cannot be pushed fails at once and not at its end. Return the
    repository's id, including the account's name.

    Args:
        repo_id: its name, or account/name.
        private: whether it must be private; if not, a new one follows the account's default.

    Raises:
        ConfigError: the Hub's answer; or the repository is public but must be private.
    """
    api = HfApi()
    try:
        found = str(api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id)
        _check_write(api, found)  # create_repo passes with read access too
        is_public = api.repo_info(found).private is False
    except Exception as error:  # no token, no right, no network, ...
        what, fix = "refuses", "`hf auth login`, or HF_TOKEN"
        # By class name: huggingface_hub has changed its HTTP library, and its errors, before.
        if re.search("Connect|Timeout|Offline", type(error).__name__):
            what, fix = "cannot be reached", "check the network, HF_ENDPOINT, HF_HUB_OFFLINE"
        if isinstance(error, HFValidationError):  # output_dir's name may be no valid id
            what, fix = "refuses", "--hub_model_id NAME, or ACCOUNT/NAME"
        raise ConfigError(
            f"hub_model_id={repo_id}: the Hub {what}: {first_line(error).rstrip('.')}. "
            f"Fix: {fix}; or push_to_hub: false, and `hf upload` later"
        ) from error
    if private and is_public:
        raise ConfigError(
            f"hub_private_repo: {found} exists already, and is public. Fix: make it private on the "
            "Hub, or another --hub_model_id"
        )
    return found


def _check_write(api: HfApi, repo_id: str) -> None:
    try:
        api.auth_check(repo_id, write=True)
    except HfHubHTTPError as error:
        if type(error) is not HfHubHTTPError or error.response.status_code != 404:
            raise  # not on a plain 404: a mirror of the Hub that lacks this endpoint


def push(folder: Path, repo_id: str) -> str:
    """Upload a model's folder; return its URL on the Hub.

    Raises:
        ConfigError: the Hub's answer; the folder is unchanged.
    """
    try:
        return str(
            HfApi().upload_folder(
                folder_path=folder, repo_id=repo_id, commit_message="Trained with accel_ft"
            )
        )
    except Exception as error:
        raise ConfigError(
            f"hub_model_id={repo_id}: could not be pushed: {first_line(error)}. {folder} "
            f"is complete. Fix: `hf upload {repo_id} {folder}`"
        ) from error
