"""The start of an engine's device side: devices, weights' places, bundles, kernel proof."""
