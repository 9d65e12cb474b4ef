"""Open-loop replay of a trace against a real server, with each tier's latencies."""
