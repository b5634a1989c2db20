"""Parts that vision towers share."""
