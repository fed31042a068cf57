"""Recording a script without touching it: `launch` starts it, `shim` and `session` work inside it."""
