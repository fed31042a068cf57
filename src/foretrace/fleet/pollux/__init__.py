"""What Pollux's policy rests on: goodput and profiles."""
