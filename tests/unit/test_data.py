"""Token store, splits and batches: from rows on disk to the tensors of a micro-batch."""

import copy
import json
import os
import pickle
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_rows
from huggingface_hub import constants
from tokenizers.processors import TemplateProcessing

from accel_ft.config import DataConfig, TrainConfig
from accel_ft.data import loader as loader_module
from accel_ft.data import targets as targets_module
from accel_ft.data import tokenize as tokenize_module
from accel_ft.data.loader import Batches, Padding, collate, make_loader, train_places
from accel_ft.data.plan import Plan
from accel_ft.data.sources import Source, file_source
from accel_ft.data.splits import Split, Splits, class_weights, load_eval_split, load_splits
from accel_ft.data.targets import output_names
from accel_ft.data.tokenize import TokenStore, cache_folder, token_ids, tokenize
from accel_ft.engine.evaluation import write_mistakes, write_predictions
from accel_ft.errors import ConfigError, DataError
from accel_ft.model.load import load_tokenizer
from accel_ft.runtime.launch import make_accelerator
from accel_ft.settings import parse

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path):
    return load_tokenizer(str(tiny_model))


def store_of(path: Path, tokenizer, max_seq_length: int = 16) -> TokenStore:
    return tokenize(file_source(path), DataConfig(max_seq_length=max_seq_length), tokenizer)


def splits_of(tokenizer, *words: str) -> Splits:
    config = parse(TrainConfig, words, "train")
    return load_splits(config, tokenizer)


def test_ranks_wait_a_day_for_a_slow_one() -> None:
    """In evaluate and predict a rank may wait for standard input; training has its own watch."""
    assert make_accelerator().init_handler.timeout == timedelta(days=1)


def test_store_holds_what_the_tokenizer_says(
    rows_file: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_module, "ROWS_AT_ONCE", 10)
    store = store_of(rows_file, tokenizer)
    rows = list(file_source(rows_file).rows(DataConfig()))
    assert len(store) == 47
    for number, (_, text, label) in enumerate(rows):
        expected = tokenizer(text, truncation=True, max_length=16)["input_ids"]
        assert store.tokens(number).tolist() == [expected]
        assert store.lengths(np.array([number]))[0] == len(expected) <= 16
        assert store.labels[store.label_codes[number]] == label
    assert sum(len(ids) for ids in store_tokens_of_threads(tokenizer)) == 4 * 50 * 8 * 16
    # A model folder's tokenizer.json must not depend on whether its run found its rows in the cache.
    store_of(rows_file, tokenizer, 8)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"] is None


def store_tokens_of_threads(tokenizer) -> list[int]:
    """Token ids of 1,600 long texts cut at 16 tokens by four threads, as in a server; a list per thread."""
    texts = ["goal " * 60] * 8

    def cut(_: int) -> list[int]:
        return [t for _ in range(50) for ids in token_ids(tokenizer, texts, 16)[0] for t in ids[0]]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(cut, range(4)))


def test_tokenised_once_and_found_by_content(
    rows_file: Path, tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store_of(rows_file, tokenizer)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(rows_file.read_bytes())
    monkeypatch.setattr(tokenize_module, "_write_store", lambda *_: pytest.fail("tokenised again"))
    assert store_of(copy, tokenizer).fingerprint == first.fingerprint
    assert [path.name for path in cache_folder().iterdir()] == [first.fingerprint]


def test_another_cut_or_tokenizer_is_another_store(
    rows_file: Path, tokenizer, tiny_model: Path
) -> None:
    other = load_tokenizer(str(tiny_model))
    other.add_tokens(["treaty2"])
    left = load_tokenizer(str(tiny_model))
    left.truncation_side = "left"
    assert store_of(rows_file, left, 8).fingerprint != store_of(rows_file, tokenizer, 8).fingerprint
    typeless = load_tokenizer(str(tiny_model))
    typeless.model_input_names = ["input_ids", "attention_mask"]  # no token types for pairs
    assert store_of(rows_file, typeless).fingerprint != store_of(rows_file, tokenizer).fingerprint
    prints = {
        store_of(rows_file, tok, cut).fingerprint for tok in (tokenizer, other) for cut in (8, 16)
    }
    assert len(prints) == 4
    bare = []  # without special tokens an empty text becomes the pad token
    for pad_token in ("[PAD]", "[UNK]"):
        bare.append(load_tokenizer(str(tiny_model)))
        bare[-1].backend_tokenizer.post_processor = TemplateProcessing(single="$A")
        bare[-1].pad_token = pad_token
    assert len({store_of(rows_file, tok).fingerprint for tok in bare}) == 2
    split = load_tokenizer(str(tiny_model))
    split.split_special_tokens = True  # a text's own "[SEP]" is no separator
    assert store_of(rows_file, split).fingerprint != store_of(rows_file, tokenizer).fingerprint


def test_same_bytes_read_otherwise_are_another_store(tmp_path: Path, tokenizer) -> None:
    """The same bytes, as csv and as tsv, have columns of the same names but different cells."""
    rows = "text\tlabel\tq,text,label\nA\tl1\tz,B,l2\nC\tl3\tz,D,l4\n"
    stores = []
    for name in ("rows.csv", "rows.tsv"):
        (tmp_path / name).write_text(rows)
        stores.append(store_of(tmp_path / name, tokenizer).labels)
    assert stores == [["l2", "l4"], ["l1", "l3"]]


def test_a_slow_tokenizer_is_known_by_its_files() -> None:
    """Its merges are not in its vocabulary: the fingerprint must cover the files it saves."""

    class Slow:
        truncation_side, model_input_names, init_kwargs = "right", ("input_ids",), {}
        merges = "a b"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

        def save_vocabulary(self, folder: str, filename_prefix: str | None) -> tuple[str, ...]:
            (Path(folder) / "merges.txt").write_text(self.merges)
            return (f"{folder}/merges.txt",)

    one, other = Slow(), Slow()
    other.init_kwargs = {"name_or_path": "elsewhere", "vocab_file": "elsewhere/vocab.txt"}
    other.init_kwargs |= {"local_files_only": True, "unk_token": None}  # as if loaded offline
    assert tokenize_module.tokenizer_fingerprint(one) == tokenize_module.tokenizer_fingerprint(
        other
    )
    other.merges = "b a"
    assert tokenize_module.tokenizer_fingerprint(one) != tokenize_module.tokenizer_fingerprint(
        other
    )


STORED = ["tokens.bin", "types.bin", "offsets.bin", "labels.bin", "texts.bin", "meta.json"]
DAMAGES = [(name, how) for name in STORED for how in ("cut", "missing")]


@pytest.mark.parametrize(("name", "how"), [*DAMAGES, ("meta.json", "[1]"), (".", "a file")])
def test_a_damaged_store_is_made_again(
    rows_file: Path, tokenizer, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by whole values, after which numpy would still map the file without an error."""
    config = DataConfig(max_seq_length=16, text_pair_column="label")  # pairs have token types

    def last_row() -> tuple[int, list[list[int]], str]:
        store = tokenize(file_source(rows_file), config, tokenizer)
        return len(store), store.tokens(46).tolist(), store.labels[store.label_codes[46]]

    sound = last_row()
    (folder,) = cache_folder().iterdir()
    assert {path.name for path in folder.iterdir()} == set(STORED)
    file = folder / name
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif how == "missing":
        file.unlink()
    elif how == "a file":
        shutil.rmtree(folder)
        folder.touch()
    else:
        file.write_text(how)
    assert last_row() == sound
    assert caplog.text.count("damaged token cache") == 1


def test_a_store_that_another_process_makes_meanwhile_is_not_thrown_away(
    rows_file: Path, tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is published after this process has looked for it: the store is not damaged, and must be kept."""
    source, config = file_source(rows_file), DataConfig(max_seq_length=16)
    inode = []

    def open_first(folder: Path, name: str) -> TokenStore:
        if inode:
            return TokenStore(folder, name)
        inode.append(0)  # from here on, the other process opens it
        try:
            return TokenStore(folder, name)
        except OSError:
            made = tokenize_module._make_store(folder, source, config, tokenizer)
            inode[0] = made.folder.stat().st_ino
            raise

    monkeypatch.setattr(tokenize_module, "TokenStore", open_first)
    store = tokenize(source, config, tokenizer)
    assert store.folder.stat().st_ino == inode[0]
    assert "damaged" not in caplog.text


def test_a_regressions_numbers_stand_in_the_rows_alone(tmp_path: Path, tokenizer) -> None:
    """meta.json, which each process reads, would be huge with as many distinct labels as rows."""
    rows = tmp_path / "rows.csv"
    values = [number / 7 for number in range(300)]
    rows.write_text("text,label\n" + "".join(f"a b,{value}\n" for value in values))
    splits = splits_of(tokenizer, "--train_file", str(rows), "--problem_type", "regression")
    folder = splits.train.store.folder
    assert (folder / "meta.json").stat().st_size < 500
    train, validation = splits.train, splits.validation
    places = [np.arange(len(split), dtype=np.int64) for split in (train, validation)]
    found = np.concatenate([train.labels(places[0]), validation.labels(places[1])])
    assert found.dtype == np.float32
    assert sorted(found) == sorted(np.array(values, np.float32))


@pytest.mark.parametrize(
    ("values", "told", "warned"),
    [
        ([0.5, 1.5, 2.5], "values: 0.5 to 2.5, mean 1.5, standard deviation 0.8", ""),
        ([3, 3, 3], "values: 3 to 3, mean 3", "every training row has the value 3: there is not"),
        ([2000, 2010, 2020], "values: 2000 to 2020, mean 2010", "the values are large: a new head"),
        ([-90, 0, 90], "values: -90 to 90, mean 0", "the values are large: a new head"),
    ],
)
def test_a_regressions_values_are_told(
    tmp_path: Path,
    tokenizer,
    caplog: pytest.LogCaptureFixture,
    values: list[float],
    told: str,
    warned: str,
) -> None:
    """A new head with outputs near 0 does not reach large values within a usual run."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"a b,{value}\n" for value in values))
    with caplog.at_level("INFO"):
        splits_of(
            tokenizer,
            *("--train_file", str(file), "--validation_file", str(file)),
            *("--problem_type", "regression"),
        )
    assert told in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = [words for words in warnings if "value" in words]
    assert len(found) == bool(warned)
    assert "".join(found).startswith(warned)
    caplog.clear()
    config = TrainConfig(train_file=file, validation_file=file, problem_type="regression")
    load_splits(config, tokenizer, ["LABEL_0"])  # a model whose head predicts values already
    assert "a new head" not in caplog.text


def test_a_cache_that_several_users_share(
    rows_file: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has the cache folder's permissions; an unreadable store does not count as damaged; what a killed process
    left behind is removed after a day.
    """  # fmt: skip
    cache_folder().mkdir(parents=True, exist_ok=True)
    cache_folder().chmod(0o755)
    for name, age in {"old": 2 * 24 * 3600, "new": 60}.items():
        left = cache_folder() / f".making-{name}"
        left.mkdir()
        os.utime(left, (time.time() - age,) * 2)
    folder = store_of(rows_file, tokenizer).folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in cache_folder().glob(".making-*")] == [".making-new"]

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(tokenize_module, "TokenStore", refuse)
    with pytest.raises(DataError, match=r"Permission denied.*Fix: HF_HOME=a folder of your own"):
        store_of(rows_file, tokenizer)
    assert folder.is_dir()


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the new rows would be cached under the hash of the old ones."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,x\nb,y\n")
    source = file_source(path)
    path.write_text("text,label\na,y\nb,x\n")
    with pytest.raises(DataError, match="changed while it was read"):
        tokenize(source, DataConfig(), tokenizer)
    assert not [p for p in cache_folder().glob("*") if p.stat().st_mtime > path.stat().st_mtime]


def test_the_greatest_token_is_counted(rows_file: Path, tokenizer) -> None:
    store = store_of(rows_file, tokenizer)
    assert store.greatest_id == max(int(store.tokens(row).max()) for row in range(len(store)))


def test_a_cache_on_a_disk_that_is_not_there(
    rows_file: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file/hf"))
    with pytest.raises(DataError, match=r"Not a directory.*HF_HOME=another folder"):
        store_of(rows_file, tokenizer)


def test_a_full_disk_leaves_nothing_in_the_cache(tmp_path: Path, tokenizer) -> None:
    """Even for a small file, the failing write itself must raise: numpy's tofile would hide the error."""
    source = file_source(write_rows(tmp_path / "rows.csv", 100))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(DataError, match=r"tokenised into .*tokens: .*File too large.*HF_HOME="):
            tokenize(source, DataConfig(), tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(tokenize(source, DataConfig(), tokenizer)) == 100


def test_a_fault_of_the_rows_disk_is_not_the_caches(
    rows_file: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error of the rows' own file is not reported as one of the cache."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error", str(rows_file))

    monkeypatch.setattr(tokenize_module, "_write_store", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store_of(rows_file, tokenizer)


def test_faulty_rows_leave_nothing_in_the_cache(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb\n")
    with pytest.raises(DataError, match="line 3"):
        store_of(path, tokenizer)
    assert list(cache_folder().iterdir()) == []


def test_store_travels_to_workers_as_a_path(rows_file: Path, tokenizer) -> None:
    store = store_of(rows_file, tokenizer)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert pickle.loads(data).tokens(5).tolist() == store.tokens(5).tolist()


def test_validation_is_cut_off_and_apart(tmp_path: Path, tokenizer) -> None:
    splits = splits_of(tokenizer, "--train_file", str(write_rows(tmp_path / "a.csv", 203)))
    ids = [split.ids(np.arange(len(split))) for split in (splits.train, splits.validation)]
    assert (len(ids[0]), len(ids[1])) == (183, 20)
    assert sorted(np.concatenate(ids)) == list(range(203))
    assert splits.label_names == ["Business", "Sci/Tech", "Sports", "World"]
    assert (
        len(set(splits.validation.labels(np.arange(20)))) > 2
    )  # drawn at random, whatever the order of the file


def test_limits_draw_the_same_rows_each_time(tmp_path: Path, tokenizer) -> None:
    words = ["--train_file", str(write_rows(tmp_path / "a.csv", 203)), "--max_train_samples", "50"]
    first = splits_of(tokenizer, *words, "--max_eval_samples", "7")
    again = splits_of(tokenizer, *words, "--seed", "3")
    assert (len(first.train), len(first.validation), len(again.validation)) == (50, 7, 20)
    assert np.array_equal(first.train.ids(np.arange(50)), again.train.ids(np.arange(50)))
    assert np.array_equal(first.validation.ids(np.arange(7)), again.validation.ids(np.arange(7)))
    assert not set(first.train.ids(np.arange(50))) & set(again.validation.ids(np.arange(20)))


def test_integer_labels_are_ordered_by_value(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"a,{label}\n" for label in (10, 9, "01", 1, 2)))
    assert splits_of(tokenizer, "--train_file", str(path)).label_names == [
        "01",
        "1",
        "2",
        "9",
        "10",
    ]


def test_labels_in_the_order_of_their_source(tmp_path: Path, tokenizer) -> None:
    def ordered(*labels: str, declared: tuple[str, ...] | None = None) -> list[str]:
        rows = [(f"row {n}", {"text": str(n), "label": label}) for n, label in enumerate(labels)]
        source = Source("x", f"{labels} {declared}", lambda: iter(rows), declared)
        return output_names(tokenize(source, DataConfig(), tokenizer), DataConfig())

    assert ordered("b", "a", "c") == ["a", "b", "c"]
    assert ordered("b", "a", "c", declared=("c", "b", "none", "a")) == ["c", "b", "a"]
    assert ordered("-1", "10", "2", "-2") == ["-2", "-1", "2", "10"]


def test_unknown_label_is_named_with_its_line(tmp_path: Path, rows_file: Path, tokenizer) -> None:
    path = tmp_path / "validation.csv"
    path.write_text("text,label\na,World\nb,Sport\n")
    words = "--train_file", str(rows_file), "--validation_file", str(path)
    with pytest.raises(
        DataError, match="line 3: label 'Sport' is none of these.* Did you mean `Sports`"
    ):
        splits_of(tokenizer, *words)


def test_one_class_only(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,x\nb,x\n")
    with pytest.raises(DataError, match="every row has the label 'x'"):
        splits_of(tokenizer, "--train_file", str(path))


def test_integer_labels_are_not_guessed(tmp_path: Path, tokenizer) -> None:
    """Names are in alphabetical order, a file's integers perhaps not: 0 may be World, not Business."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb,0\n")
    config = parse(TrainConfig, ["--train_file", str(path), "--test_file", str(path)], "train")
    with pytest.raises(DataError, match="label '1' is none of these"):
        load_eval_split(config, tokenizer, ["no", "yes"], None)
    name, split, _ = load_eval_split(config, tokenizer, ["0", "1"], None)
    assert (name, split.labels(np.arange(2)).tolist()) == ("test", [1, 0])
    with pytest.raises(ConfigError, match="the job names no test rows"):
        load_eval_split(config.resolved(test_file=None), tokenizer, ["0", "1"], "test")
    # Held out from the training rows: labels keep the model's ids, even if some do not occur.
    _, split, _ = load_eval_split(config, tokenizer, ["2", "1", "0"], "validation")
    assert split.targets.tolist() == [{"2": 0, "1": 1, "0": 2}[name] for name in split.store.labels]
    with pytest.raises(DataError, match="unknown labels. Allowed: 2, 3"):
        load_eval_split(config, tokenizer, ["2", "3"], "validation")


def told_of_decimals(tmp_path: Path, tokenizer) -> str:
    """The message about classes 0 and 1 that pandas has written as 0.0 and 1.0."""
    (tmp_path / "whole.csv").write_text("text,label\n" + "a,0\nb,1\n" * 9)
    (tmp_path / "decimal.csv").write_text("text,label\na,0.0\nb,1.0\n")
    paths = [str(tmp_path / f"{name}.csv") for name in ("whole", "decimal")]
    with pytest.raises(DataError, match="label '0.0' is none of these") as error:
        splits_of(tokenizer, "--train_file", paths[0], "--validation_file", paths[1])
    return str(error.value)


def test_numbers_taken_for_labels_are_told_at_once(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """problem_type was forgotten; similar labels are searched only for the labels that are shown."""
    paths = [tmp_path / f"{name}.csv" for name in ("train", "validation")]
    for shift, path in enumerate(paths):
        lines = [f"t,{(row + shift / 2) / 7919}" for row in range(1, 2000)]
        path.write_text("text,label\n" + "\n".join(lines))
    asked: list[str] = []
    monkeypatch.setattr(targets_module, "nearest", lambda label, _: asked.append(label) or "")
    with pytest.raises(
        DataError, match="Fix, if they are values to predict: --problem_type regression"
    ) as error:
        splits_of(tokenizer, "--train_file", str(paths[0]), "--validation_file", str(paths[1]))
    assert "... and 1989 more" in str(error.value)
    assert len(asked) == 10
    assert "regression" not in told_of_decimals(tmp_path, tokenizer)


def test_class_weights(tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="accel_ft")
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "a,x\n" * 6 + "b,y\n" * 2)
    split = whole(path, tokenizer)
    assert class_weights(None, split, ["x", "y"]) is None
    assert class_weights("balanced", split, ["x", "y"]).tolist() == [8 / 12, 8 / 4]
    assert class_weights("balanced", split, ["x", "y", "z"]).tolist() == [8 / 18, 8 / 6, 0]
    split.class_weights = class_weights((1.0, 3.0), split, ["x", "y"])
    assert split.weights(np.arange(8)).tolist() == [1] * 6 + [3] * 2
    assert "weights in the loss: x 1, y 3" in caplog.text
    assert collate(split, np.array([0, 7]), Padding(tokenizer, 64, CPU))["weights"].tolist() == [
        1,
        3,
    ]
    with pytest.raises(ConfigError, match="1 weight for 2 labels. Fix: one for each of: x, y"):
        class_weights((1.0,), split, ["x", "y"])


def whole(path: Path, tokenizer) -> Split:
    splits = splits_of(tokenizer, "--train_file", str(path), "--validation_file", str(path))
    return splits.train


def test_padding_and_filling(rows_file: Path, tokenizer) -> None:
    split = whole(rows_file, tokenizer)
    batch = collate(split, np.array([3, 9]), Padding(tokenizer, 64, torch.device("cuda")))
    lengths = split.lengths(np.array([3, 9]))
    assert batch["input_ids"].shape[1] % 8 == 0
    assert batch["attention_mask"].sum(1).tolist() == lengths.tolist()
    assert batch["input_ids"][:1, : lengths[0]].tolist() == split.tokens(np.array([3]))[0].tolist()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    assert (batch["weights"].tolist(), batch["places"].tolist()) == ([1, 1], [3, 9])
    filler = collate(split, np.array([], np.int64), Padding(tokenizer, 64, CPU))
    assert (filler["weights"].tolist(), filler["places"].tolist()) == ([0], [-1])
    # Not a row's text, whose loss might be NaN, nor a fully masked one, which might give NaN.
    assert filler["input_ids"].tolist() == [tokenizer("")["input_ids"] + [0] * 6]
    assert filler["attention_mask"].tolist() == [[1, 1] + [0] * 6]
    assert filler["labels"].tolist() == [0]


def test_widths(tokenizer) -> None:
    """No width exceeds the longest row: the model might not take it. None is below 8, unless the longest
    row is: models that pool neighbouring tokens fail on a few.
    """
    lengths = np.array([1, 7, 8, 9, 17, 33, 65, 99, 100])
    cuda = torch.device("cuda")
    for device, few, expected in (
        (CPU, False, [8, 8, 8, 10, 18, 36, 72, 100, 100]),
        (cuda, False, [8, 8, 8, 16, 24, 40, 72, 100, 100]),
        (cuda, True, [16, 16, 16, 16, 24, 48, 96, 100, 100]),
        (CPU, True, [16, 16, 16, 16, 24, 48, 96, 100, 100]),
    ):
        pad = Padding(tokenizer, 100, device, few)
        assert pad.widths(lengths).tolist() == expected
        assert pad([np.full((1, 9), 5)])["input_ids"].shape == (1, expected[3])
    widths = Padding(tokenizer, 512, cuda, few=True).widths(np.arange(1, 513))
    assert sorted(set(widths.tolist())) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert Padding(tokenizer, 2, cuda, few=True).widths(np.array([1, 2])).tolist() == [2, 2]


@pytest.mark.parametrize(("longest", "most"), [(64, 16), (512, 16), (1024, 8), (20_000, 1)])
def test_fewer_long_texts_are_evaluated_at_once(tokenizer, longest: int, most: int) -> None:
    """By default as many tokens as with texts of 512 each, but at least one text; a given batch size is kept."""
    pad, lengths = Padding(tokenizer, longest, CPU), np.full(40, longest)
    assert max(map(len, pad.eval_batches(lengths, None))) == most
    assert max(map(len, pad.eval_batches(lengths, 30))) == 30


def test_left_padding(rows_file: Path, tokenizer) -> None:
    pad = Padding(tokenizer, 64, CPU)
    pad.left = True
    rows = [np.array([[5, 6, 7, 9]]), np.array([[8]])]
    padding = [0] * 4
    assert pad(rows)["input_ids"].tolist() == [[*padding, 5, 6, 7, 9], [*padding, 0, 0, 0, 8]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_starts_anywhere_and_leaves_random_numbers_alone(
    rows_file: Path, tokenizer, num_workers: int
) -> None:
    split = whole(rows_file, tokenizer)
    plan = Plan(len(split), 8, 0, split.lengths)
    batches = Batches(split, Padding(tokenizer, 64, CPU), 24, partial(train_places, plan, 2))
    assert len(batches) == 24
    torch.manual_seed(1)
    before = torch.get_rng_state()
    read = [
        batch["places"].tolist()
        for batch in make_loader(make_accelerator(), batches, 5, num_workers)
    ]
    assert torch.equal(before, torch.get_rng_state())
    expected = [part.tolist() or [-1] for step in range(12) for part in plan.micro_batches(step, 2)]
    assert read == expected[5:]


def test_workers_beside_nccl_are_not_forked(rows_file: Path, tokenizer) -> None:
    """A fork copies locks that NCCL's threads may hold; spawned workers read the same batches."""
    split = whole(rows_file, tokenizer)
    plan = Plan(len(split), 8, 0, split.lengths)
    batches = Batches(split, Padding(tokenizer, 64, CPU), 4, partial(train_places, plan, 2))
    on_two_gpus = SimpleNamespace(
        device=torch.device("cuda"), num_processes=2, prepare_data_loader=lambda loader: loader
    )
    loader = make_loader(on_two_gpus, batches, 0, num_workers=1)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    loader.pin_memory = False  # there is no GPU to pin it for
    read = [batch["places"].tolist() for batch in loader]
    assert read == [part.tolist() for step in range(2) for part in plan.micro_batches(step, 2)]


def rows(path: Path, *texts: str) -> Path:
    lines = [json.dumps({"text": text, "label": f"l{i % 2}"}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("workers", "method", "started"), [(2, "spawn", 1), (2, "fork", 0), (0, "spawn", 0)]
)
def test_what_spawned_workers_need_is_started_before_signals_are_blocked(
    workers: int, method: str, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting multiprocessing's resource tracker unblocks SIGINT and SIGTERM; the program may also choose spawn."""
    starts: list[bool] = []

    class Loader:
        num_workers, multiprocessing_context = workers, None

        def __iter__(self) -> Any:
            yield from ("first", "second")

    monkeypatch.setattr(
        loader_module.resource_tracker, "ensure_running", lambda: starts.append(True)
    )
    monkeypatch.setattr(loader_module, "get_start_method", lambda: method)
    assert list(loader_module.read(Loader())) == ["first", "second"]
    assert len(starts) == started


def test_cut_texts_are_counted(tmp_path: Path, tokenizer) -> None:
    """A text of exactly 4 tokens is not cut; one of 5 is, and so is one of a million characters."""
    file = rows(tmp_path / "a.jsonl", "the a", "the a of", "the " * 250_000, "")
    store = tokenize(file_source(file), DataConfig(max_seq_length=4), tokenizer)
    assert (store.num_cut_texts, store.num_empty_texts) == (2, 1)
    assert store.lengths(np.arange(4)).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("texts", "is_told"), [(["the a", "我 是"], True), (["the a of 是"] * 2, False)]
)
def test_texts_that_the_tokenizer_does_not_know_are_told(
    texts: list[str], is_told: bool, tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = rows(tmp_path / "a.jsonl", *texts, *[text + " x" for text in texts])
    with caplog.at_level("WARNING"):
        load_splits(TrainConfig(train_file=file), tokenizer)
    told = "a.jsonl: 33 % of the tokens (first texts) are [UNK]: words the tokenizer does not know"
    assert (told in caplog.text) == ("does not know" in caplog.text) == is_told


def test_a_token_that_begins_each_text_is_known(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2 has one token for unknown, begin and end: it does not count as unknown."""
    its = copy.deepcopy(tokenizer)
    its.unk_token = its.cls_token
    with caplog.at_level("WARNING"):
        load_splits(TrainConfig(train_file=rows(tmp_path / "a.jsonl", *"abcd")), its)
    assert "does not know" not in caplog.text


def test_a_label_with_few_validation_rows_is_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Validation rows are held out at random: of a rare label they may have too few to choose a model by."""
    file = tmp_path / "a.jsonl"
    labels = ["spam" if number % 40 == 0 else "ham" for number in range(1200)]
    lines = [json.dumps({"text": f"the {n}", "label": label}) for n, label in enumerate(labels)]
    file.write_text("\n".join(lines))
    with caplog.at_level("WARNING"):
        splits = load_splits(TrainConfig(train_file=file), tokenizer)
    held_out = splits.validation.labels(np.arange(120))
    count = int((held_out == splits.label_names.index("spam")).sum())
    assert 0 < count < 10
    assert f"few validation rows, so with unreliable metrics: spam {count}" in caplog.text


def test_texts_shared_with_training_are_counted(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    train = rows(tmp_path / "train.jsonl", "the a", "of in", "to on", "with from")
    other = rows(tmp_path / "other.jsonl", "to on", "two new", "the a", "to on ")
    config = TrainConfig(train_file=train, validation_file=other, test_file=train)
    with caplog.at_level("WARNING"):
        load_splits(config, tokenizer)
    assert "2 of the 4 validation texts are training texts too" in caplog.text
    assert "4 of the 4 test texts are training texts too" in caplog.text
    assert "only 4 validation rows: an accuracy on them is uncertain by up to 0.49" in caplog.text


def test_exchanged_columns_are_refused(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """More than ten labels for each text; 49 rows are too few to tell, and half as many labels as rows are not strange."""
    file = tmp_path / "a.jsonl"

    def load(num_rows: int, num_labels: int, **columns: str) -> None:
        lines = [{"text": f"the {n}", "label": f"l{n % num_labels}"} for n in range(num_rows)]
        file.write_text("\n".join(map(json.dumps, lines)))
        load_splits(TrainConfig(train_file=file, **columns), tokenizer)

    exchanged = {"text_column": "label", "label_column": "text"}
    told = "label_column=text: 50 labels in 50 rows, but far fewer texts in text_column=label: 4"
    with pytest.raises(DataError, match=f"{told}. Fix: exchange"):
        load(50, 4, **exchanged)
    load(49, 4, **exchanged)
    load(50, 25)
    assert "fewer than two rows" not in caplog.text
    load(50, 5, **exchanged)  # ten labels for each text: a warning, as it could be meant
    assert "label_column=text: 50 labels in 50 rows, fewer than two rows for each" in caplog.text
    load(50, 26)
    assert "label_column=label: 26 labels in 50 rows, fewer than two rows for each" in caplog.text


def test_one_row_cannot_be_held_out(tmp_path: Path, tokenizer) -> None:
    file = tmp_path / "one.csv"
    file.write_text("text,label\nthe,0.5\n")
    with pytest.raises(DataError, match="one.csv: one row cannot be split. Fix: a validation_file"):
        load_splits(TrainConfig(train_file=file, problem_type="regression"), tokenizer)


def test_faults_of_a_file_that_is_given_twice(tmp_path: Path, tokenizer) -> None:
    """As validation and test rows: each fault is told once."""
    train, file = rows(tmp_path / "train.jsonl", "the a"), tmp_path / "faulty.csv"
    file.write_text("text,label\nthe,\n")
    with pytest.raises(DataError) as caught:
        load_splits(TrainConfig(train_file=train, validation_file=file, test_file=file), tokenizer)
    assert str(caught.value).count("line 2: label is empty") == 1


def test_labels_that_look_alike_are_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    labels = (
        "Sports",
        "sports ",
        "caf\u00e9",
        "cafe\u0301",
        "b",
        "b\u200b",
        "1",
        "1.0",
        "01",
        "v1",
        "v1.0",
    )
    lines = [json.dumps({"text": "the a", "label": label}) for label in labels]
    file.write_text("\n".join(lines))
    with caplog.at_level("WARNING"):
        load_splits(TrainConfig(train_file=file, validation_file=file), tokenizer)
    assert "'Sports' and 'sports '" in caplog.text
    assert "'b' and 'b\\u200b'" in caplog.text
    assert "'1' and '1.0'" in caplog.text
    assert caplog.text.count("count as two; are they meant") == 4
    assert (
        "'caf\u00e9' and 'cafe\u0301'" in caplog.text
        or "'cafe\u0301' and 'caf\u00e9'" in caplog.text
    )


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            "abcded",
            "training rows that repeat the text of another: 4; texts with different labels: 1",
        ),
        (
            "abbcaa",
            "training rows that repeat the text of another: 4; texts with different labels: 2",
        ),
        (
            "aaabab",
            "training rows that repeat the text of another: 4; texts with different labels: 0",
        ),
    ],
)
def test_texts_that_are_there_again_are_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture, labels: str, told: str
) -> None:
    texts = ("the a", "the a", "the a", "of in", "the a", "of in")
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": t, "label": x}) for t, x in zip(texts, labels, strict=True)]
    file.write_text("\n".join(lines))
    with caplog.at_level("INFO"):
        load_splits(TrainConfig(train_file=file, validation_file=file), tokenizer)
    (record,) = [each for each in caplog.records if "text of another" in each.message]
    assert record.message == told
    assert (record.levelname == "WARNING") is ("labels: 0" not in told)


def test_the_name_of_a_column_of_numbers_is_no_label(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,1.5\nthe a,2\nof in,3\n")
    config = TrainConfig(train_file=file, validation_file=file, label_column="1.5")
    with caplog.at_level("WARNING"):
        assert load_splits(config.resolved(problem_type="regression"), tokenizer)
    assert "the labels are numbers" not in caplog.text


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["a|b", "b", "c|a"], "no row has more than one label, with label_separator ','. Fix, if 'a|b' means several: --label_separator '|'"),
        (["a", "b", "c"], "no row has more than one label, with label_separator ','"),
        (["a,b", "b", "c"], None),
    ],
)  # fmt: skip
def test_a_separator_that_was_left_out_is_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture, labels: list[str], told: str | None
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "".join(f'the a,"{label}"\n' for label in labels))
    config = TrainConfig(
        train_file=file, validation_file=file, problem_type="multi_label_classification"
    )
    with caplog.at_level("WARNING"):
        load_splits(config, tokenizer)
    found = [text for text in caplog.messages if text.startswith("no row has more")]
    assert found == ([] if told is None else [told])


def test_rows_of_several_labels_are_counted(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "the a,a;b\n" * 3 + "the a,b\n" * 2 + "the a,c;a\n")
    config = TrainConfig(
        train_file=file, validation_file=file, label_separator=";",
        problem_type="multi_label_classification",
    )  # fmt: skip
    with caplog.at_level("INFO"):
        load_splits(config, tokenizer)
    assert "3 labels, rarest first: c 1; a 4; b 5" in caplog.text


@pytest.mark.parametrize(("labels", "is_told"), [("1.0 2.0 3.0", True), ("1.0 2 3", False)])
def test_integers_that_pandas_made_fractions_of_are_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture, labels: str, is_told: bool
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "".join(f"the a,{label}\n" for label in labels.split()))
    with caplog.at_level("WARNING"):
        load_splits(TrainConfig(train_file=file, validation_file=file), tokenizer)
    assert ("integers written as floats (1.0, ...)" in caplog.text) == is_told


@pytest.mark.parametrize("pairs", [False, True])
def test_long_texts_are_tokenised_some_at_a_time(
    tokenizer, monkeypatch: pytest.MonkeyPatch, pairs: bool
) -> None:
    texts: list[Any] = ["the a " * (7 * n % 11) for n in range(40)]
    if pairs:
        texts = [(text, "a the") for text in texts]
    whole, num_cut = token_ids(tokenizer, texts, 8)
    sizes, encode = [], tokenize_module._encode

    def watched(tokenizer: Any, some: list[Any], limit: int) -> Any:
        sizes.append(len(some))
        return encode(tokenizer, some, limit)

    monkeypatch.setattr(tokenize_module, "CHARACTERS_AT_ONCE", 100)
    monkeypatch.setattr(tokenize_module, "_encode", watched)
    parts, num_cut_in_parts = token_ids(tokenizer, texts, 8)
    assert num_cut_in_parts == num_cut > 0
    assert [row.tolist() for row in parts] == [row.tolist() for row in whole]
    assert sum(sizes) == 40
    assert max(sizes) < 10 < len(sizes)


@pytest.mark.parametrize("count", [4, 30])
def test_each_labels_rows_are_told_rarest_first(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture, count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The counts reveal a label that is mistyped in one row: it becomes a class of its own."""
    file = tmp_path / "a.jsonl"
    labels = [f"label{number:02d}" for number in range(count)] * 2 + ["label00", "typo"]
    file.write_text("\n".join(json.dumps({"text": "the a", "label": name}) for name in labels))
    with caplog.at_level("INFO"):
        load_splits(TrainConfig(train_file=file, validation_file=file), tokenizer)
    with caplog.at_level("INFO"), monkeypatch.context() as patch:
        patch.setattr("accel_ft.data.splits.COMPARED_TEXTS", 6)
        load_splits(TrainConfig(train_file=file, validation_file=file), tokenizer)
    assert f"{count + 1} labels, rarest first of a million rows: " in caplog.text
    assert "without a training row" not in caplog.text  # a sample may miss some labels
    told = f"{count + 1} labels, rarest first: typo 1; label01 2; label02 2; label03 2; label"
    assert told in caplog.text
    assert ("label00 3\n" if count == 4 else "label19 2; and 11 more\n") in caplog.text


def test_a_label_that_no_training_row_has_is_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """All rows of a rare label may be held out; class weights cannot make up for that."""
    file = tmp_path / "a.jsonl"
    rows = [{"text": f"the {number}", "label": "a" if number else "b"} for number in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)))
    splits = {}
    for count in range(1, 9):
        with caplog.at_level("WARNING"):
            config = TrainConfig(train_file=file, validation_file=file, max_train_samples=count)
            caplog.clear()
            splits = load_splits(config, tokenizer)
        missing = {"ab"[number] for number in (0, 1)}
        missing -= {"ab"[number] for number in splits.train.label_ids()}
        told = [
            f"labels without a training row, which cannot be learnt: {name}" for name in missing
        ]
        assert [m for m in caplog.messages if "without a training row" in m] == told
    assert not missing  # none is missing from all 8 rows


def test_an_end_token_among_the_pieces_of_a_text() -> None:
    """T5's vocabulary has </s> (texts may hold <s>10</s>, struck through), and its head needs exactly one per row."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "a", "b", "<", "s", ">", "/"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces[:]], unk_id=2))
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        split_special_tokens=True,
    )  # fmt: skip
    assert tokenizer("a</s>b")["input_ids"] == [3, 1, 4, 1]
    arrays, _ = token_ids(tokenizer, ["a</s>b", "ab", ""], 16)
    assert [ids.tolist() for ids in arrays] == [[[3, 4, 1]], [[3, 4, 1]], [[1]]]
    arrays, _ = token_ids(tokenizer, [("a</s>", "b"), ("a", "</s>")], 16)
    assert [ids.tolist() for ids in arrays] == [[[3, 1, 4, 1]], [[3, 1, 1]]]
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    bare = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        split_special_tokens=True,
    )  # fmt: skip
    assert [ids.tolist() for ids in token_ids(bare, ["</s>"], 16)[0]] == [[[0]]]  # the pad token


def test_several_labels_rows_are_told(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"text": "the a", "label": names} for names in (["a", "b"], ["b"], [])]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = TrainConfig(
        train_file=file, validation_file=file, problem_type="multi_label_classification"
    )
    with caplog.at_level("INFO"):
        load_splits(config, tokenizer)
    assert "2 labels, rarest first: a 1; b 2\n" in caplog.text


def test_predictions_name_the_rows_of_the_data_set(tmp_path: Path, tokenizer) -> None:
    """Rows without a label are skipped, but still counted: row numbers join with the data set's rows."""
    import datasets

    texts = [f"{number} treaty" for number in range(60)]
    columns = {"text": texts, "label": [("a", "b", None)[number % 3] for number in range(60)]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "data/train.parquet")
    config = parse(TrainConfig, ["--dataset_name", str(tmp_path / "data")], "train")
    splits = load_splits(config, tokenizer)
    logits = np.tile(np.float32([0, 1]), (len(splits.train), 1))
    logits[:, 1] += np.arange(len(logits)) / 100
    write_predictions(tmp_path, splits, {"train": logits}, None)
    write_mistakes(tmp_path, config, splits, "train", logits, None)
    with np.load(tmp_path / "predictions.npz") as saved:
        labels = [splits.label_names[label] for label in saved["labels"]]
        assert labels == [columns["label"][row] for row in saved["rows"]]
    lines = (tmp_path / "mistakes.jsonl").read_text().splitlines()
    mistakes = [json.loads(line) for line in lines]
    confidence = [each["confidence"] for each in mistakes]
    assert confidence == sorted(set(confidence), reverse=True) != []
    assert all(each["text"] == texts[each["row"]] for each in mistakes)


def test_a_damaged_store_of_another_user(
    rows_file: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared cache where only its owner may remove a folder."""
    (store_of(rows_file, tokenizer).folder / "tokens.bin").unlink()
    monkeypatch.setattr(tokenize_module.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(DataError, match="damaged token cache.*Fix: have its owner remove it"):
        store_of(rows_file, tokenizer)
