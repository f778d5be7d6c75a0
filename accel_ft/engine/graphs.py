"""A micro-batch's passes on a GPU as CUDA graphs, one for each shape of batch.

The kernels of a small model take less time than the host needs to launch them one by one, each with
some Python before it. A graph is launched as one. It does what was recorded: the same kernels in
the same order, so the losses, the gradients and dropout's draws of before.

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

MOST = 64  # graphs: all widths up to 512 tokens
SHARE = 1 / 3  # of the memory there is: where the run may need more, the graphs' own might not fit


class Graphs:
    """Passes over micro-batches, recorded where there is anything to record for.

    Args:
        parameters: of the model, which stay where they are in memory, as do their gradients. None
            to record nothing.
        most_tokens: of a micro-batch, padding included.
        adds: gradients, as an update has several micro-batches; else they are written over.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter] = (), most_tokens: int = 0, adds: bool = True
    ) -> None:
        self.parameters = list(parameters)
        self.most_tokens = most_tokens
        self.adds = adds
        self.gradients: list[Any] = []
        self.met: set[torch.Size] = set()
        self.recorded: dict[torch.Size, tuple[Batch, Callable[[], Any], torch.Tensor]] = {}
        self.pool: Any = None  # of memory, which they share, as they run one after the other
        self.stream: Any = None  # that they are recorded on

    @property
    def are_used(self) -> bool:
        """Whether passes are recorded."""
        return bool(self.parameters)

    def __call__(self, passes: Passes, batch: Batch, scale: float) -> torch.Tensor:
        """Return the loss that `passes` gives for a micro-batch, with its gradients put in place.

        Args:
            passes: forward and backward, of a batch and the factor of its loss, a number or a
                scalar on the device. It returns the loss, detached.
            batch: on the device.
            scale: the factor.
        """
        shape = batch["input_ids"].shape
        if not self.are_used:
            return passes(batch, scale)
        gradients = [parameter.grad for parameter in self.parameters]
        if any(now is not then for now, then in zip(gradients, self.gradients, strict=False)):
            self.recorded.clear()  # which put them elsewhere
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
                error.add_note("It is recorded as a CUDA graph; --cuda_graphs false does without.")
                raise
        inputs, replay, loss = self.recorded[shape]
        for name, tensor in inputs.items():
            tensor.fill_(scale) if name == "scale" else tensor.copy_(batch[name])
        replay()
        return loss.clone()  # the next replay writes over it

    def clear_gradients(self, optimizer: Any) -> None:
        """Make ready for the next update."""
        if self.adds:
            optimizer.zero_grad(set_to_none=not self.are_used)

    def _record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        """Record what `work` does on the device; return what does it then, and its result."""
        graph = torch.cuda.CUDAGraph()
        # torch's own is one for all: of a run that ended, it would give memory of this one's back.
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        mode = "thread_local"  # the loader's pins memory meanwhile
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
            result = work()
        self.pool = graph.pool()
        return graph.replay, result

    def _once(self, passes: Passes, batch: Batch, scale: float) -> torch.Tensor:
        """Do the passes, unrecorded."""
        if self.adds:
            return passes(batch, scale)
        if self.recorded:
            return self._in_place(passes, batch, scale)
        for parameter in self.parameters:  # no graph writes there yet
            parameter.grad = None
        return passes(batch, scale)

    def _in_place(self, passes: Passes, batch: Batch, scale: Any) -> torch.Tensor:
        """Do the passes, and add or write all gradients in a few kernels; autograd takes one for
        each.
        """
        held: list[Any] = [(p, p.grad) for p in self.parameters if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        try:
            loss = passes(batch, scale)
            put = torch._foreach_add_ if self.adds else torch._foreach_copy_
            put([gradient for _, gradient in held], [p.grad for p, _ in held])
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
        return loss

    def _is_full(self) -> bool:
        """Return whether the longest micro-batch, which may yet come, leaves no room for more."""
        free, _ = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        wanted = held * self.most_tokens / max(shape.numel() for shape in self.met)
        return len(self.recorded) >= MOST or wanted > SHARE * (free + held)


def can_record(model: Any) -> bool:
    """Return whether a plain model's passes can be recorded: those of the kinds whose mask is made
    by `first_token.py` ask the host for nothing, nor for its dice.

    transformers makes no mask where a batch has no padding, which it asks the device, and in a
    recording always makes one: other kernels, another rounding.
    """
    checkpoints = (getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return reads_first_token(model) and not any(checkpoints)
