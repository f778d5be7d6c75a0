"""One against many: the same global batches on one process and on all, update by update."""

from collections.abc import Sequence

import numpy as np

from accel_ft.diagnosis.finding import Finding, Verdict, check

DIVERGED = 3  # times the first loss


@check("one against many")
def same_curve(
    ours: Sequence[Sequence[float]], alone: Sequence[Sequence[float]], tolerance: float = 1e-4
) -> Finding:
    """Compare loss and gradient norm of each update with those of one process.

    Args:
        ours, alone: (loss, gradient norm) of each update, of the run and of one process that reads
            the same global batches.
        tolerance: relative: float32 differs by about 1e-6, bf16 by 1e-2. A norm far below that of
            other updates, where gradients cancel, is mostly rounding: differences are relative to
            at least a tenth of the greatest value.
    """
    if not ours or len(ours) != len(alone):
        return Verdict.FAIL(f"{len(ours)} updates against {len(alone)}", "the same job for both")
    a, b = np.array(ours, np.float64), np.array(alone, np.float64)
    least = np.maximum(0.1 * np.abs(b).max(axis=0), 1e-12)
    gaps = np.abs(a - b) / np.maximum(np.abs(b), least)
    far = np.flatnonzero(~(gaps <= tolerance).all(axis=1))  # NaN counts as far
    if len(far):
        first = int(far[0]) + 1
        grown = b[:first, 0].max()
        if grown > DIVERGED * abs(b[0, 0]):
            return Verdict.SKIP(
                f"on one process, too, the loss grows from {b[0, 0]:.3f} to {grown:.3f} until "
                f"update {first}, and rounding errors with it",
                "use a lower learning_rate, and more warmup_steps",
            )
        mine, theirs = a[first - 1], b[first - 1]
        if not np.isfinite(theirs).all():
            return Verdict.FAIL(
                f"update {first}: loss {theirs[0]}, gradient norm {theirs[1]} on one process, too",
                "check pretrained weights and labels; a lower learning_rate, more warmup_steps",
            )
        return Verdict.FAIL(
            f"update {first}: loss {mine[0]:.6f} against {theirs[0]:.6f}, gradient norm "
            f"{mine[1]:.6f} against {theirs[1]:.6f} on one process",
            "divide the loss by the label weight of the whole global batch; give each rank its "
            "share of the same batch",
        )
    return Verdict.PASS(f"{len(gaps)} updates, greatest relative difference {gaps.max():.1e}")
