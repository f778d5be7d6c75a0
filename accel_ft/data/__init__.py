"""Rows -> token ids on disk -> plan (which sample goes where) -> padded micro-batches."""
