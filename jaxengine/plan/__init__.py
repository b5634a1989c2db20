"""`jaxengine plan`: what an engine would allocate on chips that are not present, and what they could do with it."""
