"""A ResNet whose layers look their products up: accuracy beside performance per area."""
