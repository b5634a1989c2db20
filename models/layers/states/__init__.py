"""Layers with a recurrent state: Mamba, delta nets, short convolutions, lightning attention."""
