"""Open-loop replay of a trace against a real server, and what each tier's requests went through."""
