"""The doctor's checks: plain functions on anybody's model, DataLoader and loop, a cause a file."""
