"""The spans of a request's stay at the door."""
