"""Ways to put admission before an engine; each folder runs on its own, from the repository's root."""
