"""Counts losses, samples, tokens and time from one train event to the next."""

import math
import time
from dataclasses import dataclass
from typing import Any

from accel_ft.runtime.watch import Watch


@dataclass
class Meter:
    """One rank's counts since the last train event."""

    loss_sum: float = 0.0
    """This rank's sum of weighted losses."""
    loss_weight: float = 0.0
    """Weight of all ranks' losses."""
    samples: int = 0
    """Over all ranks; so is `tokens`."""
    tokens: int = 0
    padded_tokens: int = 0
    """This rank's tokens, padding included."""
    since: float = 0.0

    def restart_clock(self) -> None:
        """Measure speed from here on."""
        self.samples = self.tokens = self.padded_tokens = 0
        self.since = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Exclude time in which nothing was trained."""
        self.since += seconds

    def read(self, watch: Watch) -> dict[str, Any]:
        """Return loss, speed and padding over all ranks, and reset the counts. Collective."""
        counted = watch.all_gather((self.loss_sum, self.padded_tokens))
        loss_sums, padded = zip(*counted, strict=True)
        seconds = time.monotonic() - self.since
        measured = {
            "loss": math.fsum(loss_sums) / self.loss_weight if self.loss_weight > 0 else None,
            "samples_per_second": round(self.samples / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 1),
            "padding": round(1 - self.tokens / sum(padded), 4) if any(padded) else None,
        }
        self.loss_sum = self.loss_weight = 0.0
        self.restart_clock()
        return measured
