"""What the scheduler's parts share: requests, their parameters, options, errors."""
