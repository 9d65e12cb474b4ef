"""Records of a pool's tenants in the store, beside the ledger: those that operators add, and what all of them use.

`records` and `usage_records` are the interfaces; `stored` and `usage` keep them in Redis or Valkey. No admission waits.
"""
