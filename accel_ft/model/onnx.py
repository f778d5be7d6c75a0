"""Exports a classifier to an ONNX file, and checks it against the PyTorch model."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_ft.data.tokenize import INPUTS
from accel_ft.errors import UserError, first_line

FILE = "model.onnx"
TOLERANCE = 1e-3
LARGEST = 1.9e9  # bytes of weights inside model.onnx, a protobuf; more go to model.onnx.data
TEXTS = (["one"], ["one two three", "four"], ["five six " * 8, *"abcd"])


class _Logits(nn.Module):
    """A classifier that takes its inputs by position and returns its logits."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def write_onnx(model: Any, tokenizer: Any, folder: Path) -> float:
    """Write model.onnx, for any number of rows and tokens, and compare its logits.

    Args:
        model: on the CPU, in evaluation mode.
        tokenizer: names the inputs: input_ids, attention_mask, possibly token_type_ids.
        folder: to write into.

    Returns:
        The largest difference of a logit between onnxruntime and PyTorch.

    Raises:
        UserError: the difference is too large, or this kind of model cannot be exported, or run.
    """
    import onnxruntime
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    names = [name for name in INPUTS if name in tokenizer.model_input_names]
    wrapped, rows = _Logits(model, names).eval(), torch.export.Dim("batch")
    shapes = tuple({0: rows, 1: torch.export.Dim.DYNAMIC} for _ in names)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        try:
            program = torch.onnx.export(
                wrapped,
                tuple(_encoded(tokenizer, TEXTS[1], names).values()),
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=(shapes,),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            ClearMetadataAndDocStringPass()(program.model)  # they name local files and lines
            is_large = sum(p.nbytes for p in model.parameters()) > LARGEST
            program.save(folder / FILE, external_data=is_large)
        except Exception as error:  # the exporter does not support all models
            raise UserError(
                f"torch cannot write {type(model).__name__} as ONNX: "
                f"{first_line(error.__cause__ or error)}"
            ) from error
    batches = [_encoded(tokenizer, texts, names) for texts in TEXTS]
    try:
        session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
        found = [
            session.run(["logits"], {name: tensor.numpy() for name, tensor in batch.items()})[0]
            for batch in batches
        ]
    except Exception as error:  # onnxruntime's share no base class
        raise UserError(
            f"onnxruntime cannot run {type(model).__name__}: {first_line(error)}"
        ) from error
    worst = scale = 0.0
    for batch, theirs in zip(batches, found, strict=True):
        with torch.no_grad():
            ours = wrapped(*batch.values()).numpy()
        worst = float(np.maximum(worst, np.abs(ours - theirs).max()))  # `max` may lose a NaN
        scale = max(scale, float(np.abs(ours).max()))
    if not worst <= TOLERANCE * max(scale, 1.0):
        raise UserError(f"{FILE}: its logits differ by {worst:.1e} from the model's")
    return worst


def _encoded(tokenizer: Any, texts: list[str], names: list[str]) -> dict[str, torch.Tensor]:
    tensors = tokenizer(texts, padding=True, return_tensors="pt")
    return {name: tensors[name] for name in names}
