"""Admission mounted into a FastAPI app."""
