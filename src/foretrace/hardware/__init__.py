"""What machines can do: the catalog of devices."""
