"""A classifier as an ONNX file, checked against the model it comes from."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_ft.errors import UserError, first_line

FILE = "model.onnx"
TOLERANCE = 1e-3
LARGEST = 1.9e9  # bytes of weights in model.onnx itself, a protobuf; else in model.onnx.data
SHAPES = ((1, 3), (2, 8), (5, 17))  # rows, tokens


class _Logits(nn.Module):
    """A classifier that takes its inputs by position and returns its logits."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def write_onnx(model: Any, tokenizer: Any, folder: Path) -> float:
    """Write model.onnx, with any number of rows and tokens, and compare it.

    Args:
        model: on the CPU, in evaluation mode.
        tokenizer: tells the names of the inputs: input_ids, attention_mask, maybe token_type_ids.
        folder: to write into.

    Returns:
        The largest difference of a logit between onnxruntime and PyTorch.

    Raises:
        UserError: the difference is too large, or torch cannot write this kind of model.
    """
    import onnxruntime

    known = ("input_ids", "attention_mask", "token_type_ids")
    names = [name for name in known if name in tokenizer.model_input_names]
    known_tokens = getattr(model.config.get_text_config(), "vocab_size", len(tokenizer))
    vocabulary = min(len(tokenizer), known_tokens)
    ends = np.ravel(model.config.eos_token_id if model.config.is_encoder_decoder else ())
    end = int(ends[0]) if ends.size and ends[0] is not None else None
    wrapped, batch = _Logits(model, names).eval(), torch.export.Dim("batch")
    shapes = tuple({0: batch, 1: torch.export.Dim.DYNAMIC} for _ in names)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # of what else is not installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        try:
            torch.onnx.export(
                wrapped,
                tuple(_inputs(names, vocabulary, end, *SHAPES[1]).values()),
                str(folder / FILE),
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=(shapes,),
                external_data=sum(p.nbytes for p in model.parameters()) > LARGEST,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # of the exporter, which does not know all that models do
            raise UserError(
                f"torch cannot write {type(model).__name__} as ONNX: "
                f"{first_line(error.__cause__ or error)}"
            ) from error
    session = onnxruntime.InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
    worst = 0.0
    for rows, tokens in SHAPES:
        inputs = _inputs(names, vocabulary, end, rows, tokens)
        with torch.no_grad():
            ours = wrapped(*inputs.values()).numpy()
        (theirs,) = session.run(["logits"], {name: t.numpy() for name, t in inputs.items()})
        worst = float(np.maximum(worst, np.abs(ours - theirs).max()))  # NaN, where there is one
    if not worst <= TOLERANCE:
        raise UserError(f"{folder / FILE}: its logits differ by {worst:.1e} from the model's")
    return worst


def _inputs(
    names: list[str], vocabulary: int, end: int | None, rows: int, tokens: int
) -> dict[str, torch.Tensor]:
    """Token ids at random, the last row half padding; `end` once a row, where BART looks for it."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "input_ids": torch.randint(0, vocabulary, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.int64),
        "token_type_ids": torch.zeros(rows, tokens, dtype=torch.int64),
    }
    if end is not None:
        ids = values["input_ids"]
        ids[ids == end] = (end + 1) % vocabulary
        ids[:, 0] = end
    if rows > 1:
        values["attention_mask"][-1, tokens // 2 :] = 0
    return {name: values[name] for name in names}
