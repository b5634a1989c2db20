"""Pages of the KV pool: who holds them, and which prefixes they hold."""
