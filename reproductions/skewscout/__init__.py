"""SkewScout: traffic of workers with unlike labels, by how they agree and with a controller that looks at the skew."""
