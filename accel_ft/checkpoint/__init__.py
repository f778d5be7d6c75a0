"""The state of a run after an update, and how it is written to disk atomically."""
