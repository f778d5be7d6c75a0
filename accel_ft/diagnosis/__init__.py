"""The doctor's checks: plain functions on anybody's model, DataLoader and loop, a cause a file;
examples/doctor.md has the symptoms.
"""
