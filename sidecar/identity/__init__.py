"""Who asks: the tenant and tier of a request, by its API key, its headers, or a signed token of an issuer."""
