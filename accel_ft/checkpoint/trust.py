"""No file of a checkpoint runs code when it is loaded.

Weights are safetensors, and what accelerate pickles (optimizer, loss scaler, random numbers) it
reads with `weights_only`. Two places of torch's distributed checkpoints are unpickled without: the
.metadata, and values that are no tensors inside the .distcp files. Both are read here first, by an
unpickler that knows only the classes that belong there.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from accel_ft.errors import CheckpointError

DTYPES = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
METADATA_CLASSES = {
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


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into it")
        return super().find_class(module, name)


def refuse_code(folder: Path) -> None:
    """Check a checkpoint whose manifest is right but whose maker is unknown.

    Raises:
        CheckpointError: naming the file that would run code.
    """
    for path in folder.glob("custom_checkpoint_*.pkl"):  # objects registered with accelerate
        raise CheckpointError(f"{folder}: {path.name} does not belong into it")
    for metadata in folder.glob("*/.metadata"):
        try:
            _check_shards(metadata)
        except Exception as error:  # a broken pickle fails in any way
            name = metadata.relative_to(folder).parent
            raise CheckpointError(f"{folder}: {name} is not safe to load: {error}") from error


def _check_shards(path: Path) -> None:
    with path.open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    for index, info in metadata.storage_data.items():
        if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path):
            raise CheckpointError(f"{info.relative_path!r} is no file of it")
        if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
            with (path.parent / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
