"""Demo of `sidecar demo`: the same arrivals three times, and the latencies of each tier."""
