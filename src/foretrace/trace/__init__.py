"""What happened: readers, the recorder, and `Trace`, the columns that they fill."""
