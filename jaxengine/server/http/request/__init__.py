"""What an HTTP request brings: body, fields, limits, key, and the errors of refusing it."""
