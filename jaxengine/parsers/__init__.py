"""From the text a model writes to an answer's parts: content, reasoning and tool calls, as the text comes."""
