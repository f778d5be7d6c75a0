"""Models other than BERT: their padding, token types and end tokens."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import FILLING, WORDS, events_of, job_words
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, pipeline

from accel_ft import evaluate, export, load_classifier, train
from accel_ft.errors import ConfigError

WORDS_OF_ALL = [*FILLING, *(word for group in WORDS.values() for word in group)]
INPUTS = ["input_ids", "attention_mask"]


def make(folder: Path, model: str, special: str, template: str = "", **settings: object) -> Path:
    """Save a tiny random model, and a word-level tokenizer whose first tokens are those in `special`."""
    names = special.split()
    words = {word: number for number, word in enumerate([*names, *WORDS_OF_ALL])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        pairs = [(name, number) for number, name in enumerate(names)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=settings.pop("pair", "$A:0 $B:1"), special_tokens=pairs
        )
    keys = {
        "<pad>": "pad",
        "<unk>": "unk",
        "<cls>": "cls",
        "<sep>": "sep",
        "<s>": "bos",
        "</s>": "eos",
    }
    tokens = {f"{keys[name]}_token": name for name in names if name in keys}
    side = settings.pop("padding_side", "right")
    types = ["token_type_ids"] * settings.pop("has_types", "<cls>:2" in template)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side=side, model_input_names=INPUTS + types, **tokens
    ).save_pretrained(folder)
    ids = {
        f"{keys[name]}_token_id": words[name] for name in ("<pad>", "<s>", "</s>") if name in names
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(vocab_size=len(words), **ids, **settings)
    getattr(transformers, f"{model}Model")(config).save_pretrained(folder)
    return folder


def bart(folder: Path) -> Path:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 32)
    return make(
        folder, "Bart", "<s> <pad> </s> <unk>", "<s> $A </s>", max_position_embeddings=64, **sizes
    )


def test_micro_batch_of_an_encoder_decoder_is_found(
    tmp_path: Path, rows_file: Path, odd_file: Path
) -> None:
    """BART's head needs one end token in each row, also in the rows that `auto` measures memory with."""
    words = job_words(bart(tmp_path / "bart"), rows_file, odd_file, tmp_path / "run")
    train.main([*words, "--max_steps", "1", "--per_device_train_batch_size", "auto"])
    assert events_of(tmp_path / "run")[-1]["event"] == "end"
    card = (tmp_path / "run/model/README.md").read_text()
    assert "`auto`" not in card  # but the size found, as in config.yaml
    assert "| `global_batch_size` | `" in card


def test_end_token_within_a_text_of_an_encoder_decoder(
    tmp_path: Path, rows_file: Path, odd_file: Path
) -> None:
    """`</s>` within a text is plain letters: as a second end token it would stop the run at that row."""
    rows = tmp_path / "rows.csv"
    rows.write_text(rows_file.read_text() + '"was <s> 10 </s> 8",Business\n')
    model = bart(tmp_path / "bart")
    train.main([*job_words(model, rows, odd_file, tmp_path / "run"), "--preflight", "off"])
    texts = ["a goal", "was <s> 10 </s> 8"]
    ours = load_classifier(tmp_path / "run").predict(texts)
    theirs = pipeline("text-classification", model=str(tmp_path / "run/model"), batch_size=2)(texts)
    assert [row["score"] for row in ours] == pytest.approx(
        [row["score"] for row in theirs], abs=2e-6
    )


def test_decoder_whose_tokenizer_pads_on_the_left(
    tmp_path: Path, rows_file: Path, odd_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 counts positions from the first place, padding or not: yet the micro-batch size does not change the curve.

    Keys and values are not cached: a classifier predicts no next token.
    """
    monkeypatch.setattr("transformers.cache_utils.DynamicCache.update", None)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.2}
    model = make(tmp_path / "gpt2", "GPT2", "</s> <unk>", padding_side="left", **sizes, **dropout)
    curves = []
    for size in ("8", "2"):
        words = job_words(model, rows_file, odd_file, tmp_path / size)
        train.main([*words, "--per_device_train_batch_size", size])
        curves.append([e["loss"] for e in events_of(tmp_path / size) if e["event"] == "train"])
    assert curves[0] == pytest.approx(curves[1], rel=2e-6)
    assert len(load_classifier(tmp_path / "8").predict(["a goal", "a long goal"])) == 2


def test_types_of_single_texts(tmp_path: Path, rows_file: Path, odd_file: Path) -> None:
    """XLNet's tokenizer gives the last token of a text a type of its own, which the pipeline passes to the model."""
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32, "initializer_range": 0.2}
    names, template = "<pad> <unk> <cls> <sep>", "$A:0 <sep>:0 <cls>:2"
    model = make(
        tmp_path / "xlnet", "XLNet", names, template, padding_side="left", **sizes, dropout=0.0
    )
    train.main(job_words(model, rows_file, odd_file, tmp_path / "run"))
    texts = [line.rsplit(",", 1)[0].strip('"') for line in odd_file.read_text().splitlines()[1:]]
    ours = load_classifier(tmp_path / "run").predict(texts)
    theirs = pipeline("text-classification", model=str(tmp_path / "run/model"))(texts)
    assert [row["label"] for row in ours] == [row["label"] for row in theirs]
    scores = [row["score"] for row in theirs]
    assert [row["score"] for row in ours] == pytest.approx(scores, abs=2e-6)


def test_padding_of_a_head_that_reads_the_last_place(
    tmp_path: Path, rows_file: Path, odd_file: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """XLNet's head, and a tokenizer that pads on the right: one curve for any micro-batch size, and no warning."""
    monkeypatch.setattr("accel_ft.runtime.logging.setup_logging", lambda is_main: None)
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32, "initializer_range": 0.2}
    names, still = "<pad> <unk> <cls> <sep>", {"dropout": 0.0, "summary_last_dropout": 0.0}
    model = make(tmp_path / "xlnet", "XLNet", names, "<cls> $A <sep>", **sizes, **still)
    curves = []
    for size in ("8", "1"):
        words = job_words(model, rows_file, odd_file, tmp_path / size)
        words += ["--max_steps", "4", "--per_device_train_batch_size", size]
        train.main(words)
        curves.append([e["loss"] for e in events_of(tmp_path / size) if e["event"] == "train"])
    assert curves[0] == pytest.approx(curves[1], rel=2e-6)
    assert "padding changes" not in caplog.text


def test_texts_shorter_than_what_is_pooled(tmp_path: Path, rows_file: Path, odd_file: Path) -> None:
    """Funnel halves the sequence length repeatedly, and fails on fewer than five tokens."""
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32, "block_sizes": [1, 1, 1]}
    names, template = "<pad> <unk> <cls> <sep>", "<cls>:2 $A:0 <sep>:0"
    model = make(tmp_path / "funnel", "Funnel", names, template, **sizes)
    words = job_words(model, rows_file, odd_file, tmp_path / "run")
    train.main([*words, "--max_steps", "2"])
    assert len(load_classifier(tmp_path / "run").predict(["a goal"])) == 1


@pytest.mark.parametrize("model", ["Roberta", "GPT2", "Bart", "Bert"])
def test_token_types_that_the_model_does_not_know(
    model: str, tmp_path: Path, odd_file: Path
) -> None:
    """A BERT-like tokenizer gives each text of a pair a token type; some models know only one type, or none."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    sizes |= {"type_vocab_size": 1 + (model == "Bert")}
    if model == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    if model == "Bart":
        sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 32)
    sizes |= {"pair": "$A $B:1 </s>:1", "has_types": True}
    folder = make(tmp_path / "model", model, "<pad> </s> <unk>", "$A </s>", **sizes)
    rows = [line.split(",") for line in odd_file.read_text().splitlines()[1:]]
    pairs = [{"text": text, "other": "goal", "label": label} for text, label in rows]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(pairs))
    words = job_words(folder, file, file, tmp_path / "run")
    train.main([*words, "--text_pair_column", "other", "--max_steps", "1"])
    asked = [{"text": row["text"], "text_pair": row["other"]} for row in pairs]
    classify = pipeline("text-classification", model=str(tmp_path / "run/model"))
    assert ("token_type_ids" in classify.tokenizer("a", "b")) == (model == "Bert")
    scores = [row["score"] for row in classify(asked)]
    ours = load_classifier(tmp_path / "run").predict([tuple(row.values()) for row in asked])
    assert [row["score"] for row in ours] == pytest.approx(scores, abs=2e-6)


def test_pad_token_that_the_model_does_not_know(
    tmp_path: Path, rows_file: Path, odd_file: Path
) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = make(tmp_path / "gpt2", "GPT2", "</s> <unk>", **sizes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    known = json.loads((model / "config.json").read_text())["vocab_size"]
    fault = f"gives token id {known}, its model has {known} embeddings. Fix"
    with pytest.raises(ConfigError, match=fault):
        train.main(job_words(model, rows_file, odd_file, tmp_path / "run"))
    kind = transformers.GPT2ForSequenceClassification
    names = dict(enumerate(("Business", "Sci/Tech", "Sports", "World")))
    kind.from_pretrained(model, id2label=names).save_pretrained(model)
    with pytest.raises(ConfigError, match=fault):
        load_classifier(model).predict(["a goal", "a long goal"])  # one is padded
    with pytest.raises(ConfigError, match=fault):
        evaluate.main(["--checkpoint", str(model), "--test_file", str(odd_file)])


def unpadded(folder: Path, texts: list[str]) -> torch.Tensor:
    """Return the logits of plain transformers, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    cut = {"truncation": True, "max_length": 32, "return_tensors": "pt"}
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, **cut)).logits for text in texts])


def texts_of(file: Path) -> list[str]:
    with file.open(newline="") as lines:
        return [row["text"] for row in csv.DictReader(lines)]


@pytest.mark.parametrize("text_pad", [None, 1])
@pytest.mark.parametrize("kind", ["qwen3_5", "t5gemma"])
def test_pad_token_of_a_part(
    kind: str, text_pad: int | None, tmp_path: Path, rows_file: Path, odd_file: Path
) -> None:
    """A model of several parts finds a text's last token by the pad token in the config of its text part."""
    folder = make(tmp_path / "model", "GPT2", "<pad> <unk> <s> </s>", n_embd=8, n_head=1, n_layer=1)
    (folder / "model.safetensors").unlink()
    known = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1)
    text = sizes | {"vocab_size": known, "num_attention_heads": 2, "head_dim": 16}
    text |= {"pad_token_id": text_pad, "initializer_range": 0.2, "max_position_embeddings": 64}
    if kind == "t5gemma":
        text |= {"query_pre_attn_scalar": 16, "bos_token_id": 2, "layer_types": ["full_attention"]}
        parts = {"encoder": text | {"pad_token_id": 0}, "decoder": text, "vocab_size": known}
    else:
        text |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
        text |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
        seen = {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
        parts = {"text_config": text, "vision_config": seen}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **parts)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    words = job_words(folder, rows_file, odd_file, tmp_path / "run")
    train.main([*words, "--max_steps", "1"])
    logits = torch.from_numpy(np.load(tmp_path / "run/predictions.npz")["logits"])
    if kind == "qwen3_5":  # T5Gemma treats padding differently
        expected = unpadded(tmp_path / "run/model", texts_of(odd_file))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all()


@pytest.mark.parametrize("own_pad", [1, 40, None])
def test_places_are_counted_as_in_pretraining(
    own_pad: int | None, tmp_path: Path, rows_file: Path, odd_file: Path
) -> None:
    """RoBERTa-like models count positions from their own pad token's id, whatever the tokenizer's pad token is."""
    names = dict(enumerate(("Business", "Sci/Tech", "Sports", "World")))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    sizes |= {"max_position_embeddings": (own_pad or 1) + 33, "initializer_range": 0.3}
    folder = make(tmp_path / "model", "Roberta", "<pad> <s> </s> <unk>", "<s> $A </s>", **sizes)
    config = transformers.AutoConfig.from_pretrained(folder, pad_token_id=own_pad, id2label=names)
    torch.manual_seed(0)
    kind = transformers.RobertaForSequenceClassification
    kind(config).save_pretrained(folder)
    words = job_words(folder, rows_file, odd_file, tmp_path / "run")
    train.main([*words, "--max_steps", "1", "--learning_rate", "1e-12"])
    logits = torch.from_numpy(np.load(tmp_path / "run/predictions.npz")["logits"])
    # A model without a pad token takes the tokenizer's.
    expected = unpadded(folder if own_pad else tmp_path / "run/model", texts_of(odd_file))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_export_of_a_model_that_pads_with_a_word(tmp_path: Path, odd_file: Path) -> None:
    """The model pads with `!`: as a special token it would be cut out of texts before they are tokenised."""
    folder = tmp_path / "model"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters)
    backend.train_from_iterator(["What a goal!!! Really!! wow !!! yes! "] * 50, trainer)
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=backend.get_vocab_size(), n_embd=16, n_layer=1, n_head=2, n_positions=64,
        pad_token_id=0, initializer_range=0.3, id2label={0: "a", 1: "b", 2: "c"},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    texts = ["What a goal!!!", "wow !!! yes! really", "no!! no"]
    export.main(["--checkpoint", str(folder), "--output", str(tmp_path / "out")])
    assert torch.equal(unpadded(tmp_path / "out", texts), unpadded(folder, texts))


def test_attention_does_not_depend_on_earlier_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers switches BigBird's attention for good at the first batch of short texts."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
    sizes |= {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 256}
    special = "<pad> </s> <unk> <cls> <sep>"
    folder = make(tmp_path / "model", "BigBird", special, "<cls> $A </s>", **sizes)
    config = transformers.AutoConfig.from_pretrained(folder, id2label={0: "a", 1: "b"})
    transformers.BigBirdForSequenceClassification(config).save_pretrained(folder)
    classifier = load_classifier(folder)
    assert "big_bird uses full attention, not block-sparse" in caplog.text
    long = " ".join(WORDS_OF_ALL[:50])
    first = classifier.predict([long])
    classifier.predict(["a goal"])
    assert classifier.predict([long]) == first
