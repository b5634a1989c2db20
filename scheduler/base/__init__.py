"""Parts that the whole scheduler shares: requests, their parameters, options, errors."""
