"""Reads rows from files or the Hub: texts and labels exactly as written, each with its place, such
as "line 7".

Local files are read here, not through `datasets`: its CSV reader turns the cells `NA`, `null` and
'' into None and merges the labels `01` and `1`, and its errors name neither file nor line.
"""

import csv
import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from accel_ft.config import SPLITS, Config, DataConfig
from accel_ft.data.targets import canonical, cut, is_encodable, meant
from accel_ft.errors import ConfigError, DataError, listed, nearest
from accel_ft.runtime.files import sha256
from accel_ft.runtime.hub import fetching

logger = logging.getLogger(__name__)

Record = tuple[str, dict[str, Any] | str]  # place ("line 7"); columns, or the fault
Text = str | tuple[str, str]  # one text, or a pair
Row = tuple[str, Text, str]  # place, text, label
T = TypeVar("T")

COLUMN_KEYS = ("text_column", "text_pair_column", "label_column", "id_column")
MAX_FAULTS = 10  # reading stops at this many
SAVED = ("state.json", "dataset_dict.json")  # written by `datasets`' save_to_disk
COLUMNS_SHOWN = 40
ABSENT = ("missing", "empty")  # what messages call a cell without a value
COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\3\4": "zip, as Excel's", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Source:
    """One set of rows, not read yet.

    Attributes:
        name: file path or Hub name, for messages.
        fingerprint: changes whenever the content does.
        records: starts reading; yields (place, columns), or (place, fault).
        label_names: names of integer labels where the source declares them.
        path: of a local file; else None.
        numbers: row number in the data set of each labelled row, int64 [n]; None: all have labels.
    """

    name: str
    fingerprint: str
    records: Callable[[], Iterator[Record]]
    label_names: tuple[str, ...] | None = None
    path: Path | None = None
    numbers: NDArray[np.int64] | None = None

    def is_unchanged(self) -> bool:
        """Whether a local file still has the content it had when it was opened."""
        try:
            return self.path is None or sha256(self.path) == self.fingerprint
        except OSError:
            return False

    def row_numbers(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map ids, which count labelled rows only, to row numbers in the source, from 0."""
        return ids if self.numbers is None else self.numbers[ids]

    def rows(self, config: DataConfig) -> Iterator[Row]:
        """Yield place, text (or pair of texts) and label of every row.

        Args:
            config: names the columns, and says what label cells mean.

        Raises:
            DataError: a column is missing (at once), there are no rows, or some are faulty (after
                the last row, or the tenth fault).
        """
        found = False
        for row in sound_rows(self.name, self._judged(config)):
            found = True
            yield row
        if not found:
            raise DataError(f"{self.name}: has no rows")

    def _judged(self, config: DataConfig) -> Iterator[tuple[Row, str | None]]:
        """Yield each row with its fault, or None."""
        columns_checked, told = False, {""}  # what labels may be is told once for each cause
        kind = suffix_of(self.path) if self.path else ""
        for place, record in self.records():
            if isinstance(record, str):
                yield (place, "", ""), f"{place}: {record}"
                continue
            if not columns_checked:
                check_columns(whose_columns(self.name, place, kind), record, config)
                columns_checked = True
            cell = record.get(config.label_column)
            label = canonical(cell, config, self.label_names)
            text, fault = read_text(record, config.text_column, config.text_pair_column)
            if fault is None and label is None:
                shown = _show(cell)
                words = "" if shown in ABSENT else meant(cell, config.problem_type)
                fault = f"{config.label_column} is {shown}" + f", not {words}" * (words not in told)
                told.add(words)
            yield (place, text, str(label)), fault and f"{place}: {fault}"

    def texts(self, config: DataConfig, wanted: set[int]) -> dict[int, Text]:
        """Return the texts of some rows by their number, 0 for the first."""
        rows = islice(self.rows(config), max(wanted, default=-1) + 1)
        return {number: text for number, (_, text, _) in enumerate(rows) if number in wanted}


def sound_rows(
    name: str, judged: Iterable[tuple[T, str | None]], most: int = MAX_FAULTS
) -> Iterator[T]:
    """Yield rows up to the first faulty one; from there on, only collect faults.

    Args:
        name: of the source.
        judged: each row with its fault; None for a sound row.
        most: number of faults at which reading stops.

    Raises:
        DataError: lists the faults.
    """
    faults: list[str] = []
    try:
        for row, fault in judged:
            if fault is not None:
                faults.append(fault)
                if len(faults) == most:
                    break
            elif not faults:
                yield row
    except DataError as error:  # the source cannot be read any further
        if not faults:
            raise
        faults.append(str(error))
    if faults:
        count = f"{len(faults)}{' or more' * (len(faults) == most > 1)}"
        raise DataError(
            f"{name}: {count} faulty row{'s' * (len(faults) > 1)}. Fix or remove:\n  "
            + "\n  ".join(faults)
        )


def file_source(path: Path, columns: set[str] | None = None) -> Source:
    """Open a local csv, tsv, json, jsonl or parquet file; its fingerprint is its SHA-256."""
    suffix, name = suffix_of(path), str(path)
    return Source(
        name, sha256(path), lambda: read_records(name, suffix, columns), path=path.absolute()
    )


def suffix_of(path: Path) -> str:
    """Return the file format that the suffix of a file's name stands for."""
    return path.suffix.lower().removeprefix(".")


def used_columns(config: Config) -> set[str]:
    """Return the columns that the keys of a command's configuration name."""
    return {str(getattr(config, key)) for key in COLUMN_KEYS if getattr(config, key, None)}


def read_records(path: str, file_format: str, columns: set[str] | None = None) -> Iterator[Record]:
    """Yield (place, columns) for each row of a file, or of standard input where `path` is "-"; for
    a row that cannot be read, (place, fault).

    Args:
        path: of the file.
        file_format: csv, tsv, json, jsonl, parquet, or lines (one text a line, column "text").
        columns: of a parquet file, those to read, None for all; the others get the value None.

    Raises:
        DataError: names file and line.
    """
    if file_format == "parquet":
        yield from _read_parquet(path, columns)
        return
    name = "standard input" if path == "-" else path
    with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
        lines = _text_lines(file, name)
        if file_format in ("csv", "tsv"):
            yield from _read_delimited(lines, name, "," if file_format == "csv" else "\t")
        elif file_format == "json":
            yield from _read_json("".join(line for _, line in lines), name)
        elif file_format == "lines":
            yield from ((f"line {n}", {"text": line.rstrip("\r\n")}) for n, line in lines)
        else:
            yield from ((f"line {n}", _json_row(line)) for n, line in lines if line.strip())


def _text_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line), decoded from UTF-8 without leading byte-order marks."""
    for number, raw in enumerate(file, start=1):
        for start, kind in COMPRESSED.items() if number == 1 else ():
            if raw.startswith(start):
                raise DataError(f"{name}: is compressed ({kind}). Fix: unpack it")
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}: line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not "
                "UTF-8. Fix: save the file as UTF-8"
            ) from error
        if "\0" in line:
            raise DataError(
                f"{name}: line {number}: holds a NUL character. Fix: save the file as UTF-8 if it "
                "is UTF-16, else remove the character"
            )
        yield number, line.lstrip("\ufeff") if number == 1 else line


def _read_delimited(
    numbered: Iterator[tuple[int, str]], name: str, delimiter: str
) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # its default of 128 KiB refuses long texts
    start = next(numbered, (1, ""))
    texts = (line for _, line in chain([start], numbered))
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        first = reader.line_num + 1
        place = f"line {first}"
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            fault = f"the row that starts here: {error}; close or double its quotes, or save the "
            fault += "file with LF line ends"
            quoted = re.match('"[^"]*"([;|,\t])', start[1])  # the header's first column
            others = quoted.groups() if quoted and quoted[1] != delimiter else ()
            hint = _other_delimiter(header or others)
            if header is None or hint:
                raise DataError(f"{name}: {place}: {hint or fault}") from error
            yield place, fault
            continue
        if not fields:
            continue  # a blank line is not a row
        if header is None:
            header = fields
            _refuse_twice(name, header)
        elif len(fields) != len(header):
            if hint := _other_delimiter(header):  # else many rows have the same fault
                raise DataError(f"{name}: {place}: {len(fields)} fields; {hint}")
            yield place, f"{len(fields)} fields, where the header has {len(header)}"
        elif delimiter == "\t" and any(
            "\n" in field and ("\t" in field or len(header) == 1) for field in fields
        ):
            lines = f"lines {first} to {reader.line_num}"
            mend = "if that is meant, save as csv; else double its quotes"
            yield place, f"one quoted field spans {lines}; {mend}"
        else:
            yield place, dict(zip(header, fields, strict=True))
    if header is None:
        raise DataError(f"{name}: is empty")


def _other_delimiter(columns: Collection[Any]) -> str:
    """Return a hint if a header is a single column, but looks like several; else ""."""
    signs = {";", "\t", "|", ","} & set(*columns) if len(columns) == 1 else ()
    told = "separate a csv by commas, a tsv by tabs"
    return f"the header is one column with {min(signs)!r}: {told}" if signs else ""


def _refuse_twice(name: str, columns: list[str]) -> None:
    """Refuse duplicate column names; unnamed columns, which spreadsheets write, do not count."""
    twice = sorted({column for column in columns if column and columns.count(column) > 1})
    if twice:
        raise DataError(f"{name}: column {twice[0]!r} occurs twice")


def _json_row(line: str) -> dict[str, Any] | str:
    try:
        return _row(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"


def _read_json(text: str, name: str) -> Iterator[Record]:
    if text.strip() == "":
        raise DataError(f"{name}: is empty")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name}: is not JSON ({error}). Fix: if each line is an object, it is jsonl"
        ) from error
    if isinstance(items, dict) and isinstance(items.get("data"), list):
        items = items["data"]
    if not isinstance(items, list):
        raise DataError(
            f"{name}: holds {_show(items)}. Allowed: a list of objects, or {{'data': [...]}}"
        )
    for number, item in enumerate(items, start=1):
        yield f"item {number}", _row(item)


def _row(item: Any) -> dict[str, Any] | str:
    return item if isinstance(item, dict) else f"is {_show(item)}, not an object"


def _read_parquet(path: str, columns: set[str] | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = dict.fromkeys(file.schema_arrow.names)
        _refuse_twice(path, file.schema_arrow.names)
        wanted = None if columns is None else [name for name in names if name in columns]
        batches = file.iter_batches(batch_size=1024, columns=wanted)
        records = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(records, start=1):
            yield f"row {number}", names | record
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def hub_sources(config: DataConfig, name: str, needs_train: bool = True) -> dict[str, Source]:
    """Open a Hub data set (or a folder `datasets` can read): its train, validation and test splits,
    if it has them.

    Args:
        config: names its configuration, splits and columns.
        name: of the data set.
        needs_train: whether a missing training split is an error.

    Raises:
        ConfigError: the data set cannot be loaded, or lacks a split.
    """
    import datasets

    if Path(name).is_file():
        raise ConfigError(f"dataset_name={name}: is a file. Fix: --train_file {name}")
    with fetching("dataset_name", name):
        is_saved = any((Path(name) / file).is_file() for file in SAVED)
        if is_saved and config.dataset_config_name is None:
            loaded = datasets.load_from_disk(name)
            loaded = {"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded
        else:
            loaded = datasets.load_dataset(name, config.dataset_config_name)
    sources = {}
    name = f"{name}, {config.dataset_config_name}" if config.dataset_config_name else name
    named: dict[str, str | None] = {s: getattr(config, f"{s}_split_name") for s in SPLITS}
    for split, wanted in named.items():
        its_name = wanted or split
        is_others = wanted is None and split in named.values()
        if its_name in loaded and not is_others:
            rows = loaded[its_name].with_format(None)  # a saved data set may have a format set
            labelled = _labelled(rows, config.label_column)
            if len(labelled) < len(rows):
                logger.warning(
                    "%s: %d of its %d %s rows have no label (-1 or null) and are left out; "
                    "`datasets` reads NA and None in a csv as null, --train_file as text",
                    name, len(rows) - len(labelled), len(rows), its_name,
                )  # fmt: skip
            if len(labelled):
                sources[split] = _hub_source(f"{name}, split {its_name}", rows, labelled, config)
        if split not in sources and (wanted is not None or (split == "train" and needs_train)):
            meant = "" if its_name in loaded else nearest(its_name, loaded)
            why = " with labels (not -1 or null)" if its_name in loaded else ""
            raise ConfigError(
                f"dataset_name={name}: has no split `{its_name}`{why}.{meant} "
                f"Its splits: {', '.join(map(str, loaded))}"
            )
    others = [str(each) for each in loaded if each not in [named[s] or s for s in SPLITS]]
    lacks_validation = "validation" not in sources and config.validation_file is None
    if others and needs_train and lacks_validation:
        logger.info(
            "%s: splits that are not read: %s. Fix, if one holds the validation rows: "
            "--validation_split_name", name, listed(others),
        )  # fmt: skip
    return sources


def _labelled(rows: Any, label_column: str) -> NDArray[np.int64]:
    """Return the numbers of labelled rows: benchmarks withhold the labels of a test split, or of
    rows without annotator agreement.
    """
    feature = rows.features.get(label_column)
    if feature is None:
        return np.arange(len(rows))
    labels = rows.select_columns([label_column]).with_format("arrow")[:][label_column]
    found = labels.is_valid().to_numpy()
    if getattr(feature, "dtype", "").startswith(("int", "float")):
        known = found & (labels.fill_null(-1).to_numpy() != -1)
        if not known.any() or hasattr(feature, "names"):  # a plain number -1 may be a label
            found = known
    return np.flatnonzero(found)


def _hub_source(name: str, rows: Any, labelled: NDArray[np.int64], config: DataConfig) -> Source:
    used = used_columns(config)  # so that no audio or image column is decoded
    chosen = rows.select_columns([name for name in rows.column_names if name in used])

    def records() -> Iterator[Record]:
        check_columns(name, dict.fromkeys(rows.column_names), config)
        numbers = iter(labelled)
        for batch in chosen.select(labelled).iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                yield f"row {next(numbers)}", dict(zip(batch, values, strict=True))

    feature = rows.features.get(config.label_column)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # or a list's elements
    label_names = tuple(names) if names else None
    return Source(name, _content_hash(chosen), records, label_names, numbers=labelled)


def _content_hash(rows: Any) -> str:
    """Return the SHA-256 of the cells. `datasets`' own fingerprint hashes the code that made them,
    and stays the same when that code runs on other files.
    """
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        digest.update(json.dumps(batch.to_pydict(), default=str).encode())
    return digest.hexdigest()


def whose_columns(name: str, place: str, file_format: str) -> str:
    """What to name where columns are missing: a json's rows have their own, others their file's."""
    return f"{name}, {place}" if file_format in ("json", "jsonl") else name


def check_columns(where: str, record: dict[str, Any], config: Config) -> None:
    """Check that a row has the columns that the keys of a command's configuration name.

    Raises:
        DataError: names the missing columns, and `where` they are missing.
    """
    wanted = {key: getattr(config, key, None) for key in COLUMN_KEYS}
    names = [cut(str(column)) for column in record]
    faults = [
        f"{key}={column}: no such column in {where}.{nearest(column, names)} "
        f"Allowed: {listed(names, COLUMNS_SHOWN)}"
        for key, column in wanted.items()
        if column is not None and column not in record
    ]
    if faults and (hint := _other_delimiter(record.keys())):
        raise DataError(f"{where}: {hint}")  # it explains them all
    if faults:
        raise DataError("\n  ".join(faults))


def check_first_rows(config: DataConfig) -> None:
    """Check the columns of each file's first row, before anything is loaded.

    Raises:
        DataError: names the missing columns of all files.
    """
    faults = []
    for path in config.files.values():
        suffix = suffix_of(path)
        if suffix == "json":  # its first row is known only once all of it is read
            continue
        try:
            place, first = next(read_records(str(path), suffix, used_columns(config)), ("", ""))
            if isinstance(first, dict):
                check_columns(whose_columns(str(path), place, suffix), first, config)
        except DataError as error:
            faults.append(str(error))
    if faults:
        raise DataError("\n  ".join(faults))


def read_text(record: dict[str, Any], column: str, pair: str | None) -> tuple[Text, str | None]:
    """Return a row's text, or pair of texts, and its fault, or None."""
    texts = []
    for name in (column,) if pair is None else (column, pair):
        text = record.get(name)
        if not isinstance(text, str):
            return "", f"{name} is {_show(text)}, not a text"
        if not is_encodable(text):
            return "", f"{name} has an unpaired surrogate, which is no valid UTF-8"
        texts.append(text)
    return (texts[0] if pair is None else (texts[0], texts[1])), None


def _show(value: Any) -> str:
    """Return a value as messages show it, cut short."""
    if isinstance(value, str) and not value.strip():
        return ABSENT[1]
    return ABSENT[0] if value is None else cut(json.dumps(value, default=str))
