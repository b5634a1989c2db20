"""Options of how steps run: compilation, pipelines, recording, profiling, sleep."""
