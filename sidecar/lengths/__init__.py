"""Output lengths: what a request will really use."""
