"""The doctor's checks: plain functions for any model, DataLoader and loop, one file per cause;
examples/doctor.md lists the symptoms.
"""
