"""Admission mounted into the replicas of Ray Serve."""
