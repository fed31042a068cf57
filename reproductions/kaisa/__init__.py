"""KAISA: what second-order information costs and saves."""
