"""Run a micro-batch's forward and backward pass on a GPU as a CUDA graph, one per batch shape.

The kernels of a small model take less time than the host needs to launch them one by one, each with
some Python before it. A graph takes a single launch. It replays the recorded kernels in their
order, so losses, gradients and dropout masks are the same as without it.

A shape is recorded when it comes for the second time: its first passes have loaded its kernels.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_ft.data.loader import Batch
from accel_ft.model.first_token import reads_first_token

logger = logging.getLogger(__name__)

Passes = Callable[[Batch, Any], torch.Tensor]

MOST = 64  # graphs: enough for all widths up to 512 tokens
SHARE = 1 / 3  # of free + reserved memory: if a run may need more, graphs might not fit beside it


class Graphs:
    """Runs the passes over micro-batches, and records them unless `parameters` is empty.

    Args:
        parameters: of the model. Graphs hold the addresses of these and of their gradients. Empty:
            record nothing.
        most_tokens: of the largest micro-batch, padding included.
        accumulates: whether gradients add up over several micro-batches; else they are overwritten.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] = (),
        most_tokens: int = 0,
        accumulates: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self.most_tokens = most_tokens
        self.accumulates = accumulates
        self.gradients: list[Any] = []
        self.met: set[torch.Size] = set()
        self.recorded: dict[torch.Size, tuple[Batch, Callable[[], Any], torch.Tensor]] = {}
        self.pool: Any = None  # memory that all graphs share, as they run one after the other
        self.stream: Any = None  # the stream that graphs are recorded on

    @property
    def are_used(self) -> bool:
        """Whether passes are recorded."""
        return bool(self.parameters)

    def __call__(self, passes: Passes, batch: Batch, scale: float) -> torch.Tensor:
        """Run `passes` on a micro-batch: set or add its gradients, and return its loss.

        Args:
            passes: forward and backward; takes a batch and the factor of its loss, a number or a
                scalar tensor on the device, and returns the loss, detached.
            batch: on the device.
            scale: the factor of the loss.
        """
        shape = batch["input_ids"].shape
        if not self.are_used:
            return passes(batch, scale)
        gradients = [parameter.grad for parameter in self.parameters]
        if any(now is not then for now, then in zip(gradients, self.gradients, strict=False)):
            self.recorded.clear()  # the graphs write to the old gradients
            self.pool = None
        if shape not in self.recorded:
            there = any(gradient is not None for gradient in gradients)
            if shape not in self.met or not there or self._is_full():
                self.met.add(shape)
                return self._once(passes, batch, scale)
            if not self.recorded:
                logger.info("micro-batches run as CUDA graphs, one for each shape")
            self.gradients = gradients
            inputs = {name: tensor.clone() for name, tensor in batch.items()}
            inputs["scale"] = inputs["weights"].new_empty(())
            work = partial(self._in_place, passes, inputs, inputs["scale"])
            try:
                self.recorded[shape] = (inputs, *self._record(work))
            except Exception as error:
                error.add_note("While recording a CUDA graph. To do without: --cuda_graphs false")
                raise
        inputs, replay, loss = self.recorded[shape]
        for name, tensor in inputs.items():
            tensor.fill_(scale) if name == "scale" else tensor.copy_(batch[name])
        replay()
        return loss.clone()  # the next replay overwrites it

    def clear_gradients(self, optimizer: Any) -> None:
        """Clear the gradients after an update; a no-op if the next pass overwrites them."""
        if self.accumulates:
            optimizer.zero_grad(set_to_none=not self.are_used)

    def _record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        """Record what `work` does on the device; return a function to replay it, and its result."""
        graph = torch.cuda.CUDAGraph()
        # torch's default capture stream is shared by all runs of a process: one that has ended
        # would free memory of this one.
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        mode = "thread_local"  # the loader's thread may pin memory during the capture
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
            result = work()
        self.pool = graph.pool()
        return graph.replay, result

    def _once(self, passes: Passes, batch: Batch, scale: float) -> torch.Tensor:
        """Run the passes without a graph."""
        if self.accumulates:
            return passes(batch, scale)
        if self.recorded:
            return self._in_place(passes, batch, scale)
        for parameter in self.parameters:  # no graph writes to these gradients yet
            parameter.grad = None
        return passes(batch, scale)

    def _in_place(self, passes: Passes, batch: Batch, scale: Any) -> torch.Tensor:
        """Run the passes, then add or copy all gradients with a few kernels; autograd would take
        one per parameter.
        """
        held: list[Any] = [(p, p.grad) for p in self.parameters if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        try:
            loss = passes(batch, scale)
            put = torch._foreach_add_ if self.accumulates else torch._foreach_copy_
            put([gradient for _, gradient in held], [p.grad for p, _ in held])
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
        return loss

    def _is_full(self) -> bool:
        """Return whether to record no more: `MOST` exist, or the longest batch may lack memory."""
        free, _ = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        wanted = held * self.most_tokens / max(shape.numel() for shape in self.met)
        return len(self.recorded) >= MOST or wanted > SHARE * (free + held)


def can_record(model: Any) -> bool:
    """Return whether a plain model's passes can be recorded: with a mask from `first_token.py` and
    no gradient checkpointing, they neither sync with the host nor use its random numbers.

    For other kinds, transformers asks the device whether a batch has padding, and makes no mask if
    not; during a capture it always makes one: other kernels, different rounding.
    """
    checkpoints = (getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return reads_first_token(model) and not any(checkpoints)
