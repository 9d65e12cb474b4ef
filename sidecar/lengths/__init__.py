"""Lengths of prompts and outputs: the tokens that a request will hold, and those that it will really use."""
