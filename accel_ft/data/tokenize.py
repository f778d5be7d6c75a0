"""Rows -> token ids in a folder on disk: made once, keyed by content, memory-mapped.

A store holds, for n rows and N tokens in all:

    tokens.bin   int32 [N]      the rows' token ids, one after the other
    types.bin    int8 [N]       their token types; empty if the model has none, or all would be 0
    offsets.bin  int64 [n + 1]  row i's tokens are tokens[offsets[i] : offsets[i + 1]]
    labels.bin   int32 [n]      index into meta.json's "labels"; for regression, float32 [n]
    texts.bin    uint64 [n]     hash of each text, to find duplicates
    meta.json    distinct labels, in order of first occurrence, and the place of each; counts
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants
from numpy.typing import NDArray

from accel_ft.config import DataConfig
from accel_ft.data.plan import Ids
from accel_ft.data.sources import Source, Text
from accel_ft.errors import ConfigError, DataError
from accel_ft.runtime.files import sha256

logger = logging.getLogger(__name__)

INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # of a model
FORGOTTEN_SECONDS = 24 * 3600  # until a staging folder counts as abandoned

STORE_VERSION = 5  # of the layout above; part of the key
KEYS = {
    "text_column", "text_pair_column", "label_column", "problem_type", "label_separator",
    "max_seq_length",
}  # fmt: skip
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
# Settings that do not change token ids; `max_seq_length` alone decides where a text is cut.
WITHOUT_EFFECT = {"name_or_path", "is_local", "local_files_only", "model_max_length"}
ROWS_AT_ONCE = 1000  # a fast tokenizer spreads each call over the cores
CHARACTERS_AT_ONCE = 2_000_000  # it holds some 40 bytes per character before truncation


class TokenStore:
    """The tokenised rows of one source.

    Attributes:
        name: of the source, for messages.
        fingerprint: hash of content, columns, tokenizer and max_seq_length; 64 hex digits.
        labels: every distinct label cell, as `canonical` returns it, in order of first occurrence.
        label_places: place of each label's first occurrence.
        label_names: names that the source declares, in its order; None if it declares none.
        label_codes: index of each row's label in `labels`, int32 [n]; for regression, each row's
            number, float32 [n].
        text_hashes: hash of each row's text, uint64 [n].
        greatest_id: the greatest token id.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.fingerprint = folder, name, folder.name
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.labels: list[str] = meta["labels"]
        self.label_places: list[str] = meta["label_places"]
        self.label_names: list[str] | None = meta["label_names"]
        self.num_empty_texts: int = meta["num_empty_texts"]
        self.num_cut_texts: int = meta["num_cut_texts"]
        self.greatest_id: int = meta["greatest_id"]
        self._tokens = _map(folder / "tokens.bin", np.int32, meta["num_tokens"])
        self._offsets = _map(folder / "offsets.bin", np.int64, meta["num_rows"] + 1)
        kind = np.float32 if meta["are_numbers"] else np.int32
        self.label_codes = _map(folder / "labels.bin", kind, meta["num_rows"])
        self.text_hashes = _map(folder / "texts.bin", np.uint64, meta["num_rows"])
        self._types = _map(folder / "types.bin", np.int8, meta["num_tokens"] * meta["has_types"])

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path, str]]:
        # A worker process maps the files itself, instead of getting a pickled copy of them.
        return TokenStore, (self.folder, self.name)

    def __len__(self) -> int:
        return len(self.label_codes)

    def tokens(self, row: int) -> NDArray[np.int32]:
        """Return the token ids of a row, int32 [1, T], or [2, T] with their types."""
        where = slice(self._offsets[row], self._offsets[row + 1])
        ids = self._tokens[None, where]
        return np.concatenate([ids, self._types[None, where]]) if len(self._types) else ids

    def lengths(self, rows: Ids) -> NDArray[np.int64]:
        """Return the numbers of tokens of `rows` [k], int64 [k]."""
        lengths: NDArray[np.int64] = self._offsets[rows + 1] - self._offsets[rows]
        return lengths


def tokenize(source: Source, config: DataConfig, tokenizer: Any) -> TokenStore:
    """Open the source's token store; make it first if it does not exist yet.

    Safe to call from several processes: a store is written to a staging folder of its own, and
        published by an atomic rename.

    Args:
        source: rows.
        config: names the columns, and max_seq_length, to which texts are truncated, special tokens
            included.
        tokenizer: of the model.

    Raises:
        DataError: rows are faulty (names file and line), or the store cannot be read or written.
    """
    identity = [
        STORE_VERSION,
        source.fingerprint,
        source.label_names,
        config.model_dump(mode="json", include=KEYS),
        tokenizer_fingerprint(tokenizer),
        tokenizer.pad_token_id,  # an empty text may become this token
        *["one end"] * getattr(tokenizer, "split_special_tokens", False),  # see `_one_end`
        source.path and source.path.suffix.lower(),  # the same bytes differ as csv and as tsv
    ]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    folder = cache_folder() / key
    was_there = os.path.exists(folder)  # asked first: another process may make it meanwhile
    try:
        return TokenStore(folder, source.name)
    except PermissionError as error:
        raise DataError(f"{error}. Fix: HF_HOME=a folder of your own") from error
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        if was_there:
            logger.warning("%s: damaged token cache, rebuilding it (%s)", folder, error)
            if folder.is_dir():  # another process may be removing it too
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.unlink(missing_ok=True)
    logger.info("tokenising %s", source.name)
    try:
        return _make_store(folder, source, config, tokenizer)
    except OSError as error:
        if error.errno not in NO_ROOM and folder.parent.is_dir():
            raise
        raise DataError(  # HF_HOME and output_dir may be on different disks
            f"{source.name}: cannot be tokenised into {folder.parent}: {error}. "
            "Fix: free some room there, or HF_HOME=another folder"
        ) from error


def _make_store(folder: Path, source: Source, config: DataConfig, tokenizer: Any) -> TokenStore:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(".making-*"):  # left by killed processes
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (old, *old.iterdir()))
            if time.time() - newest > FORGOTTEN_SECONDS:
                shutil.rmtree(old)
    staging = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        staging.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp's is private
        _write_store(staging, source, config, tokenizer)
        keep_no_truncation(tokenizer)
        if not source.is_unchanged():  # its rows would get the old content's hash
            raise DataError(f"{source.name}: changed while it was read. Fix: start again")
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has published the same content
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    try:
        return TokenStore(folder, source.name)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:  # still damaged
        raise DataError(
            f"{folder}: damaged token cache, which cannot be rebuilt ({error}). Fix: have its "
            "owner remove it, or HF_HOME=a folder of your own"
        ) from error


def cache_folder() -> Path:
    """Return where token stores live: $HF_HOME/accel_ft/tokens."""
    return Path(constants.HF_HOME or Path.home() / ".cache/huggingface") / "accel_ft" / "tokens"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of all settings that decide the token ids of a text, 64 hex digits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation"), state.pop("padding")  # each call may change these
    else:
        files: list[str] = []
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(NotImplementedError):
            # Covers merges as well, whatever files the tokenizer keeps them in.
            paths = tokenizer.save_vocabulary(folder, filename_prefix=None) or ()
            files = [sha256(path) for path in sorted(map(Path, paths))]
        settings = [
            f"{key}: {value}"
            for key, value in sorted(tokenizer.init_kwargs.items())
            if not (value is None or key in WITHOUT_EFFECT or key.endswith("_file"))
        ]
        state = [sorted(tokenizer.get_vocab().items()), settings, files]
    names = sorted(tokenizer.model_input_names)  # whether rows have token types
    splits = getattr(tokenizer, "split_special_tokens", False)
    identity = [type(tokenizer).__name__, tokenizer.truncation_side, names, splits, state]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _write_store(folder: Path, source: Source, config: DataConfig, tokenizer: Any) -> None:
    rows, max_seq_length = source.rows(config), config.max_seq_length
    codes: dict[str, int] = {}
    places: list[str] = []
    counted = ("num_rows", "num_tokens", "num_empty_texts", "num_cut_texts", "greatest_id")
    meta: dict[str, Any] = dict.fromkeys(counted, 0)
    has_types, are_numbers = False, config.problem_type == "regression"
    with contextlib.ExitStack() as files:
        tokens, offsets, types, labels, hashes = (
            files.enter_context((folder / f"{name}.bin").open("wb"))
            for name in ("tokens", "offsets", "types", "labels", "texts")
        )
        offsets.write(np.zeros(1, np.int64).tobytes())  # numpy's tofile hides a full disk
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            texts = [text for _, text, _ in chunk]
            arrays, num_cut = token_ids(tokenizer, texts, max_seq_length)
            flat = np.concatenate(arrays, axis=1)
            tokens.write(flat[0].tobytes())
            meta["greatest_id"] = max(meta["greatest_id"], int(flat[0].max()))
            if len(flat) > 1:
                types.write(flat[1].astype(np.int8).tobytes())
                has_types = True
            ends = meta["num_tokens"] + np.cumsum([ids.shape[1] for ids in arrays])
            offsets.write(ends.astype(np.int64).tobytes())
            for place, text, label in chunk:
                parts = (text,) if isinstance(text, str) else text
                if not are_numbers and label not in codes:
                    codes[label] = len(codes)
                    places.append(place)
                meta["num_empty_texts"] += not all(part.strip() for part in parts)
                hashes.write(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest())
            kind, code_of = (np.float32, float) if are_numbers else (np.int32, codes.__getitem__)
            labels.write(np.array([code_of(label) for _, _, label in chunk], kind).tobytes())
            meta["num_rows"] += len(chunk)
            meta["num_tokens"] = int(ends[-1])
            meta["num_cut_texts"] += num_cut
    meta |= {"labels": list(codes), "label_places": places, "label_names": source.label_names}
    meta |= {"has_types": has_types, "are_numbers": are_numbers}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def token_ids(
    tokenizer: Any, texts: list[Text], max_seq_length: int
) -> tuple[list[NDArray[np.int32]], int]:
    """Tokenise texts, or pairs of texts, cut at `max_seq_length` tokens, special tokens included.

    Returns:
        token ids of each text, int32 [1, T]; [2, T], ids and types, if the model uses token types
        that are not all 0. And the number of truncated texts; a slow tokenizer's: of texts that
        reach the limit.
    """
    arrays, num_cut, start, size = list[NDArray[np.int32]](), 0, 0, 0
    for stop, text in enumerate(texts, start=1):
        size += len(text) if isinstance(text, str) else sum(map(len, text))
        if size >= CHARACTERS_AT_ONCE or stop == len(texts):
            some, num_cut_of_them = _encode(tokenizer, texts[start:stop], max_seq_length)
            arrays.extend(some)
            num_cut, start, size = num_cut + num_cut_of_them, stop, 0
    return arrays, num_cut


def _encode(
    tokenizer: Any, texts: list[Text], max_seq_length: int
) -> tuple[list[NDArray[np.int32]], int]:
    are_pairs = not isinstance(texts[0], str)
    columns = zip(*texts, strict=True) if are_pairs else (texts,)
    special = tokenizer.num_special_tokens_to_add(pair=are_pairs)
    if max_seq_length <= special > 0:  # would leave nothing of the text, or not truncate
        what = "a pair of texts" if are_pairs else "a text"
        raise ConfigError(
            f"max_seq_length={max_seq_length}: {what} has {special} special tokens. "
            f"Allowed: more than {special}"
        )
    cut = {"truncation": True, "max_length": max_seq_length}  # a pair's longer text first
    has_own_end = getattr(tokenizer, "split_special_tokens", False)
    encoded = tokenizer(
        *map(list, columns),
        **cut,
        return_attention_mask=False,
        return_special_tokens_mask=has_own_end,
        return_token_type_ids="token_type_ids" in tokenizer.model_input_names
        and (are_pairs or has_types_of_single_texts(tokenizer, **cut)),
    )
    # A text without tokens, where the tokenizer adds no special ones, becomes one pad token.
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    empty = [[tokenizer.pad_token_id], [0]][: len(names)]
    rows: Any = zip(*(encoded[name] for name in names), strict=True)
    if has_own_end:
        rows = map(partial(_one_end, tokenizer.eos_token_id), rows, encoded["special_tokens_mask"])
    arrays = [np.array(row if row[0] else empty, np.int32) for row in rows]
    if encoded.encodings is not None:
        return arrays, sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    return arrays, sum(row.shape[1] >= max_seq_length for row in arrays)


def _one_end(end: int, row: Sequence[list[int]], is_special: list[int]) -> Sequence[list[int]]:
    """Drop end tokens that are pieces of the text: T5's vocabulary has </s>, as in <s>10</s>."""
    if len(is_special) != len(row[0]):  # some slow tokenizers return another length
        return row
    kept = [special or token != end for token, special in zip(row[0], is_special, strict=True)]
    return [list(compress(part, kept)) for part in row]


def has_types_of_single_texts(tokenizer: Any, **cut: Any) -> bool:
    """Whether a single text gets token types that are not all 0, as XLNet's and Funnel's do.

    Args:
        cut: truncation, as in the other calls: a tokenizer keeps the last one, for all threads.
    """
    return any(tokenizer("", return_token_type_ids=True, **cut).get("token_type_ids", ()))


def keep_no_truncation(tokenizer: Any) -> None:
    """Reset a tokenizer's truncation, so that its saved copy truncates nothing by default."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        tokenizer.backend_tokenizer.no_truncation()


def _map(path: Path, dtype: type, length: int) -> NDArray[Any]:
    """Memory-map a flat array, and check its size: the file may be truncated."""
    mapped = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
    if len(mapped) != length:
        raise ValueError(f"{path.name} has {len(mapped)} values, not {length}")
    return mapped
