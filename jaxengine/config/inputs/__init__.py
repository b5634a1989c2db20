"""Options of what prompts hold: chat templates, pictures, videos, sounds, embeddings."""
