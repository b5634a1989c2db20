"""Options of the KV cache: dtypes, tiers, transfers, events, prefixes."""
