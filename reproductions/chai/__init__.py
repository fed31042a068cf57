"""CHAI (Agarwal et al., ICML 2024): heads that share attention scores, on a small decoder trained here."""
