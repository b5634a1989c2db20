"""Parts that the checks of all options share: errors, types of values, platforms, a user's own code."""
