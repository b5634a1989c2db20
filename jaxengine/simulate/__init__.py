"""`jaxengine simulate`: the engine's own loop and scheduler over a trace, with costs of steps in place of a device."""
