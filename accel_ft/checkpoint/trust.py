"""Refuse checkpoints that would run code when they are loaded.

Weights are safetensors; accelerate reads its pickles (optimizer, loss scaler, random states) with
`weights_only`. Two parts of a torch distributed checkpoint are unpickled without it: .metadata, and
the values in .distcp files that are not tensors. Both are read here first: the values with
`weights_only`, .metadata by an unpickler that makes inert stand-ins of a few allowed classes.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from accel_ft.errors import CheckpointError

DTYPES = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"} | DTYPES,
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}  # fmt: skip


class _StandIn:
    def __init__(self, *args: Any) -> None:
        if args and type(self).__name__ == "_StorageInfo":  # fields that no check here would see
            raise pickle.UnpicklingError("_StorageInfo is made of arguments")

    def __setstate__(self, state: Any) -> None:
        """Called by pickle's BUILD, on instances only: on a class, `self` would be missing. A tuple
        could set attributes, too; only TensorProperties, which is never read here, may take one.
        """
        if isinstance(state, dict):
            self.__dict__.update(state)
        elif type(self).__name__ != "TensorProperties":
            raise pickle.UnpicklingError(f"{type(self).__name__} is built of a {type(state)}")


class _Member(_StandIn):
    """getattr(_MEM_FORMAT_ENCODING, name), as which Python 3.11.0 to 3.11.3 pickle Enum members."""

    def __new__(cls, owner: Any, name: Any) -> Any:
        of_enum = isinstance(owner, type) and owner.__name__ == _MEM_FORMAT_ENCODING.__name__
        if not of_enum or name not in _MEM_FORMAT_ENCODING.__members__:
            raise pickle.UnpicklingError(f"takes {name} of an object")
        return super().__new__(cls)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _Member
        if name not in METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in it")
        return dict if name == "OrderedDict" else type(name, (_StandIn,), {})


def refuse_code(folder: Path) -> None:
    """Refuse a checkpoint that would run code: a valid manifest does not say who made it.

    Raises:
        CheckpointError: naming the file that may run code.
    """
    strange = [*folder.glob("custom_checkpoint_*.pkl")]  # objects registered with accelerate
    places = [folder, *(path for path in folder.glob("*") if path.is_dir())]  # symlinks, too
    # Metadata of a single rank, which torch reads if .metadata is missing.
    strange += [path for place in places for path in place.glob("__*.metadata")]
    for path in strange:
        raise CheckpointError(f"{folder}: {path.relative_to(folder)} does not belong in it")
    # In `folder` too: if it is named like a shard folder, accelerate reads the shards in it.
    for metadata in [path for place in places for path in place.glob(".metadata")]:
        try:
            _check_shards(metadata)
        except Exception as error:  # a broken pickle may raise anything
            name = metadata.relative_to(folder)
            raise CheckpointError(f"{folder}: {name} is not safe to load: {error}") from error


def _check_shards(path: Path) -> None:
    with path.open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if type(metadata).__name__ != "Metadata":
        raise CheckpointError("it is no torch metadata")
    kinds = {name: type(entry).__name__ for name, entry in metadata.state_dict_metadata.items()}
    if not all(isinstance(name, str) for name in kinds):  # equal keys may have unequal stand-ins
        raise CheckpointError("some names in it are not text")
    for index, info in metadata.storage_data.items():
        if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path):
            raise CheckpointError(f"{info.relative_path!r} is no shard of it")
        if vars(info).get("transform_descriptors"):
            raise CheckpointError(f"{info.relative_path} is compressed")
        if kinds[index.fqn] != "TensorStorageMetadata":
            with (path.parent / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
