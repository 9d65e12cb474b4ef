"""The one model of an engine: continuous batching in steps, with a KV cache of blocks.

It knows no clock. `sidecar simulate` and benchmarks jump from event to event; `sidecar emulate` sleeps for each step.
"""
