"""Where a distributed run stalls, checked by differential runs, and which cloud instances would suit it (Stash)."""
