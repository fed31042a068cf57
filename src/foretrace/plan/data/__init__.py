"""How a training reads data that may not fit: loader, cache, buffer and order under a limit of memory."""
