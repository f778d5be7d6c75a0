"""The loop, one step of it, and evaluation."""
