"""Service gain: the engines' measured speed, and what each request earned of what it could. No clock and no I/O."""
