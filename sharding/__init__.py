"""Device meshes and the rules that lay arrays out on them; independent of models and kernels."""
