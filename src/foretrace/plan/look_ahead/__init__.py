"""What look-ahead over embedding rows gains: predicted from a trace of look-ups, then run for real."""
