import contextlib
import hashlib
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from accel_ft.checkpoint.open import model_folder, open_classifier
from accel_ft.config import TrainConfig
from accel_ft.errors import CheckpointError, ConfigError, beside
from accel_ft.model import load
from accel_ft.model.load import (
    _refuse_words_elsewhere,
    check_max_seq_length,
    check_trainable,
    drops_attention,
    load_for_inference,
    load_for_training,
    load_model_config,
    load_parts,
    load_tokenizer,
    position_limit,
    resolve,
)
from accel_ft.model.plain import plain_model
from accel_ft.runtime.hub import hub_reachable


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


def test_a_package_carries_a_model(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256((package / "model/model.safetensors").read_bytes()).hexdigest()
    name, hashed, sha256 = "package://carries_a_model/model", [], load.sha256
    monkeypatch.setattr(load, "sha256", lambda path: hashed.append(path) or sha256(path))
    assert resolve(name) == resolve(f"{name}#sha256={digest}") == str(package / "model")
    with pytest.raises(
        ConfigError, match=f"has SHA-256 {digest}, expected {'0' * 64}.*--force-reinstall"
    ):
        resolve(f"{name}#sha256={'0' * 64}")
    assert len(hashed) == 1
    (package / "model/model.safetensors").write_bytes(b"another build")  # in the same process
    with pytest.raises(ConfigError, match=f"expected {digest}"):
        resolve(f"{name}#sha256={digest}")
    (package / "model/config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no model at 'model'\.$"):  # nor this name again
        resolve(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "package://no_such_package/model",
            "'no_such_package' is not installed. Fix: pip install no-such-package",
        ),
        ("package://carries_a_model/other", "no model at 'other'. .*/carries_a_model holds model$"),
        ("package://carries_a_model/modle", "no model at 'modle'. Did you mean `model`"),
        ("package://carries_a_model/../carries_a_model/..", "holds no model"),
        ("package://carries_a_model/model#sha256=12", "is no hash"),
        ("package://os.path/x", "not installed"),
        ("./no/such/folder", "no such folder"),
        ("/no/such", "no such folder"),
        (__file__, "is a file. Fix: its folder"),
    ],
)
def test_names_that_lead_nowhere(package: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(name)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile libraries are set offline, so that they ask nothing; afterwards they are as they were."""
    offline = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda *_, **__: offline.append(constants.HF_HUB_OFFLINE) or (_ for _ in ()).throw(fault),
    )
    hub_reachable.cache_clear()
    fault = OSError("no connection")  # as transformers raises it
    fault.__cause__ = LocalEntryNotFoundError("the disk cache")
    lacks = "the Hub cannot be reached, and the local cache does not have it. (.|\n)*quickstart"
    with pytest.raises(ConfigError, match=lacks):
        load_tokenizer("distilbert/no-such-model")
    assert (offline, constants.HF_HUB_OFFLINE) == ([True], False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_reachable.cache_clear()
    fault = OSError("half a file.")  # it is in the cache, but damaged
    with pytest.raises(
        ConfigError, match="is set, and it cannot be loaded from .*: half a file. Fix"
    ):
        load_tokenizer("distilbert/no-such-model")
    hub_reachable.cache_clear()


@pytest.mark.parametrize(
    ("device", "max_seq_length", "dropout", "path"),
    [
        ("cpu", 512, 0.0, "eager"),
        ("cpu", 513, 0.0, "sdpa"),
        ("cpu", 513, 0.1, "eager"),  # with dropout, sdpa saves them too
        ("cuda", 512, 0.1, "sdpa"),
    ],
)
def test_the_attention_path(
    tmp_path: Path, device: str, max_seq_length: int, dropout: float, path: str
) -> None:
    """Eager attention saves length x length scores for each head: with long texts, tens of gigabytes."""
    folder = make_tiny_model(tmp_path, max_positions=600)
    settings = json.loads((folder / "config.json").read_text())
    settings["attention_probs_dropout_prob"] = dropout
    (folder / "config.json").write_text(json.dumps(settings))
    config = TrainConfig(model_name_or_path=str(folder), max_seq_length=max_seq_length)
    tokenizer = load_tokenizer(str(folder))
    model, _ = plain_model(config, torch.device(device), ["a", "b"], tokenizer)
    assert model.config._attn_implementation == path
    assert drops_attention(AutoConfig.for_model("t5", dropout_rate=dropout)) == (dropout > 0)


def without_dropout(
    kind: str, tokenizer: Path, folder: Path, device: str = "cpu", **keys: Any
) -> Any:
    """Return a tiny model without attention dropout, as training on a device loads it."""
    of_t5 = {"d_kv": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= of_t5 if kind == "t5" else {"pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=300, **settings, eos_token_id=2, num_labels=2)
    if not folder.exists():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    about = TrainConfig(model_name_or_path=str(folder), **keys)
    words = load_tokenizer(str(tokenizer))
    return plain_model(about, torch.device(device), ["a", "b"], words)[0].eval()


@pytest.mark.parametrize("adapters", [{}, {"lora_r": 2}])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_wide_batches_attend_otherwise(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    adapters: dict[str, Any],
) -> None:
    """On a CPU, without attention dropout, SDPA is faster for wide batches, and saves no scores."""
    model, narrow_only = (
        without_dropout(kind, tiny_model, tmp_path / "model", max_seq_length=length, **adapters)
        for length in (256, 191)
    )
    wide, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: wide.append(ids.shape[1]) or sdpa(*args, **kwargs),
    )
    for width in (16, 192, 191, 256):
        ids = torch.randint(3, 300, (2, width))
        ids[:, -1] = 2
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        wanted = narrow_only(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert set(wide) == {192, 256}


@pytest.mark.parametrize(
    ("kind", "device", "backend"),
    [("falcon", "cpu", "NO"), ("llama", "cpu", "INDUCTOR"), ("llama", "cuda", "NO")],
)
def test_models_that_attend_in_one_way(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    device: str,
    backend: str,
) -> None:
    """Falcon has a layer class for each implementation; a compiled model would be compiled for both."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    model = without_dropout(kind, tiny_model, tmp_path / "model", device, max_seq_length=256)
    model(input_ids=torch.full((1, 8), 3))
    assert model.config._attn_implementation == "sdpa"


def test_a_folder_of_adapters(tiny_model: Path, tmp_path: Path) -> None:
    """transformers would load them as their configuration says, which may name any module to import."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    config = load_model_config(str(model))
    with pytest.raises(ConfigError, match=r"holds adapters .* Fix: merge them into one"):
        load_for_training(str(model), config, None)
    with pytest.raises(ConfigError, match="checkpoint=.*holds adapters"):
        load_for_inference(str(model), config)


def test_a_folder_of_shards(tiny_model: Path, tmp_path: Path) -> None:
    """An FSDP checkpoint has a config.json, but its weights are in many files."""
    shutil.copyfile(tiny_model / "config.json", tmp_path / "config.json")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ConfigError, match=r"holds shards, .*accel_ft\.export"):
        load_for_training(str(tmp_path), load_model_config(str(tmp_path)), None)


def test_a_folder_without_a_model(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model_config(str(tmp_path))
    with pytest.raises(ConfigError, match="holds no model .* Fix: the folder of a whole model$"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="a whole model, of a run, or of a checkpoint"):
        resolve(str(tmp_path), "checkpoint")
    (tmp_path / "adapter_config.json").write_text("{}")  # as peft saves it
    with pytest.raises(ConfigError, match="Fix: merge its adapters .peft's merge_and_unload. a"):
        resolve(str(tmp_path), "checkpoint")
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "attn_implementation": "some/kernel"}'
    )
    with pytest.raises(ConfigError, match="config.json loads an attention kernel .* some/kernel"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").unlink()
    shutil.copytree(tiny_model, tmp_path / "model")
    with pytest.raises(ConfigError, match="holds no model .* Fix: .*/model"):
        resolve(str(tmp_path))


def test_more_tokens_than_positions(tiny_model: Path) -> None:
    limit = position_limit(load_model_config(str(tiny_model)), load_tokenizer(str(tiny_model)))
    check_max_seq_length(64, limit)
    with pytest.raises(ConfigError, match="max_seq_length=65: the model takes 64 tokens"):
        check_max_seq_length(65, limit)


def test_positions_behind_the_pad_token() -> None:
    """RoBERTa counts positions from its pad token's id + 1, which is 2: two of 514 are never used."""
    from transformers import BertConfig, RobertaConfig

    unlimited = SimpleNamespace(model_max_length=10**30)
    assert position_limit(RobertaConfig(max_position_embeddings=514), unlimited) == 512
    assert position_limit(BertConfig(max_position_embeddings=514), unlimited) == 514


def test_positions_by_another_name() -> None:
    from transformers import LayoutLMv3Config, MptConfig

    of_layouts = LayoutLMv3Config(max_position_embeddings=66, pad_token_id=1)
    assert position_limit(of_layouts, SimpleNamespace(model_max_length=512)) == 64
    assert position_limit(MptConfig(max_seq_len=64), SimpleNamespace(model_max_length=512)) == 64


def test_a_folder_without_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """transformers would make one with special tokens only: every word would be unknown."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    with pytest.raises(ConfigError, match="its vocabulary is empty.*beside config.json"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_sentencepiece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("`tiktoken` is required to read a `tiktoken` file.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Fix: pip install sentencepiece protobuf"):
        load_tokenizer(str(tmp_path))


def test_weights_that_are_not_those_of_the_layers(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    config = (tiny_model / "config.json").read_text()
    names = {label_id: f"label {label_id}" for label_id in range(2)}
    sizes = json.loads(config)["vocab_size"]
    places = json.loads(config)["max_position_embeddings"]
    for wrong in ("names", "vocabulary", "places", "pooler"):
        (tmp_path / "config.json").write_text(config)
        changed = dict(weights)
        if wrong == "names":  # as a wrapper saves them
            changed = {f"module.{name}": value for name, value in weights.items()}
        elif wrong == "vocabulary":
            (tmp_path / "config.json").write_text(
                config.replace(f'"vocab_size": {sizes}', f'"vocab_size": {sizes + 9}')
            )
        elif wrong == "places":  # drawn at random, they would be taken for pretrained
            longer = f'"max_position_embeddings": {places + 9}'
            about = config.replace(f'"max_position_embeddings": {places}', longer)
            (tmp_path / "config.json").write_text(about)
        else:  # many encoders come without it
            changed = {name: value for name, value in weights.items() if "pooler" not in name}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        about = load_model_config(str(tmp_path), id2label=names, label2id={})
        if wrong == "pooler":
            assert load_for_training(str(tmp_path), about, CPU)[1]
            continue
        with pytest.raises(ConfigError, match="weights are missing, or differ in size"):
            load_for_training(str(tmp_path), about, CPU)


CPU = torch.device("cpu")


def classifier(folder: Path, num_labels: int) -> Any:
    names = {label_id: f"label {label_id}" for label_id in range(num_labels)}
    config = load_model_config(str(folder), id2label=names, label2id={})
    return load_for_training(str(folder), config, CPU)[0]


def test_pretrained_weights_that_are_no_numbers(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"][3] = float("inf")
    weights["embeddings.word_embeddings.weight"][3] = float("nan")
    weights["pooler.dense.weight"][:] = 3e38  # finite, though their sum is not
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = load_model_config(str(tmp_path), num_labels=4)
    found = (
        r"weights in bert\.embeddings\.word_embeddings\.weight, .*1\.output\.dense\.bias\. Fix: "
    )
    with pytest.raises(ConfigError, match=found):
        load_for_training(str(tmp_path), config, None)


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
    with pytest.raises(ConfigError, match="not a sequence classifier"):
        load_parts(str(tiny_model))


def test_a_run_with_a_slip_of_the_pen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match="checkpoint=runs/quikstart: there is no such folder. Did you mean `quickstart`",
    ):
        resolve("runs/quikstart", "checkpoint")
    with pytest.raises(ConfigError, match="there is no such folder. runs holds quickstart$"):
        resolve("runs/nope", "checkpoint")
    assert beside(Path("nope")) == ""
    assert resolve("runs/bert") == "runs/bert"  # a Hub id


def test_a_model_among_folders_that_cannot_be_listed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert resolve(str(tiny_model)) == str(tiny_model)


def test_weights_that_may_not_be_read(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors makes files that only their owner may read, and tells others that there are none."""
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, how: "model.s" not in str(path) and may(path, how)
    )
    with pytest.raises(ConfigError, match="cannot be loaded: .*Permission denied: .*model.safe"):
        classifier(tiny_model, 3)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_leads_out_of_its_folder(tiny_model: Path, tmp_path: Path, name: str) -> None:
    classifier(tiny_model, 3).save_pretrained(tmp_path)
    (tmp_path / name).write_text('{"weight_map": {"a": "../other.bin"}}')
    with pytest.raises(ConfigError, match="index.json names '../other.bin', outside the folder"):
        load_for_inference(str(tmp_path), load_model_config(str(tmp_path)))


@pytest.mark.parametrize("name", ["vocab", "merges_file", "init_inputs"])
def test_a_tokenizer_that_would_take_any_file_for_words(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """For example /proc/self/environ, which would then be saved, and shared, with the model."""
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path.parent / "words").touch()
    for place in (
        tmp_path.parent / "words",
        tmp_path / "vocab.txt",
        tmp_path / "of another machine",
    ):
        told[name] = [str(place)] if name == "init_inputs" else str(place)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
        refused = pytest.raises(
            ConfigError, match=f"has {name}.*='.*words', outside its folder. Fix: remove that"
        )
        with refused if place.name == "words" else nullcontext():
            _refuse_words_elsewhere(str(tmp_path), "model_name_or_path")
    words = str(tmp_path.parent / "words")
    told[name] = [words] if name == "init_inputs" else words
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="Fix: remove that"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_cannot_pad(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has neither a pad nor an end token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        ({"input_ids": [3], "bbox": [[0, 0]]}, "its model also needs bbox for each text"),
        (ValueError("give it\nboxes"), "its tokenizer rejects plain text: give it boxes"),
        (AssertionError("no"), "its tokenizer rejects plain text: no"),
        (TypeError("no"), "its tokenizer rejects plain text: no"),
    ],
)
def test_a_tokenizer_of_more_than_texts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, encoded: Any, words: str
) -> None:
    def encode(*_: Any, **__: Any) -> Any:
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", encode)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(str(tiny_model))


@pytest.mark.parametrize(
    ("template", "own", "pad"),
    [
        ("$A", {"eos": "</s>", "bos": "<s>", "unk": "<unk>"}, "</s>"),
        ("<s> $A", {"eos": "</s>", "bos": "<s>", "unk": "<unk>"}, "</s>"),
        ("<s> $A </s>", {"eos": "</s>", "bos": "<s>", "unk": "<unk>"}, "<unk>"),
        ("$A </s>", {"eos": "</s>", "bos": "<s>", "unk": "<unk>"}, "<s>"),
        ("<s> $A </s>", {"eos": "</s>", "bos": "<s>"}, "<s>"),  # texts end with </s>
        ("<s> $A", {"eos": "<s>", "bos": "<s>", "unk": "<unk>"}, "<s>"),  # texts may end with <unk>
    ],
)
def test_the_pad_token_of_a_decoder_stands_in_no_text(
    tmp_path: Path, template: str, own: dict[str, str], pad: str
) -> None:
    """A pad token's embedding gets no gradient: if each text began with that token, it would never be trained."""
    from tokenizers import Tokenizer, models, processors
    from transformers import GPT2Config, PreTrainedTokenizerFast

    names = {"<unk>": 0, "<s>": 1, "</s>": 2}
    backend = Tokenizer(models.WordLevel(names | {"a": 3, "b": 4, "c": 5}, unk_token="<unk>"))
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(names.items())
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in own.items()}
    ).save_pretrained(tmp_path)
    GPT2Config().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == pad


def test_a_tokenizer_of_a_few_letters(tmp_path: Path) -> None:
    """It knows no other letters, has no unknown token, and needs none: DNA."""
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "A": 1, "C": 2, "G": 3, "T": 4}))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(tmp_path)
    BertConfig().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("A")["input_ids"] == [1]


def test_a_tokenizer_of_tables(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise ValueError("provide a table")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.num_special_tokens_to_add", fail)
    with pytest.raises(ConfigError, match="its tokenizer rejects plain text: provide a table"):
        load_tokenizer(str(tiny_model))


def test_weights_that_are_parts_of_one_have_memory_of_their_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers may cut them from one tensor (Nomic's query, key, value): accelerate would save one of them."""
    from transformers import BertForSequenceClassification

    whole = BertForSequenceClassification.from_pretrained

    def in_parts(*args: Any, **kwargs: Any) -> Any:
        model, info = whole(*args, **kwargs)
        attention = model.bert.encoder.layer[0].attention.self
        joined = torch.cat([attention.query.weight, attention.key.weight]).detach()
        attention.query.weight.data, attention.key.weight.data = joined.chunk(2)
        return model, info

    monkeypatch.setattr(BertForSequenceClassification, "from_pretrained", in_parts)
    config = load_model_config(str(tiny_model), num_labels=3)
    model, _ = load_for_training(str(tiny_model), config, torch.device("cpu"))
    memory = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(memory)) == len(memory)


def test_the_side_of_padding_is_the_models(tiny_model: Path, tmp_path: Path) -> None:
    """Left for XLNet, whose head reads the last position; right for others, whose positions count from the left."""
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    kinds = (("xlnet", "right", "left"), ("xlnet", None, "left"), ("bert", "left", "right"))
    for kind, own, side in kinds:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        about = json.loads((tmp_path / "tokenizer_config.json").read_text())
        about.pop("padding_side", None)
        about |= {"padding_side": own} if own else {}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.padding_side == side
        tokenizer.save_pretrained(tmp_path / kind)
        assert AutoTokenizer.from_pretrained(tmp_path / kind).padding_side == side


@pytest.mark.parametrize(
    ("kind", "settings", "can"),
    [
        ("reformer", {}, False),
        ("nystromformer", {"num_landmarks": 8}, False),
        ("nystromformer", {}, True),  # as many landmarks as tokens: plain attention
        ("bert", {}, True),
    ],
)
def test_kinds_that_want_batches_of_one_length(
    kind: str, settings: dict[str, int], can: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | settings))
    config = load_model_config(str(tmp_path))
    with contextlib.nullcontext() if can else pytest.raises(ConfigError, match=f"{kind} needs all"):
        check_trainable(config)


def test_one_logit_alone_is_a_number(tiny_model: Path) -> None:
    """Cross-encoders and reward models often set no problem_type; transformers decides in the same way."""
    from accel_ft.checkpoint.open import Classifier

    kinds = {n: Classifier("", classifier(tiny_model, n), None, []).problem_type for n in (1, 2)}
    assert kinds == {1: "regression", 2: "single_label_classification"}


def test_labels_on_a_card() -> None:
    """Label names may look like HTML."""
    from accel_ft.runtime.card import model_card

    card = model_card(["<b>no</b>", "yes"], {"output_dir": "a"})
    assert "Labels: `<b>no</b>`, `yes`.\n" in card
    assert "Labels: `a'<img src=x>'`.\n" in model_card(["a`<img src=x>`"], {})  # no backtick
    assert "Labels:" not in model_card(["score"], {"problem_type": "regression"})


def test_a_card_names_the_hub_only_for_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.runtime.card import model_card

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows" / "mine").mkdir(parents=True)
    local = {"model_name_or_path": "runs/x/model", "dataset_name": "rows/mine", "output_dir": "a"}
    card = model_card(["no", "yes"], local, {"accuracy": 0.5})
    assert "base_model:" not in card
    assert "datasets:" not in card
    assert "type: custom" in card
    hub = {
        "model_name_or_path": "distilbert/distilbert-base-uncased",
        "dataset_name": "fancyzhx/ag_news",
    }
    card = model_card(["no", "yes"], hub, {"accuracy": 0.5})
    assert "base_model: distilbert/distilbert-base-uncased" in card
    assert "- fancyzhx/ag_news" in card
    assert "- fancyzhx/ag_news" in model_card(["no", "yes"], {"output_dir": "a"})  # the default
    mine = model_card(["no", "yes"], {"output_dir": "a", "train_file": "rows.csv"})
    assert "ag_news" not in mine
    glue = {
        "dataset_name": "nyu-mll/glue",
        "dataset_config_name": "mnli",
        "validation_split_name": "validation_matched",
    }
    card = model_card(["no", "yes"], glue, {"accuracy": 0.5}, "validation")
    assert "config: mnli" in card
    assert "split: validation_matched" in card
    assert "on the validation rows" in card
    cut_off = model_card(["no", "yes"], {"dataset_name": "me/a"}, {"accuracy": 0.5}, "validation")
    assert "type: me/a" in cut_off
    assert "split:" not in cut_off  # the Hub has none like it
    assert 'model=".", truncation=True)' in card
    many = {"problem_type": "multi_label_classification"}
    tuned = "on the validation rows, on which the thresholds are tuned"
    assert tuned in model_card(["no", "yes"], many, {"f1_macro": 0.5}, "validation")
    card = model_card(["no", "yes"], many, {"f1_macro": 0.5}, "test")
    assert "are tuned" not in card
    pairs = model_card(["no", "yes"], {"text_pair_column": "answer"})
    assert 'classify({"text": "...", "text_pair": "..."})' in pairs
    assert "truncation=True, top_k=None)" in card
    assert "it is predicted if that reaches its value in `thresholds` of config.json" in card
    mine = hub | {"test_file": "my/rows.csv"}  # measured on rows that are not the data set's
    card = model_card(["no", "yes"], mine, {"accuracy": 0.5}, "test")
    assert "type: custom" in card
    assert "name: rows.csv" in card
    card = model_card(["no", "yes"], {"max_seq_length": 96})
    assert 'model=".", truncation=True, max_length=96)' in card


def test_the_card_of_the_job_with_no_key_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.train import _write_card_and_report

    (tmp_path / "model").mkdir()
    scores = [{"event": "test", "test_accuracy": 0.5}]
    config = TrainConfig(report_to=())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/ag_news").symlink_to(tmp_path)
    _write_card_and_report(config, ["no", "yes"], scores)
    card = (tmp_path / "model/README.md").read_text()
    assert "base_model: distilbert/distilbert-base-uncased" in card
    assert "- fancyzhx/ag_news" in card
    assert "type: fancyzhx/ag_news" in card


def test_a_refusal_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_ft.runtime import card

    class Silent:
        def create_repo(self, *_: Any, **__: Any) -> None:
            raise TimeoutError

    monkeypatch.setattr(card, "HfApi", Silent)
    with pytest.raises(ConfigError, match=r"the Hub cannot be reached: TimeoutError\(\)"):
        card.require_repo("a/b", private=False)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed inside another project's checkout: that project's commit says nothing about accel_ft."""
    import subprocess

    import accel_ft
    from accel_ft.runtime.receipt import git_commit

    settings = "user.name=x user.email=x commit.gpgsign=false core.hooksPath=/dev/null".split()
    git = ["git", *(word for each in settings for word in ("-c", each)), "-C", str(tmp_path)]
    (tmp_path / "theirs.py").touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "__init__.py").touch()
    monkeypatch.setattr(accel_ft, "__file__", str(tmp_path / "installed" / "__init__.py"))
    assert git_commit() is None
    subprocess.run([*git, "add", "."], check=True)
    assert git_commit().endswith("-dirty")


@pytest.fixture
def foreign(tiny_model: Path, tmp_path: Path) -> Path:
    """A classifier of three labels, not made by accel_ft."""
    folder = shutil.copytree(tiny_model, tmp_path / "classifier")
    kind = AutoModelForSequenceClassification
    kind.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    return folder


def say(folder: Path, **settings: object) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"problem_type": "text_classification"},
            "has problem_type 'text_classification'. Allowed",
        ),
        ({"id2label": {"0": "x", "1": "y", "2": "x"}}, "several of its labels are called x. Fix"),
    ],
)
def test_a_foreign_config_that_is_wrong(foreign: Path, settings: dict, words: str) -> None:
    say(foreign, **settings)
    with pytest.raises(ConfigError, match=words):
        load.load_parts(str(foreign))


@pytest.mark.parametrize("thresholds", [[0.5, 0.4], {"LABEL_0": 0.5}, [0.5, 0.5, None]])
def test_thresholds_that_are_not_one_a_label(foreign: Path, thresholds: object) -> None:
    say(foreign, thresholds=thresholds, problem_type="multi_label_classification")
    opened = open_classifier(str(foreign), torch.device("cpu"))
    with pytest.raises(ConfigError, match="no list of one number per label. Allowed: 3, for LABEL"):
        _ = opened.thresholds
    say(foreign, problem_type="single_label_classification")  # they are not used then
    assert open_classifier(str(foreign), torch.device("cpu")).thresholds is None


def test_a_classifier_with_a_model_folder_in_it_is_itself(foreign: Path) -> None:
    (foreign / "model").mkdir()
    shutil.copy(foreign / "config.json", foreign / "model")
    assert model_folder(str(foreign)) == str(foreign)
    (foreign / "receipt.json").touch()  # now also a run's output_dir: the run's model is in model/
    (foreign / "config.yaml").touch()
    assert model_folder(str(foreign)) == str(foreign / "model")


def test_a_config_that_wants_attentions_can_be_saved(foreign: Path, tmp_path: Path) -> None:
    """SDPA returns no attention weights, and transformers refuses to save a config that asks for them."""
    say(foreign, output_attentions=True)
    config = load_model_config(str(foreign))
    config._attn_implementation = "sdpa"
    config.save_pretrained(tmp_path / "saved")
    assert not config.output_attentions
