"""Instructions per request and per streamed chunk, held to committed budgets."""
