"""/v1/chat/completions/derender and the one of completions: answers of /inference/v1/generate as those of OpenAI."""
