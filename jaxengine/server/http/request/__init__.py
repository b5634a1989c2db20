"""Parts of HTTP requests: body, fields, limits, key, and the errors of refusing one."""
