"""What learned output lengths gain, in virtual time."""
