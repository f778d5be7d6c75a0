"""What is unpickled of a sharded checkpoint without `weights_only`."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from accel_ft.checkpoint import trust
from accel_ft.errors import CheckpointError


class Attribute:
    """Pickled as a call of getattr."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self.args


def write(folder: Path, content: object) -> Path:
    (folder / "shards").mkdir(exist_ok=True)
    (folder / "shards/.metadata").write_bytes(pickle.dumps(content))
    return folder


def test_members_of_an_enumeration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this Python pickles them, and as Python 3.11.0 to 3.11.3 do."""
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
