"""What depends on what: `TaskGraph`, the builder that makes one from a `Trace`, edits and invariants."""
