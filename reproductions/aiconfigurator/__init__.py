"""aiconfigurator's table of measured servers, cleaned, and how near the step times of `foretrace llm` come to it."""
