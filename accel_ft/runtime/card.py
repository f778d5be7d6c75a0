"""The model card: README.md beside a model, as the Hub reads it."""

from typing import Any

from huggingface_hub import ModelCard, ModelCardData


def model_card(label_names: list[str], settings: dict[str, Any]) -> str:
    """Return a model card.

    Args:
        label_names: by id.
        settings: of the run it comes from; {} where that is not known.
    """
    base = str(settings.get("model_name_or_path", ""))
    on_hub = base and "://" not in base and not base.startswith((".", "/"))
    data = ModelCardData(
        pipeline_tag="text-classification",
        library_name="transformers",
        tags=["accelerate", "accel_ft"],
        base_model=base if on_hub else None,
        datasets=[settings["dataset_name"]] if settings.get("dataset_name") else None,
    )
    rows = "".join(
        f"| `{key}` | `{value}` |\n" for key, value in settings.items() if value is not None
    )
    training = f"\n## Training\n\n| key | value |\n|---|---|\n{rows}" if rows else ""
    labels = ", ".join(label_names)
    return str(
        ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# Text classifier\n\nLabels: {labels}.\n\n"
            "```python\nfrom transformers import pipeline\n\n"
            'classify = pipeline("text-classification", model=".")\n```\n' + training
        )
    )
