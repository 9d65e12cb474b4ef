"""What `sidecar demo` shows: the same arrivals three times, and what each tier's requests went through."""
