"""Parts that programs, extensions and runner share: device state, program signatures, memory."""
