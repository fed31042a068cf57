"""What Pollux's policy rests on: goodput, profiles and the search for allocations."""
