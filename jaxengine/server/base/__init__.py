"""Parts that all of the server's interfaces share: options, names, keys, prompts, routing."""
