"""The training loop, evaluation, and the start, resume and end of a run."""
