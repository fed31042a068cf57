"""Named optimisations: each predicts its effect on a `TaskGraph` and says what it assumes."""
