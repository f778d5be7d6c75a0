import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from accel_ft.config import DataConfig, TrainConfig
from accel_ft.data.sources import (
    Source,
    check_first_rows,
    file_source,
    hub_sources,
    read_records,
    used_columns,
)
from accel_ft.errors import ConfigError, DataError


def rows(path: Path) -> list[tuple[str, str, str]]:
    return list(file_source(path).rows(DataConfig()))


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fault(folder: Path, name: str, content: str | bytes) -> str:
    with pytest.raises(DataError) as caught:
        rows(write(folder, name, content))
    return str(caught.value)


def test_cells_stay_what_they_are(tmp_path: Path) -> None:
    cells = ["NA", "null", "None", "nan", "", " x ", 'say "hi"', "two\nlines", "1.0", "é"]
    quoted = "".join(
        '"{}",{}\n'.format(cell.replace('"', '""'), "01" if i % 2 else "1")
        for i, cell in enumerate(cells)
    )
    read = rows(write(tmp_path, "rows.csv", "text,label\n" + quoted))
    assert [text for _, text, _ in read] == cells
    assert [label for _, _, label in read] == ["1", "01"] * 5
    assert [place for place, _, _ in read][7:9] == [
        "line 9",
        "line 11",
    ]  # the text before it has two lines


def test_every_format_reads_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    objects = [
        {"text": "a, b", "label": 0, "more": None},
        {"text": "c\td", "label": 1, "more": None},
    ]
    pq.write_table(pa.Table.from_pylist(objects), tmp_path / "rows.parquet")
    files = [
        write(tmp_path, "rows.csv", '\ufefftext,label\r\n"a, b",0\r\n\r\nc\td,1\r\n'),
        write(tmp_path, "two.csv", '\ufeff\ufefftext,label,,\n"a, b",0,,\nc\td,1,,x\n'),
        write(tmp_path, "rows.tsv", 'text\tlabel\na, b\t0\n"c\td"\t1\n'),
        write(tmp_path, "rows.jsonl", "\n\n".join(map(json.dumps, objects))),
        write(tmp_path, "rows.json", json.dumps(objects)),
        write(tmp_path, "data.json", json.dumps({"version": 1, "data": objects})),
        tmp_path / "rows.parquet",
    ]
    for file in files:
        assert [row[1:] for row in rows(file)] == [("a, b", "0"), ("c\td", "1")], file


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "", "a.csv: is empty"),
        ("a.csv", "text,label\n", "a.csv: has no rows"),
        ("a.csv", "text,label\nx,1\ny,1,2\nz\n", "2 faulty rows. Fix or remove:\n  line 3: 3 fields, where the header has 2\n  line 4: 1 field"),
        ("a.csv", 'text,label\nx,1\n"y,1\nz,2\n', "line 3: the row that starts here: .*; close or double its quotes"),
        ("a.csv", "text,label\nx,\n", "line 2: label is empty$"),
        ("a.csv", "text,label\nx, \ny,\u00a0\n", "line 2: label is empty\n  line 3: label is empty$"),
        ("a.csv", "text,text\nx,1\n", "column 'text' occurs twice"),
        ("a.csv", b"\x1f\x8b\x08\0", r"a.csv: is compressed \(gzip\). Fix: unpack it"),
        ("a.csv", b"text,label\n\x28\xb5\x2f\xfd,1\n", r"line 2: byte 2 \(0xb5\) is not UTF-8"),
        ("a.csv", b"\x28\xb5\x2f\xfd\0", r"a.csv: is compressed \(zstd\)"),
        ("a.csv", b"PK\x03\x04\0", r"a.csv: is compressed \(zip, as Excel's\)"),
        ("a.csv", "text,label\n".encode("utf-16-le"), "a NUL character. Fix: .* as UTF-8 if it is UTF-16"),
        ("a.csv", b"\xef\xbb\xbf\xff,label\n", r"line 1: byte 4 \(0xff\) is not UTF-8"),
        ("a.csv", "x" * 50_000 + ",label\nx,1\n", "no such column in .* Allowed: x{37}..., label$"),
        ("a.csv", ",".join(f"n{n}" for n in range(99)) + "\n" + "," * 98 + "\n", "n39, and 59 more\n"),
        ("a.jsonl", '{"text": "x"}\n{"text": "x", "label": 1}', "label_column=label: no such column in .*a.jsonl, line 1. "),
        ("a.csv", b"text,label\nx,1\ncaf\xe9,1\n", r"line 3: byte 4 \(0xe9\) is not UTF-8"),
        ("a.csv", b"text,label\nx\0y,1\n", "line 2: holds a NUL"),
        ("a.csv", "text,label\n".encode("utf-16"), "line 1: byte 1 .* is not UTF-8"),
        ("a.csv", "txt,lable\nx,1\n", "text_column=text: no such column in .*a.csv. Did you mean `txt`.*\n.*label_column=label: .*`lable`"),
        ("a.csv", "Text;Label\nx;1\n", "the header is one column with ';': separate a csv by commas"),
        ("a.csv", '"text";"label"\n"x";1\n', "line 1: the header is one column with ';'"),
        ("a.csv", '"a,b";"label"\n"x";1\n', "line 1: the header is one column with ';'"),
        ("a.tsv", '"text","label"\n"x",1\n', "line 1: the header is one column with ','"),
        ("a.csv", '"text|a\nx\n', "line 1: the row that starts here: unexpected end of data"),
        ("a.csv", '"text","label"x\n', "line 1: the row that starts here: ',' expected after"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": 3}\n[1]\n{', "line 3: is \\[1\\], not an object"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": null, "label": 1}\n', "line 2: text is missing, not a text"),
        ("a.jsonl", '{"text": "x", "label": 1.5}\n', "line 1: label is 1.5, not a text or an integer. Fix: .*--problem_type regression$"),
        ("a.jsonl", '{"text": "x", "label": true}\n', "line 1: label is true, .* Fix: cast it to an integer or a text$"),
        ("a.jsonl", '{"text": "a \\ud83d b", "label": 1}\n', "line 1: text has an unpaired surrogate"),
        ("a.json", '{"text": "x"}', "Allowed: a list of objects"),
        ("a.json", "[1]", "item 1: is 1, not an object"),
        ("a.json", "[", "is not JSON .* jsonl"),
        ("a.json", " ", "is empty"),
        ("a.parquet", "no", "cannot be read as parquet"),
    ],
)  # fmt: skip
def test_faults_name_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    import re

    message = fault(tmp_path, name, content)
    assert re.search(words, message, re.DOTALL), message


def test_missing_columns_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    files = {
        f"{kind}_file": write(tmp_path, f"{kind}.csv", "txt,label\nx,1\n" + "y\n" * 9)
        for kind in ("train", "validation", "test")
    }
    with pytest.raises(DataError) as error:
        check_first_rows(DataConfig(**files))
    assert str(error.value).count("text_column=text: no such column in") == 3
    files["train_file"].write_bytes("text,label".encode("utf-16"))
    with pytest.raises(DataError, match="not UTF-8(.|\n)*no such column(.|\n)*no such column"):
        check_first_rows(DataConfig(**files))
    files["train_file"].write_text("txt,label\nx,1\n")
    check_first_rows(DataConfig(**files, text_column="txt"))


def test_faults_of_every_kind_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": 1, "label": "a"}\n{"text"\n[]\n{"text": "x", "label": ""}\n')
    with pytest.raises(DataError) as error:
        list(file_source(file).rows(DataConfig()))
    for line in (1, 2, 3, 4):
        assert f"line {line}: " in str(error.value)


def test_rows_after_a_broken_one_are_read_too(tmp_path: Path) -> None:
    message = fault(tmp_path, "a.csv", 'text,label\n"a" b,1\nx\nc,1\ny,2,3\n')
    assert "line 2: the row that starts here: " in message
    assert "line 3: 1 fields" in message
    assert "line 5: 3 fields" in message
    message = fault(tmp_path, "b.csv", b"text,label\nx\na\0,1\n")  # reading stops at a NUL
    assert "line 2: 1 fields" in message
    assert "line 3: holds a NUL" in message
    message = fault(tmp_path, "c.csv", "text,label\na\rb,1\n")
    assert "line 2: the row that starts here: new-line character seen" in message
    assert "or save the file with LF line ends" in message
    assert "line 1: the row that starts here: " in fault(tmp_path, "d.csv", "text,label\rx,1\r")
    message = fault(tmp_path, "e.tsv", 'text\tlabel\n"a\t0\nb\t1\nc"\t1\n')
    assert "one quoted field spans lines 2 to 4" in message
    assert "line 1: is not JSON" in fault(tmp_path, "f.jsonl", '{"text": ' + "1" * 5000 + "}\n")


def test_faults_of_two_files_come_together(tmp_path: Path, tiny_model: Path) -> None:
    from accel_ft.data.splits import load_splits
    from accel_ft.model.load import load_tokenizer

    files = {
        f"{kind}_file": write(tmp_path, f"{kind}.csv", f"text,label\n{kind}\nb,1\n")
        for kind in ("train", "test")
    }
    with pytest.raises(DataError, match=r"train.csv: 1 faulty(.|\n)*test.csv: 1 faulty"):
        load_splits(TrainConfig(**files), load_tokenizer(str(tiny_model)))


def test_parquet_that_python_cannot_hold(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    far = pa.array([2**62], pa.timestamp("us"))
    texts = pa.array(["a"])
    pq.write_table(pa.table({"text": texts, "label": texts, "at": far}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        rows(tmp_path / "a.parquet")
    found = file_source(tmp_path / "a.parquet", used_columns(DataConfig()))  # as a job reads
    assert list(found.rows(DataConfig())) == [("row 1", "a", "a")]
    config = DataConfig(text_column="txt", label_column="lab")
    with pytest.raises(DataError, match=r"Did you mean `text`\? Allowed: text, label, at"):
        list(file_source(tmp_path / "a.parquet", used_columns(config)).rows(config))
    table = pa.Table.from_arrays([texts] * 3, names=["text", "label", "text"])
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(DataError, match="column 'text' occurs twice"):
        rows(tmp_path / "b.parquet")


def test_half_a_character_in_a_label(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y\\udc00"}\n')
    with pytest.raises(DataError, match="line 2: label is "):
        list(file_source(path).rows(DataConfig()))


def test_another_delimiter_is_the_one_cause(tmp_path: Path) -> None:
    """It is reported once, not as a fault of every row with commas in it."""
    path = tmp_path / "a.csv"
    path.write_text("text;label\na, b;x\nc, d, e;y\n")
    with pytest.raises(DataError) as caught:
        list(file_source(path).rows(DataConfig()))
    assert str(caught.value).endswith(
        "the header is one column with ';': separate a csv by commas, a tsv by tabs"
    )
    assert "faulty" not in str(caught.value)


def test_a_header_of_one_column_is_not_taken_for_a_mistyped_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text;label\na;x\n")
    with pytest.raises(DataError) as caught:
        check_first_rows(DataConfig(train_file=path))
    hint = "the header is one column with ';': separate a csv by commas, a tsv by tabs"
    assert str(caught.value) == f"{path}: {hint}"


def test_semicolons_are_told_before_the_quotes_that_they_hide(tmp_path: Path) -> None:
    content = 'text;label\n"a, b";x\n'
    message = fault(tmp_path, "a.csv", content)
    assert "line 2: the header is one column with ';'" in message
    assert "quotes" not in message


@pytest.mark.parametrize("header", ["my text", "text | title", '"text; or a part"', "text?;"])
def test_one_column_alone(tmp_path: Path, header: str) -> None:
    """Its name may contain any character: no other column is missing."""
    path = write(tmp_path, "a.csv", f"{header}\na goal\n")
    assert list(read_records(str(path), "csv")) == [("line 2", {header.strip('"'): "a goal"})]


def test_one_data_set_from_save_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a"], "label": ["x"]}).save_to_disk(tmp_path / "one")
    config = DataConfig(dataset_name=str(tmp_path / "one"))
    found = hub_sources(config, str(config.dataset_name))
    assert list(found) == ["train"]
    assert list(found["train"].rows(config)) == [("row 0", "a", "x")]


def test_what_save_to_disk_left_is_what_it_saved(tmp_path: Path) -> None:
    """Its splits may have any names; `map` caches and shards of an earlier save beside it are ignored."""
    import datasets

    def rows(*texts: str) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": texts, "label": ["x"] * len(texts)})

    splits = {"train": rows("a", "b", "c", "d"), "train_old": rows("e"), "holdout": rows("f")}
    folder = tmp_path / "saved"
    datasets.DatasetDict(splits).save_to_disk(
        folder, num_shards=dict.fromkeys(splits, 1) | {"train": 3}
    )
    splits["train"] = rows("g", "h")
    datasets.DatasetDict(splits).save_to_disk(folder)
    datasets.load_from_disk(folder).map(lambda row: {"text": row["text"] * 2})
    assert len(list(folder.glob("train/*.arrow"))) > 2  # stale shards, and a cache
    config = DataConfig(dataset_name=str(folder), test_split_name="holdout")
    found = hub_sources(config, str(folder))
    texts = {name: [text for _, text, _ in each.rows(config)] for name, each in found.items()}
    assert texts == {"train": ["g", "h"], "test": ["f"]}


def test_a_data_set_is_known_by_its_content(tmp_path: Path) -> None:
    """Not by the fingerprint of `datasets`: that hashes the code, which may have read other files since."""
    import datasets
    import pyarrow as pa

    def fingerprint(name: str, *texts: str, shards: int = 1, extra: int = 0) -> str:
        columns = {"text": texts, "label": ["x"] * len(texts), "extra": [extra] * len(texts)}
        rows = datasets.Dataset.from_dict(columns)
        rows._fingerprint = "of_the_code"
        rows.save_to_disk(tmp_path / name, num_shards=shards)
        source = hub_sources(DataConfig(), str(tmp_path / name))["train"]
        assert len(source.fingerprint) == 64
        return source.fingerprint

    def hashed(column: pa.Array, saves: bool = False, format: str | None = None) -> str:
        rows = datasets.Dataset(pa.table({"text": ["a", "b", "c", "d"], "label": column}))
        rows = rows.select(range(1, 3)) if saves else rows.select([1, 2]).flatten_indices()
        rows.with_format(format).save_to_disk(tmp_path / "twin")
        source = hub_sources(DataConfig(), str(tmp_path / "twin"))["train"]
        assert list(source.rows(DataConfig())) == [("row 1", "c", "7")]
        return source.fingerprint

    hidden = pa.Array.from_buffers(
        pa.int64(), 4, [pa.py_buffer(b"\x0d"), pa.py_buffer(np.array([9, 8, 7, 6]).tobytes())]
    )  # the second value, 8, is null
    assert hidden.to_pylist() == [9, None, 7, 6]
    alike = {
        hashed(pa.array([9, None, 7, 6])), hashed(hidden), hashed(hidden, saves=True),
        hashed(hidden, format="numpy"), hashed(hidden, format="torch"),
    }  # fmt: skip
    assert len(alike) == 1
    first = fingerprint("first", "a", "b", "c")
    assert fingerprint("elsewhere", "a", "b", "c", shards=2, extra=1) == first
    assert fingerprint("other", "a", "b", "d") != first
    assert fingerprint("fewer", "a", "b") != first


def test_numbers_whose_squares_fit(tmp_path: Path) -> None:
    path, config = tmp_path / "a.csv", DataConfig(problem_type="regression")
    path.write_text("text,label\na,9e17\n")
    assert len(list(file_source(path).rows(config))) == 1
    path.write_text("text,label\na,1e19\n")
    with pytest.raises(DataError, match="not a finite number below 1e18"):
        list(file_source(path).rows(config))


@pytest.mark.parametrize(
    ("problem_type", "label", "fix"),
    [
        (
            "single_label_classification",
            '["x"]',
            "an integer. Fix: --problem_type multi_label_class",
        ),
        ("regression", '"x"', "below 1e18. Fix: for names --problem_type single_label_class"),
        ("regression", '["x"]', "below 1e18. Fix: --problem_type multi_label_classification"),
        ("multi_label_classification", "[0, 1, 0]", "a list of different labels .*, not a 0 or 1"),
        ("multi_label_classification", '["x", "x"]', "a list of different labels"),
        ("multi_label_classification", "\"['x', 'y']\"", "not a list written as text"),
    ],
)
def test_labels_of_another_kind_are_explained_once(
    tmp_path: Path, problem_type: str, label: str, fix: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x", "label": {label}}}\n' * 12)
    with pytest.raises(DataError) as caught:
        list(file_source(path).rows(DataConfig(problem_type=problem_type)))
    first, *others = str(caught.value).splitlines()[1:]
    assert re.search(fix, first)
    assert others == [f"  line {number}: label is {label}" for number in range(2, 11)]


def test_after_a_fault_no_row_is_yielded(tmp_path: Path) -> None:
    """Later rows would be tokenised for nothing."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "a,x\n" + "b\n" + "c,x\n" * 5)
    rows = file_source(file).rows(TrainConfig(train_file=file))
    assert next(rows)[1] == "a"
    with pytest.raises(DataError, match="1 faulty row. "):
        next(rows)


def test_rows_of_one_column_that_quotes_join(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text('text\n"a\nb"\nc\n')
    (_, joined), (_, well) = read_records(str(file), "tsv")
    assert "one quoted field spans lines 2 to 3" in joined
    assert well == {"text": "c"}


def test_many_faults_are_counted(tmp_path: Path) -> None:
    assert ": 9 faulty rows. " in fault(tmp_path, "a.csv", "text,label\n" + "x\n" * 9)
    message = fault(tmp_path, "b.csv", "text,label\n" + "x\n" * 15)
    assert ": 10 or more faulty rows. " in message
    assert "line 11: " in message
    assert "line 12: " not in message


def test_long_texts_are_read(tmp_path: Path) -> None:
    long = "word " * 300_000
    assert rows(write(tmp_path, "a.csv", f"text,label\n{long},1\n")) == [("line 2", long, "1")]


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, same = (
        file_source(write(tmp_path, name, "text,label\nx,1\n")) for name in ("a.csv", "b.csv")
    )
    other = file_source(write(tmp_path, "c.csv", "text,label\nx,2\n"))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_declared_names_of_integer_labels() -> None:
    source = Source("x", "x", lambda: iter([("row 0", {"text": "a", "label": 1})]), ("no", "yes"))
    assert list(source.rows(DataConfig())) == [("row 0", "a", "yes")]


def test_plain_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\r\n\nthree")
    assert list(read_records(str(path), "lines")) == [
        ("line 1", {"text": "one"}),
        ("line 2", {"text": ""}),
        ("line 3", {"text": "three"}),
    ]


def test_a_dataset_folder_with_named_labels(tmp_path: Path) -> None:
    """`datasets` reads a local folder by the same code as the Hub, without the network."""
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    (tmp_path / "data").mkdir()
    labels = {"train": [-1, 1, -1], "validation": [-1, -1, -1], "test": [0, 0, 0]}  # -1: withheld
    for split, each in labels.items():
        rows = datasets.Dataset.from_dict(
            {"text": ["x", "a", "y"], "label": each}, features=features
        )
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    of_test = DataConfig(dataset_name="x", validation_split_name="test")  # not for test too
    assert list(hub_sources(of_test, str(tmp_path / "data"))) == ["train", "validation"]
    sources = hub_sources(DataConfig(), str(tmp_path / "data"))
    assert list(sources) == ["train", "test"]
    assert list(sources["train"].rows(DataConfig())) == [("row 1", "a", "yes")]
    assert [row[1:] for row in sources["test"].rows(DataConfig())] == [
        ("x", "no"),
        ("a", "no"),
        ("y", "no"),
    ]
    rows.map(lambda row: {"label": -1}).to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ConfigError, match="has no split `train` with labels"):
        hub_sources(DataConfig(), str(tmp_path / "data"))
    assert list(hub_sources(DataConfig(), str(tmp_path / "data"), needs_train=False)) == ["test"]


def test_named_numbers_of_a_regression(tmp_path: Path) -> None:
    """The label of a class named "3" is the number 3.0, not the class's index."""
    import datasets

    def numbers(*names: str) -> list[str]:
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
        )
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 2]}, features)
        rows.to_parquet(tmp_path / names[0] / "train.parquet")
        config = DataConfig(problem_type="regression")
        source = hub_sources(config, str(tmp_path / names[0]))["train"]
        return [label for *_, label in source.rows(config)]

    assert numbers("1", "2", "3") == ["1.0", "3.0"]
    assert numbers("0.5", "1", "1.5") == ["0.5", "1.5"]
    with pytest.raises(DataError, match="label is 0, not a finite number"):
        numbers("bad", "fair", "good")


@pytest.mark.parametrize("kind", ["names", "int64", "float64", "lists"])
def test_rows_without_a_label_keep_the_numbers_of_the_others(tmp_path: Path, kind: str) -> None:
    """Null is no label, whatever the column's type; rows are numbered as in the data set, counting those without one."""
    import datasets

    names = datasets.ClassLabel(names=["no", "yes"])
    feature = {"names": names, "lists": [names]}.get(kind) or datasets.Value(kind)
    features = datasets.Features({"text": datasets.Value("string"), "label": feature})
    labels = [None, [1] if kind == "lists" else 1, None, [0] if kind == "lists" else 0]
    rows = datasets.Dataset.from_dict({"text": list("abcd"), "label": labels}, features)
    rows.to_parquet(tmp_path / "data/train.parquet")
    tasks = {"lists": "multi_label_classification", "float64": "regression"}
    config = DataConfig(problem_type=tasks.get(kind, "single_label_classification"))
    source = hub_sources(config, str(tmp_path / "data"))["train"]
    assert [row[:2] for row in source.rows(config)] == [("row 1", "b"), ("row 3", "d")]
    assert source.row_numbers(np.array([1, 0])).tolist() == [3, 1]


def test_only_the_columns_in_use_are_read(tmp_path: Path) -> None:
    """An audio column needs a decoder package; a job that reads only the transcription does not."""
    import datasets
    import pyarrow.parquet

    features = datasets.Features(
        {"audio": datasets.Audio(), **{n: datasets.Value("string") for n in ("text", "label")}}
    )
    columns = {
        "audio": [{"bytes": b"", "path": "a.wav"}] * 2,
        "text": ["a", "b"],
        "label": ["x", "y"],
    }
    (tmp_path / "data").mkdir()
    table = pyarrow.table(columns, schema=features.arrow_schema)
    pyarrow.parquet.write_table(table, tmp_path / "data/train.parquet")
    source = hub_sources(DataConfig(), str(tmp_path / "data"))["train"]
    assert [row[1:] for row in source.rows(DataConfig())] == [("a", "x"), ("b", "y")]
    other = DataConfig(text_column="txt")
    source = hub_sources(other, str(tmp_path / "data"))["train"]
    with pytest.raises(DataError, match="txt: no such column.*Allowed: audio, text, label"):
        list(source.rows(other))


def test_cells_of_several_kinds_in_a_data_set(tmp_path: Path) -> None:
    """`datasets` stores such a column as JSON text and decodes it."""
    if not hasattr(pytest.importorskip("datasets"), "Json"):
        pytest.skip("this version of datasets refuses them")
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": "two"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = hub_sources(DataConfig(), str(tmp_path))["train"]
    assert [label for _, _, label in source.rows(DataConfig())] == ["1", "two"]


# pandas before 3 leaves the file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_csv_that_datasets_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = tmp_path / "data/train.csv"
    rows.parent.mkdir()
    rows.write_text("text,label\na,None\nb,x\n")
    hub_sources(DataConfig(), str(rows.parent))
    assert "1 of its 2 train rows have no label" in caplog.text
    with pytest.raises(ConfigError, match=r"is a file. Fix: --train_file .*train\.csv"):
        hub_sources(DataConfig(), str(rows))


def test_text_labels_that_are_kept_back(tmp_path: Path) -> None:
    import datasets

    for split, labels in {"train": ["no", None, "yes"], "test": [None, None, None]}.items():
        features = datasets.Features({n: datasets.Value("string") for n in ("text", "label")})
        rows = datasets.Dataset.from_dict({"text": ["x", "a", "y"], "label": labels}, features)
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    sources = hub_sources(DataConfig(), str(tmp_path / "data"))
    found = [(text, label) for _, text, label in sources["train"].rows(DataConfig())]
    assert found == [("x", "no"), ("y", "yes")]
    assert list(sources) == ["train"]


def test_why_a_data_set_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"text": "a", "label": 1}\n{"text": \n')
    with pytest.raises(ConfigError, match=r"generating the dataset \(.*JSON"):
        hub_sources(DataConfig(), str(tmp_path / "data"))


def test_a_dataset_of_several_configurations(tmp_path: Path) -> None:
    """As in GLUE: the configuration must be named, labels are scores, and those of the test split are withheld."""
    import datasets

    listed = []
    for name, value in {"one": 0.5, "two": -1.0}.items():
        files = []
        for split, label in {"train": value, "test": -1.0}.items():
            rows = datasets.Dataset.from_dict({"text": [name], "label": [label]})
            rows = datasets.concatenate_datasets([rows, rows.map(lambda row: {"label": 2.0})])
            rows = rows if split == "train" else rows.select([0])
            rows.to_parquet(tmp_path / "data" / name / f"{split}.parquet")
            files.append({"split": split, "path": f"{name}/{split}.parquet"})
        listed.append({"config_name": name, "data_files": files})
    (tmp_path / "data/README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")
    with pytest.raises(ConfigError, match="missing.*'one', 'two'.*Fix: --dataset_config_name"):
        hub_sources(DataConfig(), str(tmp_path / "data"))
    for name, first in {"one": "0.5", "two": "-1.0"}.items():
        config = DataConfig(dataset_name="x", dataset_config_name=name, problem_type="regression")
        sources = hub_sources(config, str(tmp_path / "data"))
        assert list(sources) == ["train"]
        assert [row[1:] for row in sources["train"].rows(config)] == [(name, first), (name, "2.0")]
        assert f", {name}, split train" in sources["train"].name


def test_splits_of_other_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in MNLI. Rows are held out although some of these splits may be meant: that is told."""
    import datasets

    (tmp_path / "data").mkdir()
    named = {"train": [0, 1], "validation_matched": [1], "validation_mismatched": [0], "test": [-1]}
    for split, labels in named.items():
        rows = datasets.Dataset.from_dict({"text": [split] * len(labels), "label": labels})
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    files = [{"split": split, "path": f"{split}.parquet"} for split in named]
    about = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
    (tmp_path / "data/README.md").write_text(f"---\n{about}---\n")

    def sources(**names: str) -> dict[str, Source]:
        return hub_sources(DataConfig(dataset_name="x", **names), str(tmp_path / "data"))

    assert list(sources()) == ["train"]
    told = "splits that are not read: validation_matched, validation_mismatched. Fix, if one holds"
    assert told in caplog.text
    caplog.clear()
    sources(validation_file=tmp_path / "rows.csv")
    hub_sources(DataConfig(dataset_name="x"), str(tmp_path / "data"), needs_train=False)
    found = sources(
        validation_split_name="validation_matched", test_split_name="validation_mismatched"
    )
    texts = {name: [row[1] for row in source.rows(DataConfig())] for name, source in found.items()}
    assert texts == {
        "train": ["train"] * 2,
        "validation": ["validation_matched"],
        "test": ["validation_mismatched"],
    }
    assert "not read" not in caplog.text
    with pytest.raises(
        ConfigError, match="no split .validation_match.. Did you mean .validation_matched."
    ):
        sources(validation_split_name="validation_match")
    with pytest.raises(
        ConfigError, match=r"has no split `test` with labels \(not -1 .*Its splits: tra"
    ):
        sources(test_split_name="test")


def test_the_hub_out_of_reach_names_the_quickstart() -> None:
    with pytest.raises(
        ConfigError,
        match="HF_HUB_OFFLINE is set.* folder, or --train_file. .*in a clone (.|\n)*examples/quickstart.yaml",
    ):
        hub_sources(DataConfig(), "fancyzhx/ag_news")
