"""`sidecar doctor`: finds out whether an engine's priority has an effect, and if not, why not.

Three things must be true before a priority has an effect: the field reaches the engine, the engine's scheduler uses it,
and requests really queue. The direction of the numbers must be right too. Each fails without an error. So the doctor
does not trust what it reads: a small burst of requests shows the order in which the engine serves them.
"""
