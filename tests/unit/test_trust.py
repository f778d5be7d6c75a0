"""The parts of a sharded checkpoint that torch unpickles without `weights_only` must not run code."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from accel_ft.checkpoint import trust
from accel_ft.errors import CheckpointError


class Attribute:
    """Pickled as a call of getattr with these arguments."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self.args


def write(folder: Path, content: object) -> Path:
    (folder / "shards").mkdir(exist_ok=True)
    (folder / "shards/.metadata").write_bytes(pickle.dumps(content))
    return folder


def test_members_of_an_enumeration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pickled by this Python, and by Python 3.11.0 to 3.11.3."""
    metadata = Metadata({}, TensorProperties(), {})
    trust.refuse_code(write(tmp_path, metadata))
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING,
        "__reduce_ex__",
        lambda self, protocol: (getattr, (type(self), self.name)),
    )
    trust.refuse_code(write(tmp_path, metadata))
    assert b"getattr" in (tmp_path / "shards/.metadata").read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (print, r"builtins.print does not belong in it"),
        (MetadataIndex("x"), "it is no torch metadata"),
    ],
)
def test_other_content(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"not safe to load: {words}"):
        trust.refuse_code(write(tmp_path, content))


@pytest.mark.parametrize(
    "args",
    [
        (Metadata, "__init__"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (MetadataIndex("x"), "TORCH_CONTIGUOUS_FORMAT"),
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", None),
    ],
)
def test_no_other_attribute(args: tuple[Any, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not safe to load: (takes|_Member.__new__)"):
        trust.refuse_code(write(tmp_path, Metadata({}, Attribute(*args), {})))


class Built:
    """Pickled as a class, its arguments, and the state to set on the instance."""

    def __init__(self, kind: type, state: object, *args: object) -> None:
        self.kind, self.state, self.args = kind, state, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, self.args, self.state


class Other(str):
    """A string now, a MetadataIndex once it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return MetadataIndex, (), {"fqn": str(self), "offset": None, "index": None}


def test_attributes_that_are_set_unseen(tmp_path: Path) -> None:
    """pickle also sets attributes by a pair of states, or by arguments to the class."""
    whole: dict[str, Any] = {"state_dict_metadata": {}, "storage_data": {}, "planner_data": None}
    trust.refuse_code(write(tmp_path, Built(Metadata, whole, {})))
    with pytest.raises(CheckpointError, match="Metadata is built of a <class 'tuple'>"):
        trust.refuse_code(write(tmp_path, Built(Metadata, (None, whole), {})))
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1}
    hidden = Built(_StorageInfo, place, "x", 0, 1, ["zstd"])
    entries = {"w": TensorProperties()}
    with pytest.raises(CheckpointError, match="_StorageInfo is made of arguments"):
        trust.refuse_code(write(tmp_path, Metadata(entries, storage_data={"w": hidden})))
    with pytest.raises(CheckpointError, match="some names in it are not text"):
        trust.refuse_code(write(tmp_path, Metadata({Other("w"): BytesStorageMetadata()})))


@pytest.mark.parametrize("place", ["", "shards", "link"])
def test_metadata_anywhere(tmp_path: Path, place: str) -> None:
    """accelerate reads shards from the folder itself if it is named like theirs; torch follows links."""
    tmp_path = tmp_path / "checkpoint"
    tmp_path.mkdir()
    if place == "link":
        (tmp_path.parent / "elsewhere").mkdir()
        (tmp_path / "link").symlink_to("../elsewhere")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / ".metadata").write_bytes(pickle.dumps(Attribute(Path, "home")))
    with pytest.raises(CheckpointError, match=f"{place}.*metadata is not safe to load"):
        trust.refuse_code(tmp_path)
    (tmp_path / place / ".metadata").rename(tmp_path / place / "__0.metadata")
    with pytest.raises(CheckpointError, match="__0.metadata does not belong in it"):
        trust.refuse_code(tmp_path)


@pytest.mark.parametrize(
    ("value", "about", "refused"),
    [
        ({"lr": 0.1}, {}, None),
        (Attribute(Path, "home"), {}, "Weights only load failed|getattr"),
        ({"lr": 0.1}, {"relative_path": "../__0_0.distcp"}, "is no shard of it"),
        ({"lr": 0.1}, {"transform_descriptors": ["zstd"]}, "is compressed"),
    ],
)
def test_values_that_are_no_tensors(
    value: object, about: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    """torch unpickles them without `weights_only`, from the file and offset in .metadata."""
    torch.save(value, tmp_path / "value")
    content = (tmp_path / "value").read_bytes()
    place = {"relative_path": "__0_0.distcp", "offset": 3, "length": len(content)} | about
    entries = {"rate": BytesStorageMetadata()}
    write(tmp_path, Metadata(entries, storage_data={MetadataIndex("rate"): _StorageInfo(**place)}))
    (tmp_path / "shards/__0_0.distcp").write_bytes(b"abc" + content + b"def")
    if refused is None:
        trust.refuse_code(tmp_path)
    else:
        with pytest.raises(CheckpointError, match=refused):
            trust.refuse_code(tmp_path)
