"""Admission around an app that calls its engine in the same process."""
