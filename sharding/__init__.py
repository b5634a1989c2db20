"""Device meshes and the rules that lay arrays out on them. Knows jax; knows no model and no kernel."""
