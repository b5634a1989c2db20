"""Pages of the KV pool: their holders, and the prefixes that they hold."""
