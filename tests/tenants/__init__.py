"""The tenants and their use in a real store."""
